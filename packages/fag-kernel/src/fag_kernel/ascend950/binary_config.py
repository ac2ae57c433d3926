"""The operator's binary configuration, `flash_attn_grad_binary.json`: two entries that differ in the 16-bit
type only.
"""

from __future__ import annotations

from typing import Any, Final

from fag_kernel.ascend950.artefacts import entry_name
from fag_kernel.ascend950.catalog import DTYPES, DType

TYPE_NAMES: Final[dict[DType, str]] = {"bf16": "bfloat16", "fp16": "float16"}

#: Name, type (None = the entry's) and kind of each tensor.
INPUTS: Final[tuple[tuple[str, str | None, str], ...]] = (
    ("q", None, "required"),
    ("k", None, "required"),
    ("v", None, "required"),
    ("dout", None, "required"),
    ("attn_out", None, "required"),
    ("softmax_lse", "float32", "required"),
    ("cu_seqlens_q", "int32", "optional"),
    ("cu_seqlens_kv", "int32", "optional"),
    ("seqused_q", "int32", "optional"),
    ("seqused_kv", "int32", "optional"),
    ("sinks", "float32", "optional"),
    ("attn_mask", "int8", "optional"),
    ("metadata", "int32", "optional"),
)
OUTPUTS: Final[tuple[tuple[str, str | None, str], ...]] = (
    ("dq", None, "required"),
    ("dk", None, "required"),
    ("dv", None, "required"),
)
#: Name, type and default.
ATTRIBUTES: Final[tuple[tuple[str, str, float | int | str], ...]] = (
    ("softmax_scale", "float", 0.0),
    ("mask_mode", "int", 0),
    ("win_left", "int", -1),
    ("win_right", "int", -1),
    ("max_seqlen_q", "int", -1),
    ("max_seqlen_kv", "int", -1),
    ("layout_q", "str", "BSND"),
    ("layout_kv", "str", "BSND"),
    ("layout_out", "str", "BSND"),
)


def _tensors(table: tuple[tuple[str, str | None, str], ...], dtype: str) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "index": index,
            "dtype": fixed or dtype,
            "format": "ND",
            "paramType": kind,
            "shape": [-2],
            "format_match_mode": "FormatAgnostic",
        }
        for index, (name, fixed, kind) in enumerate(table)
    ]


def make_binary_json() -> dict[str, Any]:
    """The configuration as the build writes it and `fag-kernel verify` expects it.

    Example:
        >>> config = make_binary_json()
        >>> config["op_type"], [entry["bin_filename"] for entry in config["op_list"]]
        ('FlashAttnGrad', ['FlashAttnGrad_bf16', 'FlashAttnGrad_fp16'])
    """
    return {
        "op_type": "FlashAttnGrad",
        "op_list": [
            {
                "bin_filename": entry_name(dtype),
                "inputs": _tensors(INPUTS, TYPE_NAMES[dtype]),
                "outputs": _tensors(OUTPUTS, TYPE_NAMES[dtype]),
                "attrs": [{"name": name, "dtype": kind, "value": value} for name, kind, value in ATTRIBUTES],
            }
            for dtype in DTYPES
        ],
    }
