"""Calling the operators from tests: one face for torch.ops, fag_torch and fag_kernel's NumPy functions.

Nothing here decides what is right; that is oracle.py and bound.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import oracle
import torch
from oracle import Call
from torch import Tensor

import fag_kernel
import fag_torch

INT32_ARGUMENTS = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv")


# ---- conversions -----------------------------------------------------------------------------------------


def to_float64(x: Tensor) -> oracle.Array:
    """The exact values of a tensor of any of our types."""
    return x.detach().double().numpy()


def to_numpy(x: Any) -> Any:
    """A tensor as a NumPy array over the same memory (bfloat16 as ml_dtypes.bfloat16); anything else as it
    is."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach()
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def to_torch(x: np.ndarray) -> Tensor:
    """A NumPy array as a tensor over the same memory."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def int32(values: Any) -> Tensor:
    """A 1-D int32 tensor."""
    return torch.tensor(list(values), dtype=torch.int32)


# ---- the three ways to call ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Api:
    """One public way to the operators; tensors in, tensors out, whatever it uses itself."""

    name: str
    flash_attn: Callable[..., tuple[Tensor, Tensor]]
    flash_attn_grad: Callable[..., tuple[Tensor, Tensor, Tensor]]
    value_error: type[Exception]  # what a bad value raises here
    type_error: type[Exception]  # what a bad dtype or a non-tensor raises here


def numpy_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A NumPy function that takes tensors and gives tensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        results = function(*map(to_numpy, args), **{name: to_numpy(value) for name, value in kwargs.items()})
        return tuple(to_torch(result) for result in results)

    return call


OPS = torch.ops.cann_ops_transformer
TORCH_OPS = Api("torch.ops", OPS.flash_attn, OPS.flash_attn_grad, RuntimeError, RuntimeError)
FAG_TORCH = Api("fag_torch", fag_torch.flash_attn, fag_torch.flash_attn_grad, ValueError, TypeError)
NUMPY = Api(
    "numpy",
    numpy_function(fag_kernel.flash_attn),
    numpy_function(fag_kernel.flash_attn_grad),
    ValueError,
    TypeError,
)
APIS = (TORCH_OPS, FAG_TORCH, NUMPY)
TORCH_APIS = (TORCH_OPS, FAG_TORCH)


def op_arguments(call: Call, d: int) -> dict[str, Any]:
    """Keyword arguments of flash_attn and flash_attn_grad for a Call. The scale is explicit: the two defaults
    differ."""
    arguments: dict[str, Any] = {
        "softmax_scale": call.scale(d),
        "mask_mode": call.mask_mode,
        "win_left": call.win_left,
        "win_right": call.win_right,
        "layout_q": call.layout,
        "layout_kv": call.layout,
        "layout_out": call.layout,
    }
    for name in INT32_ARGUMENTS:
        if getattr(call, name) is not None:
            arguments[name] = int32(getattr(call, name))
    return arguments


def front_arguments(call: Call) -> dict[str, Any]:
    """Keyword arguments of fag_torch.flash_attention for a Call."""
    arguments = {
        name: getattr(call, name)
        for name in ("layout", "mask_mode", "win_left", "win_right", "softmax_scale")
    }
    arguments |= {
        name: int32(getattr(call, name)) for name in INT32_ARGUMENTS if getattr(call, name) is not None
    }
    return arguments


def metadata_arguments(call: Call, q: Tensor, k: Tensor) -> dict[str, Any]:
    """Arguments of flash_attn_metadata (heads by position are left to the caller) for a Call on these
    tensors."""
    arguments: dict[str, Any] = {
        "mask_mode": call.mask_mode,
        "win_left": call.win_left,
        "win_right": call.win_right,
        "layout_q": call.layout,
        "layout_kv": call.layout,
        "layout_out": call.layout,
        "is_grad_enabled": True,
    }
    if call.layout != "TND":
        axis = 1 if call.layout == "BSND" else 2
        arguments |= {"batch_size": q.shape[0], "max_seqlen_q": q.shape[axis], "max_seqlen_kv": k.shape[axis]}
    arguments |= {
        name: int32(getattr(call, name)) for name in INT32_ARGUMENTS if getattr(call, name) is not None
    }
    return arguments


def heads(x: Tensor, layout: str) -> int:
    return x.shape[2] if layout == "BSND" else x.shape[1]


def make_metadata(call: Call, q: Tensor, k: Tensor, v: Tensor, **changes: Any) -> Tensor:
    """The metadata of a call as a tensor, made by fag_metadata (target "cpu" unless `target` says
    otherwise)."""
    import fag_metadata

    arguments = metadata_arguments(call, q, k) | {"head_dim_v": v.shape[-1], "target": "cpu"} | changes
    arguments = {name: to_numpy(value) for name, value in arguments.items()}
    positional = (
        arguments.pop("num_heads_q", heads(q, call.layout)),
        arguments.pop("num_heads_kv", heads(k, call.layout)),
        arguments.pop("head_dim", q.shape[-1]),
    )
    return torch.from_numpy(fag_metadata.flash_attn_metadata(*positional, **arguments))


# ---- problems --------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """The tensors a user holds before a forward and a backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None = None


class Result(NamedTuple):
    """Everything a forward and a backward through the raw operators give."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def uniform(layout: str, b: int, s1: int, s2: int, **changes: Any) -> Call:
    """A Call on b sequences of the same lengths: for TND the packed form of what the dense layouts hold."""
    if layout == "TND":
        changes |= {"cu_seqlens_q": tuple(range(0, (b + 1) * s1, s1)) if s1 else (0,) * (b + 1)}
        changes |= {"cu_seqlens_kv": tuple(range(0, (b + 1) * s2, s2)) if s2 else (0,) * (b + 1)}
    return Call(layout=layout, **changes)


def packed(lengths_q: Sequence[int], lengths_kv: Sequence[int] | None = None, **changes: Any) -> Call:
    """A TND Call on sequences of these lengths (kv as q when left out)."""
    cu_q = (0, *itertools.accumulate(lengths_q))
    cu_kv = cu_q if lengths_kv is None else (0, *itertools.accumulate(lengths_kv))
    return Call(layout="TND", cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, **changes)


def shapes(
    call: Call, b: int, s1: int, s2: int, n1: int, n2: int, d: int, dv: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of q, k, v, dout. TND takes its numbers of tokens from cu_seqlens; b, s1 and s2 don't count
    there."""
    if call.layout == "TND":
        assert call.cu_seqlens_q is not None
        assert call.cu_seqlens_kv is not None
        t1, t2 = call.cu_seqlens_q[-1], call.cu_seqlens_kv[-1]
        return {"q": (t1, n1, d), "k": (t2, n2, d), "v": (t2, n2, dv), "dout": (t1, n1, dv)}
    if call.layout == "BSND":
        return {"q": (b, s1, n1, d), "k": (b, s2, n2, d), "v": (b, s2, n2, dv), "dout": (b, s1, n1, dv)}
    return {"q": (b, n1, s1, d), "k": (b, n2, s2, d), "v": (b, n2, s2, dv), "dout": (b, n1, s1, dv)}


def as_bsnd(call: Call, x: Tensor, side: str) -> oracle.Array:
    """A q-side or kv-side tensor as float64 (B, S, N, D), whatever its layout."""
    cu = call.cu_seqlens_q if side == "q" else call.cu_seqlens_kv
    return oracle.convert(to_float64(x), call.layout, "BSND", cu)


def lse_as_bns(call: Call, lse: Tensor) -> oracle.Array:
    """An lse as float64 (B, N1, S1), whatever its layout."""
    return oracle.convert_lse(to_float64(lse), call.layout, "BSND", call.cu_seqlens_q)


def random_inputs(
    call: Call,
    b: int = 1,
    s1: int = 1,
    s2: int = 1,
    n1: int = 1,
    n2: int = 1,
    d: int = 8,
    dv: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    factor: float = 1.0,
    with_sinks: bool = False,
) -> Inputs:
    """Normal numbers times factor, rounded to dtype; sinks (float32) of the size of a logit when asked
    for."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (torch.randn(shape, generator=generator) * factor).to(dtype)
        for name, shape in shapes(call, b, s1, s2, n1, n2, d, d if dv is None else dv).items()
    }
    sinks = torch.randn(n1, generator=generator) + 1.0 if with_sinks else None
    return Inputs(**tensors, sinks=sinks)


def ones_inputs(
    call: Call, b: int, s1: int, s2: int, n1: int, n2: int, d: int, dtype: torch.dtype = torch.bfloat16
) -> Inputs:
    """Zeros for q, ones for k, v and dout: P is uniform over the visible keys, dq = dk = 0, and dv alone
    shows the mask."""
    sizes = shapes(call, b, s1, s2, n1, n2, d, d)
    made = {name: torch.ones(shape, dtype=dtype) for name, shape in sizes.items()}
    return Inputs(torch.zeros_like(made["q"]), made["k"], made["v"], made["dout"])


def used_rows(call: Call, x: Tensor, side: str, like: Inputs) -> Tensor:
    """Boolean mask over the rows (all axes but the last) of a q-side or kv-side tensor: True where a row is
    real."""
    used = np.zeros(x.shape, dtype=bool)
    for sequence in call.sequences(like.q, like.k):
        for head in range(heads(x, call.layout)):
            oracle.rows(used, call.layout, sequence, head, side)[...] = True
    return torch.from_numpy(used[..., 0])


def used_lse(call: Call, like: Inputs) -> Tensor:
    """Boolean mask of the lse's shape: True where a row is real."""
    used = np.zeros(oracle.lse_shape(like.q, call.layout), dtype=bool)
    for sequence in call.sequences(like.q, like.k):
        for head in range(heads(like.q, call.layout)):
            oracle.lse_rows(used, call.layout, sequence, head)[...] = True
    return torch.from_numpy(used)


def fill_padding(call: Call, inputs: Inputs, value: float) -> Inputs:
    """The same inputs with `value` in every unused row."""
    filled = {}
    for name, side in (("q", "q"), ("k", "kv"), ("v", "kv"), ("dout", "q")):
        x = getattr(inputs, name).clone()
        x[~used_rows(call, x, side, inputs)] = value
        filled[name] = x
    return Inputs(**filled, sinks=inputs.sinks)


# ---- running ---------------------------------------------------------------------------------------------


def run_forward(api: Api, call: Call, inputs: Inputs, **extra: Any) -> tuple[Tensor, Tensor]:
    """attn_out and lse through the given way."""
    arguments = op_arguments(call, inputs.q.shape[-1]) | extra
    return api.flash_attn(
        inputs.q, inputs.k, inputs.v, sinks=inputs.sinks, return_softmax_lse=True, **arguments
    )


def run_backward(
    api: Api, call: Call, inputs: Inputs, out: Tensor, lse: Tensor, **extra: Any
) -> tuple[Tensor, ...]:
    """dq, dk, dv through the given way."""
    arguments = op_arguments(call, inputs.q.shape[-1]) | extra
    return api.flash_attn_grad(
        inputs.q, inputs.k, inputs.v, inputs.dout, out, lse, sinks=inputs.sinks, **arguments
    )


def run(api: Api, call: Call, inputs: Inputs, **extra: Any) -> Result:
    """Forward, then the gradient from its outputs."""
    out, lse = run_forward(api, call, inputs, **extra)
    return Result(out, lse, *run_backward(api, call, inputs, out, lse, **extra))


class FrontResult(NamedTuple):
    """What the autograd front gives; gradients of what did not ask for one are None."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsinks: Tensor | None


def run_front(
    call: Call, inputs: Inputs, dlse: Tensor | None = None, needs: str = "qkvs", **extra: Any
) -> FrontResult:
    """fag_torch.flash_attention and its backward; `needs` names the inputs (q, k, v, s) that require a
    gradient."""
    leaves = {}
    for letter, x in zip("qkvs", (inputs.q, inputs.k, inputs.v, inputs.sinks), strict=True):
        leaves[letter] = None if x is None else x.detach().clone().requires_grad_(letter in needs)
    out, lse = fag_torch.flash_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        sinks=leaves["s"],
        return_lse=True,
        **(front_arguments(call) | extra),
    )
    torch.autograd.backward(
        [out] if dlse is None else [out, lse], [inputs.dout] if dlse is None else [inputs.dout, dlse]
    )
    gradients = [None if leaf is None else leaf.grad for leaf in leaves.values()]
    return FrontResult(out.detach(), lse.detach(), *gradients)


def with_changes(call: Call, **changes: Any) -> Call:
    """The call with some fields replaced."""
    return dataclasses.replace(call, **changes)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with torch.set_num_threads(count)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def refusal(op: str, argument: str, got: object, *related: object) -> str:
    """Pattern of the contract's message `<op>: <argument> <rule>, got <value> ...`; related values stand
    anywhere behind the argument."""
    parts = [rf"(?=.*\bgot {re.escape(str(got))})", *(rf"(?=.*{re.escape(str(value))})" for value in related)]
    return rf"(?s)\b{op}: {argument}\b{''.join(parts)}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bytes: NaNs compare equal to themselves and -0.0 differs from 0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def assert_same_bits(got: Any, wanted: Any, what: str = "") -> None:
    """Two results (tuples of tensors or None) agree bit for bit."""
    assert len(got) == len(wanted)
    names = getattr(got, "_fields", None) or [str(i) for i in range(len(got))]
    for name, a, b in zip(names, got, wanted, strict=True):
        if a is None or b is None:
            assert a is b, f"{what} {name}: one side gives None"
            continue
        assert a.shape == b.shape, f"{what} {name}: {tuple(a.shape)} and {tuple(b.shape)}"
        assert a.dtype == b.dtype, f"{what} {name}: {a.dtype} and {b.dtype}"
        if not same_bits(a, b):
            gap = (a.double() - b.double()).abs()
            raise AssertionError(
                f"{what} {name}: {int((gap != 0).sum())} elements differ, the most by {gap.max().item()}"
            )
