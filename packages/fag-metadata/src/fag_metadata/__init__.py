"""Task split of flash attention and its gradient: the problem, who computes which tiles, and the int32 tensor
that says so.

Needs NumPy only. Public names:

- `flash_attn_metadata`: CANN's function; returns the tensor.
- `AttentionProblem`, `MaskMode`, `Layout`, `TensorSpec`: what is computed, and every argument rule.
- `Target`, `TARGETS`: the machines that splits are made for.
- `balance`: how even a tensor loads the cores.
- `FORMAT_VERSION`: version of the tensor's layout.
"""

from ._version import __version__
from .api import flash_attn_metadata, metadata_for
from .balance import Balance, Load, balance
from .check import Report, check, check_metadata
from .errors import ContractError, InvalidProblemError, InvalidTypeError, MetadataError, UnsupportedError
from .layout import FORMAT_VERSION, ForwardSplit, GradSplit, Route, Split, get_include
from .problem import AttentionProblem
from .routes import RouteChoice, select_route
from .targets import TARGETS, Target
from .terms import Layout, Lengths, MaskMode, TensorSpec
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
