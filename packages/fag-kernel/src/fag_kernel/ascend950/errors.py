"""Errors of the Ascend 950 artefacts."""

from __future__ import annotations


class ArtefactError(RuntimeError):
    """A shipped file is missing, damaged or does not match its manifest."""


class CompilerError(RuntimeError):
    """The compiler that is needed here is missing or failed; the message says which command to run."""
