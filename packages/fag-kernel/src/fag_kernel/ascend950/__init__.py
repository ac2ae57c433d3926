"""Ascend 950 side."""
