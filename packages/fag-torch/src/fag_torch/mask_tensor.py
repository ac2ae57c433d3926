"""The content of an attn_mask, checked once per tensor and version.

CANN wants a constant matrix where ours needs nothing. A caller may pass it, but whatever else stands in the
tensor must not be ignored, so it is compared: 4 MiB, about a millisecond, which is why the answer is
remembered.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from fag_metadata.arguments import check_attn_mask_content

if TYPE_CHECKING:
    from torch import Tensor

#: id of a tensor object -> (the object, its version when it was found right)
_checked: dict[int, tuple[weakref.ref[Tensor], int]] = {}


def check_content(op: str, attn_mask: Tensor) -> None:
    """Refuses an attn_mask on the host that is not CANN's constant.

    Args:
        op: Operator the user called, for the message.
        attn_mask: int8, uint8 or bool, (2048, 2048); shape and dtype are checked already.

    Raises:
        ValueError: An element differs; the message names the first one.
    """
    if attn_mask.is_inference():  # has no version counter, so an edit in place would go unnoticed
        check_attn_mask_content(op, attn_mask.numpy())
        return
    name = id(attn_mask)
    known = _checked.get(name)
    if known is not None and known[0]() is attn_mask and known[1] == attn_mask._version:
        return
    version = attn_mask._version
    check_attn_mask_content(op, attn_mask.numpy())
    _checked[name] = (weakref.ref(attn_mask, lambda _: _checked.pop(name, None)), version)
