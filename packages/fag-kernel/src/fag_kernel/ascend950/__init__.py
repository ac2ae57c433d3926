"""Kernels for Ascend 950: what is shipped, checked and, on a host with CANN, finished and found.

The wheel carries optimised IR of the vendor's compiler for every valid tiling key in bfloat16 and float16.
Nothing here needs Triton, the vendor's compiler or an NPU to be imported. No claim is made that a kernel
has run on hardware: docs/ascend950.md says what was verified.

- `binary_json()`: the operator's binary configuration.
- `kernels()`: one entry per type and tiling key; `find(key, dtype)`: one of them.
- `object_file(name, dtype)`: the device object of a kernel, made by CANN's compiler at first use.
- `verify()`: every check of the shipped files.
"""

from __future__ import annotations

from typing import Any

from fag_kernel.ascend950.artefacts import BINARY_JSON, DATA, read_json
from fag_kernel.ascend950.entries import KernelEntry, Step, find, kernels, step_record
from fag_kernel.ascend950.errors import ArtefactError, CompilerError
from fag_kernel.ascend950.finalize import object_file
from fag_kernel.ascend950.verify import verify

__all__ = [
    "ArtefactError",
    "CompilerError",
    "KernelEntry",
    "Step",
    "binary_json",
    "find",
    "kernels",
    "object_file",
    "step_record",
    "verify",
]


def binary_json() -> dict[str, Any]:
    """The shipped flash_attn_grad_binary.json.

    Raises:
        ArtefactError: The file is missing or damaged.

    Example:
        >>> [entry["bin_filename"] for entry in binary_json()["op_list"]]
        ['FlashAttnGrad_bf16', 'FlashAttnGrad_fp16']
    """
    contents: dict[str, Any] = read_json(DATA / BINARY_JSON)
    return contents
