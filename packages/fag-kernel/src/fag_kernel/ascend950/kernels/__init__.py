"""Triton sources of the device kernels; importing a module of this package needs Triton.

Device code in Triton's language, outside of the type checker: every loop and branch is one of the device.
tiles.py, sums.py and split.py are shared; the others hold the kernels that catalog.py names.
"""
