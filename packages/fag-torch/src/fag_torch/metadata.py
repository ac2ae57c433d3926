"""`flash_attn_metadata` as an operator and as a Python function: which target the split is made for, and on
which device the tensor lies. The split itself is made by fag_metadata, on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import fag_metadata
from fag_metadata.errors import UnsupportedError, problem_error
from fag_torch import npu_host, npu_memory
from fag_torch.prepare import LENGTH_NAMES, LengthTensors, host_array

if TYPE_CHECKING:
    from torch import Tensor

_OP = "flash_attn_metadata"


def flash_attn_metadata(
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    **sizes: Any,
) -> Tensor:
    """`cann_ops_transformer::flash_attn_metadata` on the device of the lengths, or without any."""
    lengths = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)
    return make(num_heads_q, num_heads_kv, head_dim, lengths, None, **sizes)


def make(
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    lengths: LengthTensors,
    device: torch.device | None,
    **sizes: Any,
) -> Tensor:
    """Makes the tensor for the SoC of `device` and puts it there.

    Args:
        num_heads_q: Query heads.
        num_heads_kv: Key-value heads.
        head_dim: Head dim of q and k.
        lengths: cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, each int32 or None. Lengths on an NPU are
            copied to the host once, which waits for the device.
        device: Where the metadata is for; None is the device of the lengths, else the NPU if there is one,
            else the CPU.
        **sizes: The other arguments of fag_metadata.flash_attn_metadata.

    Returns:
        int32 tensor, 1-D, that the caller owns.
    """
    first: Tensor | None = None
    for name, tensor in zip(LENGTH_NAMES, lengths, strict=True):
        if tensor is not None:
            first = tensor if first is None else first
            if tensor.device != first.device:
                raise problem_error(
                    _OP, name, "must be on the device of the other lengths", tensor.device, other=first.device
                )
    if device is None:
        if first is not None:
            device = first.device
        else:
            device = npu_host.default_device()
    target = target_of(device)
    hosted: dict[str, Any] = {
        name: None if tensor is None else host_array(_OP, name, tensor)
        for name, tensor in zip(LENGTH_NAMES, _on_host(lengths), strict=True)
    }
    words = fag_metadata.flash_attn_metadata(
        num_heads_q, num_heads_kv, head_dim, **hosted, **sizes, target=target
    )
    if device.type == "cpu":
        return torch.from_numpy(words)
    tensor = npu_memory.upload(words, device)
    npu_memory.remember_own(tensor, words)
    return tensor


def _on_host(lengths: LengthTensors) -> LengthTensors:
    """The lengths, all of one device, on the host."""
    first = next((tensor for tensor in lengths if tensor is not None), None)
    return lengths if first is None or first.device.type == "cpu" else npu_memory.host_lengths(_OP, lengths)


def target_of(device: torch.device) -> str:
    """Name of the target of a device: "cpu", or the SoC of an NPU.

    Raises:
        UnsupportedError: There is no kernel for that kind of device.
    """
    if device.type == "cpu":
        return "cpu"
    if device.type in ("npu", "privateuseone"):
        return npu_host.target_of(_OP, device).name
    raise UnsupportedError(f"{_OP}: device must be cpu or an NPU, got {device}.")
