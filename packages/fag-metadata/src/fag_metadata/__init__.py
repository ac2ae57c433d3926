"""Task split of flash attention and its gradient: who computes which tiles, as an int32 tensor.

`flash_attn_metadata` makes it; `unpack`, `check` and `balance` say what is in it, if it is right, how even.
"""

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .api import flash_attn_metadata, metadata_for
from .errors import ContractError, InvalidProblemError, InvalidTypeError, MetadataError, UnsupportedError
from .identity import Report, check, check_metadata
from .layout import FORMAT_VERSION, ForwardSplit, GradSplit, Route, Split, get_include
from .problem import AttentionProblem
from .terms import TARGETS, Layout, Lengths, MaskMode, Target, TensorSpec

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
    "loads": ("Balance", "Load", "balance"),
    "routes": ("RouteChoice", "select_route"),
    "view": ("Metadata", "unpack"),
}
"""Modules that are imported when a name of theirs is first asked for: importing the package stays quick."""


def __getattr__(name: str) -> Any:
    for module, names in _ON_FIRST_USE.items():
        if name in names:
            from importlib import import_module

            value = globals()[name] = getattr(import_module(f".{module}", __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
