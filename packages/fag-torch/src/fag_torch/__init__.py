"""Flash attention and its gradient as PyTorch operators, on the CPU and on Ascend NPUs.

Importing registers the operators and does nothing else: no device is touched, and torch_npu, triton,
matplotlib and transformers are not imported.

- `flash_attention`: differentiable in q, k, v and sinks, and through the lse.
- `flash_attn_func`, `flash_attn_varlen_func`: names and meaning of the flash-attn package.
- `flash_attn_metadata`, `flash_attn`, `flash_attn_grad`: CANN's signatures; also in
  torch.ops.cann_ops_transformer.
- `MaskMode`: which keys a query may see.
- `doctor`: what is installed and which route a call would take.
"""

from fag_torch import contracts

# Before anything that needs the siblings: a version skew is one sentence, not a traceback elsewhere.
contracts.check()

from fag_metadata import MaskMode  # noqa: E402
from fag_torch import register  # noqa: E402
from fag_torch._version import __version__  # noqa: E402
from fag_torch.compat import flash_attn_func, flash_attn_varlen_func  # noqa: E402
from fag_torch.contracts import ACCEPTS  # noqa: E402
from fag_torch.diagnosis import doctor  # noqa: E402
from fag_torch.functional import flash_attention, flash_attn, flash_attn_grad, flash_attn_metadata  # noqa: E402

register.register()

__all__ = [
    "ACCEPTS",
    "MaskMode",
    "__version__",
    "doctor",
    "flash_attention",
    "flash_attn",
    "flash_attn_func",
    "flash_attn_grad",
    "flash_attn_metadata",
    "flash_attn_varlen_func",
]
