"""Flash attention and its gradient on the CPU, and the host tiling of the gradient for Ascend 950.

- `flash_attn`, `flash_attn_grad`: on NumPy arrays, with CANN's arguments.
- `plan`: how a device kernel would run a problem; `TilingPlan`, `TilingKey`, `TilingData` are its parts.
- `fag_kernel.abi`: the interface for frameworks, pointers and strides; `KERNEL_ABI` is its version.

Nothing here imports torch.
"""

from fag_kernel._version import __version__
from fag_kernel.contract import ACCEPTS, KERNEL_ABI, check_metadata_package, missing_metadata_package

try:
    import fag_metadata
except ImportError as reason:
    raise missing_metadata_package(reason) from None
check_metadata_package(fag_metadata)

from fag_kernel.numpy_api import flash_attn, flash_attn_grad  # noqa: E402 - after the versions are known to fit
from fag_kernel.plan import TilingPlan, TraceRow, plan  # noqa: E402
from fag_kernel.tiling_data import TilingData  # noqa: E402
from fag_kernel.tiling_key import TilingKey  # noqa: E402

__all__ = [
    "ACCEPTS",
    "KERNEL_ABI",
    "TilingData",
    "TilingKey",
    "TilingPlan",
    "TraceRow",
    "__version__",
    "flash_attn",
    "flash_attn_grad",
    "plan",
]
