"""The operators on NPU tensors (PrivateUse1): which route could run them, and what each one lacks.

Nothing is looked for until an operator is called with an NPU tensor, or `fag_torch.doctor()` asks; torch_npu
is never imported here. This release has no device code: every call is refused with the reasons of every
route.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

import fag_kernel
from fag_metadata import TARGETS
from fag_metadata.errors import UnsupportedError
from fag_torch._version import __version__
from fag_torch.cpu import FRONT

RUNTIME_LIBRARY: Final = "libascendcl.so"
CUSTOM_LIBRARY: Final = "libcust_opapi.so"
GRAD_SYMBOL: Final = "aclnnInnerFlashAttnGrad"


class RouteState(NamedTuple):
    """What stands in the way of one route.

    Attributes:
        name: "aclnn" (CANN's own package runs the operator) or "ascend950" (our compiled kernels do).
        missing: Reasons, each a phrase; empty if the route can run.
    """

    name: str
    missing: tuple[str, ...]


def routes() -> tuple[RouteState, ...]:
    """Every route on an NPU in the order they are tried, with what each one lacks.

    Example:
        >>> [route.name for route in routes()]
        ['aclnn', 'ascend950']
    """
    shared = [reason for reason in (missing_torch_npu(), missing_runtime()) if reason]
    launch = f"fag-torch {__version__} has no device code for this route"
    found = []
    for name, own in (("aclnn", missing_custom_package()), ("ascend950", missing_kernels())):
        found.append(RouteState(name, (*shared, *([own] if own else []), launch)))
    return tuple(found)


def missing_torch_npu() -> str | None:
    """Why there is no torch_npu to work with, or None. It is not imported to find out."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    if "torch_npu" not in sys.modules:
        return "torch_npu is installed but not imported"
    return None


def missing_runtime() -> str | None:
    """Why CANN's runtime cannot be loaded, or None."""
    return _missing_library(RUNTIME_LIBRARY, "the CANN runtime")


def missing_custom_package() -> str | None:
    """Why CANN's own gradient operator cannot be called, or None."""
    library = _custom_library()
    reason = _missing_library(library, "CANN's custom operator package")
    if reason is None and not hasattr(ctypes.CDLL(library), GRAD_SYMBOL):
        reason = f"{library} has no symbol {GRAD_SYMBOL}"
    return reason


def missing_kernels() -> str | None:
    """Why our compiled Ascend 950 kernels cannot be used, or None."""
    if importlib.util.find_spec("fag_kernel.ascend950") is None:
        return f"fag-kernel {fag_kernel.__version__} holds no compiled kernel for Ascend 950"
    return None


def is_present() -> bool:
    """Whether the user has loaded torch_npu and it sees a device."""
    backend: Any = getattr(torch, "npu", None) if "torch_npu" in sys.modules else None
    return backend is not None and bool(backend.is_available())


def target_of(device: torch.device) -> str:
    """The SoC name of an NPU, as a name in fag_metadata.TARGETS.

    Args:
        device: An NPU.

    Raises:
        UnsupportedError: It is not an Ascend 950, or cannot be asked.
    """
    if not is_present():
        raise UnsupportedError(
            f"flash_attn_metadata: device must be cpu or an NPU that torch_npu sees, got {device} "
            f"({missing_torch_npu() or 'torch_npu sees no device'})."
        )
    name = str(torch.npu.get_device_name(device))  # type: ignore[attr-defined]
    if name not in TARGETS:
        raise UnsupportedError(f"flash_attn_metadata: device must be an Ascend 950, got {name}.")
    return name


def flash_attn(*args: Any, **kwargs: Any) -> Any:
    """`cann_ops_transformer::flash_attn` on an NPU."""
    return refuse("flash_attn")


def flash_attn_grad(*args: Any, **kwargs: Any) -> Any:
    """`cann_ops_transformer::flash_attn_grad` on an NPU."""
    return refuse("flash_attn_grad")


def attention_forward(*args: Any, **kwargs: Any) -> Any:
    """`fag::attention_forward` on an NPU."""
    return refuse(FRONT)


def attention_backward(*args: Any, **kwargs: Any) -> Any:
    """`fag::attention_backward` on an NPU."""
    return refuse(FRONT)


def refuse(op: str) -> None:
    """Raises the error that says what every route lacks.

    Args:
        op: Operator the user called.

    Raises:
        UnsupportedError: Always.
    """
    reasons = " ".join(f"Route {route.name}: {'; '.join(route.missing)}." for route in routes())
    raise UnsupportedError(
        f"{op}: no route can run this call on an NPU. {reasons} On a CPU the same call runs."
    )


def _custom_library() -> str:
    roots = [Path(root) for root in os.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(os.pathsep) if root]
    opp = os.environ.get("ASCEND_OPP_PATH")
    if opp:
        roots += sorted(Path(opp, "vendors").glob("*"))
    for root in roots:
        library = root / "op_api" / "lib" / CUSTOM_LIBRARY
        if library.is_file():
            return str(library)
    return CUSTOM_LIBRARY


def _missing_library(library: str, what: str) -> str | None:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return f"{what} ({library}) does not load: {error}"
    return None
