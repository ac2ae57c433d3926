"""The content of an attn_mask, checked once per tensor and version.

CANN wants a constant matrix where ours needs nothing. A caller may pass it, but whatever else stands in the
tensor must not be ignored, so it is compared: 4 MiB, about a millisecond (and a copy, from a device), which
is why the answer is remembered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fag_metadata.arguments import check_attn_mask_content
from fag_torch.tensor_memo import TensorMemo, version_of

if TYPE_CHECKING:
    from torch import Tensor

_right: TensorMemo[bool] = TensorMemo()


def check_content(op: str, attn_mask: Tensor) -> None:
    """Refuses an attn_mask that is not CANN's constant.

    Args:
        op: Operator the user called, for the message.
        attn_mask: int8, uint8 or bool, (2048, 2048), on the host or a device; shape and dtype are checked
            already.

    Raises:
        ValueError: An element differs; the message names the first one.
    """
    if _right.get(attn_mask) is None:
        version = version_of(attn_mask)
        check_attn_mask_content(op, attn_mask.cpu().numpy())
        _right.put(attn_mask, True, version)
