"""Runs the device kernels on the CPU by Triton's interpreter: the same sources, launched as on a device.

For tests and for learning how the kernels work; slow. Needs the `ascend950` extra (Triton, torch) and
TRITON_INTERPRET=1 in the environment before Triton is first imported. float16 and float32 only: the
interpreter's matrix product is wrong for bfloat16.

The launches come from catalog.py, the numbers from the plan and the metadata: nothing else reaches a kernel.
"""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fag_kernel.ascend950.catalog import Form, Kernel, forward_kernel, launch_tiling, launches

if TYPE_CHECKING:
    from fag_kernel.plan import TilingPlan

Array = NDArray[Any]


class Gradients(NamedTuple):
    """Gradients in the layout and type of q, k, v; that of the sinks float32 (n1,), None without sinks."""

    dq: Array
    dk: Array
    dv: Array
    dsinks: Array | None


@lru_cache(maxsize=1)
def _prepare_interpreter() -> None:
    """Two repairs of speed, none of meaning, in triton-ascend 3.2.0's interpreter.

    tl.max falls into an elementwise Python loop, because the function that the fast path looks for was
    renamed; and every call of a helper patches the whole language again (1.5 ms).
    """
    import triton.language as tl
    from triton.runtime import interpreter

    tl.standard._elementwise_max = tl.max.fn.__globals__["_elementwise_max_default"]
    patch_language, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> None:
        names = frozenset(name for name, value in function.__globals__.items() if value in (tl, tl.core))
        if names not in patched:
            patch_language(function)
            patched.add(names)

    interpreter._patch_lang = patch_once


def _function(kernel: Kernel) -> Any:
    """The Triton function of a kernel, in interpreter mode."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "ascend950: TRITON_INTERPRET must be 1 before triton is imported, got "
            f"{os.environ.get('TRITON_INTERPRET')!r}. Set it in the environment."
        )
    _prepare_interpreter()
    module, function = kernel.source.split(".")
    return getattr(importlib.import_module(f"fag_kernel.ascend950.kernels.{module}"), function)


def _launch(kernel: Kernel, grid: int, buffers: dict[str, Any]) -> None:
    if grid > 0:
        arguments = [buffers[name] for name in kernel.parameters]
        _function(kernel)[(grid,)](*arguments, **dict(kernel.constants))


def _grid(kernel: Kernel, plan: TilingPlan) -> int:
    return {
        "used_cube_cores": plan.block_dim,
        "cube_cores": plan.target.cube_cores,
        "vector_cores": plan.target.vector_cores,
    }[kernel.grid]


def _buffers(plan: TilingPlan, metadata: Array, tensors: dict[str, Array | None]) -> dict[str, Any]:
    """Device buffers: a copy of each tensor; an absent one is a buffer of one poisonous element."""
    import torch

    buffers: dict[str, Any] = {
        name: torch.full((1,), -(2**31), dtype=torch.int32)
        if array is None
        else torch.from_numpy(array.copy())
        for name, array in tensors.items()
    }
    buffers["metadata"] = torch.from_numpy(np.array(metadata))
    tiling = launch_tiling(plan, has_dlse=tensors.get("dlse") is not None)
    buffers["tiling"] = torch.from_numpy(np.frombuffer(tiling, np.int64).copy())
    return buffers


def backward(
    plan: TilingPlan,
    metadata: Array,
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    attn_out: Array,
    lse: Array,
    *,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    seqused_q: Array | None = None,
    seqused_kv: Array | None = None,
    dlse: Array | None = None,
    sinks: Array | None = None,
    form: Form = "accumulate",
) -> Gradients:
    """dq, dk, dv, and dsinks if there are sinks, by the kernels of the plan's tiling key.

    Args:
        plan: Plan for the problem and an Ascend target.
        metadata: The int32 tensor of flash_attn_metadata, made for the same target with the gradient.
        q: Query, contiguous, float16 or float32, in the layout of the plan.
        k: Key.
        v: Value.
        dout: Upstream gradient.
        attn_out: Output of the forward.
        lse: float32 (b, n1, s1) or (n1, t1).
        cu_seqlens_q: int32 (b+1,), TND only.
        cu_seqlens_kv: int32 (b+1,), TND only.
        seqused_q: int32 (b,) or None.
        seqused_kv: int32 (b,) or None.
        dlse: Upstream gradient of lse, like lse, or None.
        sinks: float32 (n1,) or None; the lse holds them already.
        form: "accumulate" or "deterministic".

    Note:
        Workspace and outputs start as NaN: an element that no kernel writes shows.
    """
    import torch

    assert plan.tiling_key is not None
    buffers = _buffers(
        plan, metadata,
        {
            "q": q, "k": k, "v": v, "dout": dout, "attn_out": attn_out, "lse": lse, "dlse": dlse,
            "cu_q": cu_seqlens_q, "cu_kv": cu_seqlens_kv, "used_q": seqused_q, "used_kv": seqused_kv,
            "sinks": sinks,
        },
    )  # fmt: skip
    for name, like in (("dq", q), ("dk", k), ("dv", v)):
        buffers[name] = torch.full(like.shape, float("nan"), dtype=buffers["q"].dtype)
    buffers["dsinks"] = torch.full((plan.fields.n1,), float("nan"), dtype=torch.float32)
    floats = (plan.workspace_bytes - plan.dq_offset) // 4
    buffers["workspace"] = torch.full((max(floats, 1),), float("nan"), dtype=torch.float32)
    for step in launches(plan.tiling_key, "fp16", form, has_sinks=sinks is not None):
        _launch(step.kernel, _grid(step.kernel, plan), buffers)
    dq, dk, dv, dsinks = (buffers[name].numpy() for name in Gradients._fields)
    return Gradients(dq, dk, dv, None if sinks is None else dsinks)


def forward(
    plan: TilingPlan,
    metadata: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    sinks: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    seqused_q: Array | None = None,
    seqused_kv: Array | None = None,
) -> tuple[Array, Array]:
    """attn_out and lse by the forward kernel; arguments as for `backward`, sinks float32 (n1,)."""
    import torch

    fields = plan.fields
    kernel = forward_kernel(
        "fp16", is_tnd=cu_seqlens_q is not None, mask_mode=plan.problem.mask_mode, d=fields.d, dv=fields.dv,
        has_sinks=sinks is not None,
    )  # fmt: skip
    buffers = _buffers(
        plan, metadata,
        {
            "q": q, "k": k, "v": v, "sinks": sinks, "cu_q": cu_seqlens_q, "cu_kv": cu_seqlens_kv,
            "used_q": seqused_q, "used_kv": seqused_kv,
        },
    )  # fmt: skip
    shape = (fields.n1, q.shape[0]) if cu_seqlens_q is not None else (fields.b, fields.n1, fields.s1)
    buffers["out"] = torch.full((*q.shape[:-1], fields.dv), float("nan"), dtype=buffers["q"].dtype)
    buffers["lse"] = torch.full(shape, float("nan"), dtype=torch.float32)
    _launch(kernel, _grid(kernel, plan), buffers)
    return buffers["out"].numpy(), buffers["lse"].numpy()
