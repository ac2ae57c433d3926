"""Task split of flash attention and its gradient: the problem, who computes which tiles, and the int32 tensor
that says so.

Needs NumPy only. Public names:

- `flash_attn_metadata`: CANN's function; returns the tensor.
- `AttentionProblem`, `MaskMode`, `Layout`, `TensorSpec`: what is computed, and every argument rule.
- `Target`, `TARGETS`: the machines that splits are made for.
- `balance`, `check`, `unpack`: how even, how right, and what is in it.
- `FORMAT_VERSION`: version of its layout.
"""

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .api import flash_attn_metadata, metadata_for
from .errors import ContractError, InvalidProblemError, InvalidTypeError, MetadataError, UnsupportedError
from .identity import Report, check, check_metadata
from .layout import FORMAT_VERSION, ForwardSplit, GradSplit, Route, Split, get_include
from .problem import AttentionProblem
from .targets import TARGETS, Target
from .terms import Layout, Lengths, MaskMode, TensorSpec

if TYPE_CHECKING:
    from .loads import Balance, Load, balance
    from .routes import RouteChoice, select_route
    from .view import Metadata, unpack

__all__ = [
    "FORMAT_VERSION",
    "TARGETS",
    "AttentionProblem",
    "Balance",
    "ContractError",
    "ForwardSplit",
    "GradSplit",
    "InvalidProblemError",
    "InvalidTypeError",
    "Layout",
    "Lengths",
    "Load",
    "MaskMode",
    "Metadata",
    "MetadataError",
    "Report",
    "Route",
    "RouteChoice",
    "Split",
    "Target",
    "TensorSpec",
    "UnsupportedError",
    "__version__",
    "balance",
    "check",
    "check_metadata",
    "flash_attn_metadata",
    "get_include",
    "metadata_for",
    "select_route",
    "unpack",
]

_ON_FIRST_USE = {
    "Balance": "loads",
    "balance": "loads",
    "Load": "loads",
    "RouteChoice": "routes",
    "select_route": "routes",
    "Metadata": "view",
    "unpack": "view",
}
"""Names whose module is imported when they are first asked for, so that importing the package stays quick."""


def __getattr__(name: str) -> Any:
    module = _ON_FIRST_USE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value
