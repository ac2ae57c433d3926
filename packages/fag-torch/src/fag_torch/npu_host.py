"""What this machine has for NPUs: torch_npu, CANN, the compiler of our kernels, and which SoC it is.

Nothing is looked for until an operator is called with an NPU tensor, or `fag_torch.doctor()` asks; torch_npu
is never imported here.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from fag_kernel import cann
from fag_kernel.ascend950 import finalize
from fag_metadata.errors import UnsupportedError
from fag_torch import npu_routes
from fag_torch.npu_routes import ACLNN, ASCEND950

if TYPE_CHECKING:
    from fag_metadata import Target
    from fag_torch.npu_routes import Direction

_SYMBOLS: Final[dict[Direction, str]] = {"forward": cann.FORWARD, "backward": cann.GRAD}


def missing_torch_npu() -> str | None:
    """Why there is no torch_npu to work with, or None. It is not imported to find out."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    if "torch_npu" not in sys.modules:
        return "torch_npu is installed but not imported"
    return None


def missing_kernels() -> str | None:
    """Why our kernels cannot be finished for the device, or None."""
    if finalize.find_hivmc() is None:
        return f"{finalize.HIVMC}, CANN's compiler that finishes our kernels, is not found"
    return None


def missing(direction: Direction) -> dict[str, tuple[str, ...]]:
    """What each route lacks on this host for one direction, as phrases."""
    shared = [reason for reason in (missing_torch_npu(), cann.missing_runtime()) if reason]
    own = {
        ACLNN: (cann.missing_operator(_SYMBOLS[direction]),),
        ASCEND950: (cann.missing_launcher(), missing_kernels()),
    }
    return {
        route: tuple(dict.fromkeys([*shared, *(reason for reason in own[route] if reason)]))
        for route in npu_routes.ROUTES
    }


def is_present() -> bool:
    """Whether the user has loaded torch_npu and it sees a device."""
    backend: Any = getattr(torch, "npu", None) if "torch_npu" in sys.modules else None
    return backend is not None and bool(backend.is_available())


def default_device() -> torch.device:
    """Where a tensor lies that no argument places: on the NPU if there is one, else on the CPU."""
    return torch.device("npu" if is_present() else "cpu")


def target_of(op: str, device: torch.device) -> Target:
    """The target of an NPU, by the name that CANN gives its SoC.

    Args:
        op: Operator the user called, for the message.
        device: An NPU.

    Raises:
        UnsupportedError: It is not an Ascend 950, or cannot be asked.
        CannError: CANN's runtime fails.
    """
    if not is_present():
        reason = missing_torch_npu() or "torch_npu sees no device"
        raise UnsupportedError(
            f"{op}: device must be cpu or an NPU that torch_npu sees, got {device} ({reason})."
        )
    return npu_routes.target_of_soc(op, cann.soc_name())
