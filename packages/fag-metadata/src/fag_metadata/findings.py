"""What the checks of a metadata tensor report."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """One thing that is wrong with a metadata tensor.

    Attributes:
        part: "head", "forward" or "backward".
        field: Name of the field, as in the tables of layout.py.
        text: What must hold, and what was found.
    """

    part: str
    field: str
    text: str
