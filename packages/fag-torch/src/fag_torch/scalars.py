"""From what a user passes for a number, a name or a flag to what a schema of torch.library takes.

An error names the argument: the dispatcher would say only that no overload fits, and would turn a tensor into
an int by itself (and wait for its device).
"""

from __future__ import annotations

from typing import Any, Final

import torch

from fag_metadata import MaskMode
from fag_metadata.arguments import check_softmax_scale, parse_int, parse_layout
from fag_metadata.errors import type_error

_INT64: Final = 2**63
_MODES: Final = {mode.name: int(mode) for mode in MaskMode}


def an_int(op: str, name: str, value: Any) -> Any:
    """An int within int64; a symbolic one stays as it is."""
    if (type(value) is int and -_INT64 <= value < _INT64) or isinstance(value, torch.SymInt):
        return value
    return parse_int(op, name, value, -_INT64, _INT64 - 1)


def optional_int(op: str, name: str, value: Any) -> Any:
    """Likewise; None stays None."""
    return None if value is None else an_int(op, name, value)


def mask_mode(op: str, value: Any) -> int:
    """The int of a mask mode. Usual forms first: torch.compile of older releases cannot follow the rest."""
    if type(value) is str and value.upper() in _MODES:
        return _MODES[value.upper()]
    if type(value) is MaskMode or (type(value) is int and -_INT64 <= value < _INT64):
        return int(value)  # the operator refuses the wrong ones
    return int(MaskMode.parse(op, value))


def scale(op: str, value: Any) -> Any:
    """A float; the operator refuses one that is not finite."""
    if type(value) is float or isinstance(value, torch.SymFloat):
        return value
    return check_softmax_scale(op, value)


def flag(op: str, name: str, value: Any) -> bool:
    """A bool; an int is one for the schema, other things are true or false by accident."""
    if isinstance(value, int):
        return bool(value)
    raise type_error(op, name, "must be a bool", type(value).__name__)


def layout(op: str, name: str, value: Any) -> Any:
    """The name of a layout; a wrong name is left to the operator."""
    return value if type(value) is str else parse_layout(op, name, value).value


def mask_and_layouts(
    op: str,
    mask: Any,
    win_left: Any,
    win_right: Any,
    max_seqlen_q: Any,
    max_seqlen_kv: Any,
    layout_q: Any,
    layout_kv: Any,
    layout_out: Any,
) -> tuple[int, Any, Any, Any, Any, Any, Any, Any]:
    """The arguments that the two operators of CANN have in common, each as the functions above give it."""
    return (
        mask_mode(op, mask),
        an_int(op, "win_left", win_left),
        an_int(op, "win_right", win_right),
        an_int(op, "max_seqlen_q", max_seqlen_q),
        an_int(op, "max_seqlen_kv", max_seqlen_kv),
        layout(op, "layout_q", layout_q),
        layout(op, "layout_kv", layout_kv),
        layout(op, "layout_out", layout_out),
    )
