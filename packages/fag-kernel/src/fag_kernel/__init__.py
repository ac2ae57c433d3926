"""Host tiling and CPU kernels of flash attention and its gradient, on NumPy arrays and raw pointers.

`fag_kernel.abi` is the interface for frameworks. Nothing here imports torch.
"""

from fag_kernel._version import __version__
from fag_kernel.contract import ACCEPTS, KERNEL_ABI, check_metadata_package, missing_metadata_package

try:
    import fag_metadata
except ImportError as reason:
    raise missing_metadata_package(reason) from None
check_metadata_package(fag_metadata)

__all__ = ["ACCEPTS", "KERNEL_ABI", "__version__"]
