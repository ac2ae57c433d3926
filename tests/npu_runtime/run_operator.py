"""Executes aclnnInnerFlashAttnGrad and aclnnInnerFlashAttn: fag-kernel's functions on views of device memory.

They check every argument by the rules of fag_metadata, and the metadata against the call.
"""

from __future__ import annotations

from typing import Any

from device_memory import Array, view

import fag_kernel

_MASKED = (3, 4)


def run(request: dict[str, Any]) -> None:
    """One call, as operators.cpp describes it.

    Raises:
        Exception: An argument is not what the operator takes; says which.
    """
    tensors = {name: _view(tensor) for name, tensor in request["tensors"].items()}
    attributes = {name: value for name, value in request["attributes"].items() if value != ""}
    if attributes["mask_mode"] in _MASKED and tensors["attn_mask"] is None:
        raise ValueError(f"attn_mask must be given with mask_mode {attributes['mask_mode']}, got none.")
    _OPERATORS[request["operator"]](tensors, attributes)


def _view(tensor: dict[str, Any] | None) -> Array | None:
    return None if tensor is None else view(**tensor)


def _gradient(tensors: dict[str, Array | None], attributes: dict[str, Any]) -> None:
    outputs = {name: tensors.pop(name) for name in ("dq", "dk", "dv")}
    results = fag_kernel.flash_attn_grad(**tensors, **attributes, num_threads=1)
    for (name, output), result in zip(outputs.items(), results, strict=True):
        _write(name, output, result)


def _forward(tensors: dict[str, Array | None], attributes: dict[str, Any]) -> None:
    attn_out, softmax_lse = tensors.pop("attn_out"), tensors.pop("softmax_lse")
    out, lse = fag_kernel.flash_attn(**tensors, **attributes, num_threads=1)
    _write("attn_out", attn_out, out)
    _write("softmax_lse", softmax_lse, lse)


def _write(name: str, output: Array | None, result: Array) -> None:
    assert output is not None
    if output.shape != result.shape or output.dtype != result.dtype:
        raise ValueError(
            f"{name} must be {result.dtype} {result.shape}, got {output.dtype} {output.shape} for the output."
        )
    output[...] = result


_OPERATORS = {"aclnnInnerFlashAttnGrad": _gradient, "aclnnInnerFlashAttn": _forward}
