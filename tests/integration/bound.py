"""How far a result may be from the float64 reference.

The bound, per output, on ||x - reference|| / ||reference||:

* 16-bit types: 1.2 * max(peer, rounding). `peer` is the error, against the same reference, of PyTorch's own
  CPU flash kernel (SDPA's, forward or backward) on the same input in the same type - the same rounded q, k,
  v, dout, and for the backward the same attn_out and lse. It runs once per sequence; GQA by repeating k and v
  and summing dk and dv in float32; Dv < D by padding v with zeros; masks as an additive matrix; rows that see
  no key are left out (SDPA defines them otherwise); a sink is one more key of zeros with the sink as its
  additive mask. `rounding` is the error of rounding the reference to the type.
* float32: 2 * max(peer, rounding) + 1e-6, because at that size the order of a sum is half of the error.
* In every case also the ceiling of the public cases (TOL): 1e-2 (bf16), 2e-3 (fp16), 2e-5 (float32, ours) in
  relative L2, and no element further off than 3 % of the largest |reference|.
* Where the reference is zero, but for the rounding of attn_out and lse, |x| <= 1e-5 * scale * max|dP| *
  max|operand| (oracle.zero_bound); tests that know a zero to be exact say so themselves.
* lse (always float32): |x - reference| <= 2e-6 * (1 + scale * max|q row| * max|k row|), and -inf at the same
  places.
* Gradients that include one through lse have no peer (SDPA's kernel takes none): only the ceiling holds
  there.
* dsinks (float32, no peer): |x - reference| <= 2e-6 * sum over rows of psink * (|dout| . |attn_out| +
  |dlse|).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import oracle
import torch
from harness import Inputs, heads, to_float64
from oracle import Call
from torch import Tensor

CEILING = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
OUTPUTS = ("dq", "dk", "dv")


_remembered: OrderedDict[bytes, Any] = OrderedDict()


def remembered(function: Callable[..., Any], call: Call, *tensors: Tensor | None) -> Any:
    """function(call, *tensors), or what it gave for the same bits before.

    The ways to call the operators give the same bits, and the references are pure and slow.
    """
    digest = hashlib.blake2b(f"{function.__name__} {call}".encode())
    for x in tensors:
        digest.update(b"none" if x is None else f"{x.dtype} {tuple(x.shape)}".encode())
        if x is not None and x.numel() > 0:
            digest.update(x.detach().contiguous().view(torch.uint8).numpy().data)
    key = digest.digest()
    if key not in _remembered:
        _remembered[key] = function(call, *tensors)
        if len(_remembered) > 200:
            _remembered.popitem(last=False)
    return _remembered[key]


def oracle_forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Any:
    """oracle.forward on tensors."""
    return oracle.forward(*map(to_float64, (q, k, v)), call, None if sinks is None else to_float64(sinks))


def oracle_backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    dlse: Tensor | None,
) -> oracle.Gradients:
    """oracle.backward on tensors."""
    optional = (None if x is None else to_float64(x) for x in (sinks, dlse))
    return oracle.backward(*map(to_float64, (q, k, v, dout, out, lse)), call, *optional)


def round_to(x: oracle.Array, dtype: torch.dtype) -> oracle.Array:
    """The values of x after one rounding to dtype."""
    return to_float64(torch.from_numpy(np.ascontiguousarray(x)).to(dtype))


# ---- PyTorch's own kernel on the same input --------------------------------------------------------------


def peer_mask(call: Call, s1: int, s2: int, sinks: Tensor | None, n1: int) -> tuple[Tensor | None, Tensor]:
    """Additive mask (1, N1 or 1, rows, keys) or None, and which of the s1 rows see a key."""
    seen = torch.from_numpy(oracle.visible(call, s1, s2))
    has_key = seen.any(dim=1)
    if call.mask_mode == oracle.NO_MASK and sinks is None:
        return None, has_key
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[has_key][None, None]
    if sinks is not None:
        column = sinks.view(1, n1, 1, 1).expand(1, n1, mask.shape[2], 1)
        mask = torch.cat([mask.expand(1, n1, -1, -1), column], dim=3)
    return mask.contiguous(), has_key


def peer_operands(
    call: Call, sequence: oracle.Sequence, inputs: Inputs, extra_key: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of one sequence as (1, N1, rows, D): heads repeated, v padded to D, one zero key appended on
    request."""
    layout, n1 = call.layout, heads(inputs.q, call.layout)
    group = n1 // heads(inputs.k, layout)
    d, dv = inputs.q.shape[-1], inputs.v.shape[-1]
    q = torch.stack([oracle.rows(inputs.q, layout, sequence, h, "q") for h in range(n1)])
    k = torch.stack([oracle.rows(inputs.k, layout, sequence, h // group, "kv") for h in range(n1)])
    v = torch.stack([oracle.rows(inputs.v, layout, sequence, h // group, "kv") for h in range(n1)])
    pad_rows = 1 if extra_key else 0
    k = torch.nn.functional.pad(k, (0, 0, 0, pad_rows))
    v = torch.nn.functional.pad(v, (0, d - dv, 0, pad_rows))
    return q[None], k[None].contiguous(), v[None].contiguous()


def peer_forward(call: Call, *tensors: Tensor | None) -> Tensor:
    """attn_out of SDPA's CPU flash kernel, 0 in padding and in rows that see no key."""
    inputs = Inputs(*tensors)
    n1, dv, d = heads(inputs.q, call.layout), inputs.v.shape[-1], inputs.q.shape[-1]
    out = torch.zeros((*inputs.q.shape[:-1], dv), dtype=inputs.q.dtype)
    for sequence in call.sequences(inputs.q, inputs.k):
        mask, has_key = peer_mask(call, sequence.used_q, sequence.used_kv, inputs.sinks, n1)
        if not has_key.any():
            continue
        q, k, v = peer_operands(call, sequence, inputs, inputs.sinks is not None)
        o, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, :, has_key].contiguous(), k, v, 0.0, False, attn_mask=mask, scale=call.scale(d)
        )
        for h in range(n1):
            oracle.rows(out, call.layout, sequence, h, "q")[has_key] = o[0, h, :, :dv]
    return out


def peer_backward(call: Call, attn_out: Tensor, lse: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """dq, dk, dv of SDPA's CPU flash kernel from the same attn_out and lse."""
    inputs = Inputs(*tensors)
    layout, n1, n2 = call.layout, heads(inputs.q, call.layout), heads(inputs.k, call.layout)
    d, dv = inputs.q.shape[-1], inputs.v.shape[-1]
    dq = torch.zeros_like(inputs.q)
    sums = [torch.zeros(inputs.k.shape), torch.zeros(inputs.v.shape)]
    for sequence in call.sequences(inputs.q, inputs.k):
        mask, has_key = peer_mask(call, sequence.used_q, sequence.used_kv, None, n1)
        if not has_key.any():
            continue
        q, k, v = peer_operands(call, sequence, inputs, False)
        upstream, forward_out = (
            torch.stack([oracle.rows(x, layout, sequence, h, "q")[has_key] for h in range(n1)])[None]
            for x in (inputs.dout, attn_out)
        )
        upstream, forward_out = (torch.nn.functional.pad(x, (0, d - dv)) for x in (upstream, forward_out))
        rows_lse = torch.stack([oracle.lse_rows(lse, layout, sequence, h)[has_key] for h in range(n1)])
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            upstream.contiguous(),
            q[:, :, has_key].contiguous(),
            k,
            v,
            forward_out.contiguous(),
            rows_lse[None].contiguous(),
            0.0,
            False,
            attn_mask=mask,
            scale=call.scale(d),
        )
        for h in range(n1):
            oracle.rows(dq, layout, sequence, h, "q")[has_key] = parts[0][0, h]
            for total, part, width in zip(sums, parts[1:], (d, dv), strict=True):
                oracle.rows(total, layout, sequence, h // (n1 // n2), "kv")[...] += part[
                    0, h, :, :width
                ].float()
    return dq, sums[0].to(inputs.k.dtype), sums[1].to(inputs.v.dtype)


# ---- the bound -------------------------------------------------------------------------------------------


Peer = Callable[[], Tensor]


def limit(reference: oracle.Array, dtype: torch.dtype, error: float, peer: Peer | None) -> float:
    """Largest relative L2 error an output of this type may have; see the head of this file.

    The peer runs only where rounding alone would not allow the error.
    """
    factor, floor = (2.0, 1e-6) if dtype == torch.float32 else (1.2, 0.0)
    base = oracle.relative_error(round_to(reference, dtype), reference)
    if peer is not None and factor * base + floor < error < CEILING[dtype]:
        peer_error = oracle.relative_error(to_float64(peer()), reference)
        assert np.isfinite(peer_error), "PyTorch's kernel gave NaN: it is no measure here"
        base = max(base, peer_error)
    return min(factor * base + floor, CEILING[dtype])


def assert_close(
    name: str,
    x: Tensor,
    reference: oracle.Array,
    peer: Peer | None = None,
    zero: float = 0.0,
    tol_only: bool = False,
) -> None:
    """The result is finite and within the bound (with `tol_only`, within the public cases' ceiling alone)."""
    got = to_float64(x)
    assert got.shape == reference.shape, f"{name}: shape {got.shape}, wanted {reference.shape}"
    assert np.isfinite(got).all(), (
        f"{name}: {int((~np.isfinite(got)).sum())} of {got.size} elements are not finite"
    )
    if got.size == 0:
        return
    largest = np.abs(reference).max()
    if largest <= 0.1 * zero:  # zero, but for the rounding of attn_out and lse
        assert np.abs(got).max() <= zero, (
            f"{name}: reference is zero, got {np.abs(got).max():.3e}, allowed {zero:.3e}"
        )
        return
    error = oracle.relative_error(got, reference)
    allowed = CEILING[x.dtype] if tol_only else limit(reference, x.dtype, error, peer)
    assert error <= allowed, f"{name}: relative error {error:.3e}, allowed {allowed:.3e}"
    worst = np.abs(got - reference).max()
    assert worst <= 0.03 * largest, f"{name}: element off by {worst:.3e}, allowed {0.03 * largest:.3e}"


def zero_bound(call: Call, inputs: Inputs) -> float:
    """What a gradient whose reference is zero may hold."""
    return oracle.zero_bound(*map(to_float64, inputs[:4]), call.scale(inputs.q.shape[-1]))


def assert_lse(call: Call, inputs: Inputs, lse: Tensor, reference: oracle.Array) -> None:
    """The lse is float32, has -inf exactly where the reference has, and the right values elsewhere."""
    assert lse.dtype == torch.float32
    got = to_float64(lse)
    assert got.shape == reference.shape
    assert np.array_equal(np.isfinite(got), np.isfinite(reference)), (
        "lse: finite at other places than the reference"
    )
    infinite = ~np.isfinite(reference)
    assert np.array_equal(got[infinite], reference[infinite]), "lse: not the right infinity"
    if infinite.all():
        return
    norms = [np.sqrt(np.nansum(to_float64(x) ** 2, axis=-1)).max(initial=0.0) for x in (inputs.q, inputs.k)]
    allowed = 2e-6 * (1 + abs(call.scale(inputs.q.shape[-1])) * norms[0] * norms[1])
    worst = np.abs(got[~infinite] - reference[~infinite]).max()
    assert worst <= allowed, f"lse: off by {worst:.3e}, allowed {allowed:.3e}"


def assert_forward(call: Call, inputs: Inputs, out: Tensor, lse: Tensor, tol_only: bool = False) -> None:
    """A forward result against the float64 forward of the same rounded inputs."""
    reference_out, reference_lse = remembered(oracle_forward, call, *inputs[:3], inputs.sinks)
    assert_lse(call, inputs, lse, reference_lse)
    assert_close(
        "attn_out", out, reference_out, lambda: remembered(peer_forward, call, *inputs), tol_only=tol_only
    )


def assert_gradients(
    call: Call,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, ...],
    dsinks: Tensor | None = None,
    dlse: Tensor | None = None,
    tol_only: bool = False,
) -> oracle.Gradients:
    """dq, dk, dv (and dsinks) against the float64 gradient from the same inputs, attn_out and lse; gives the
    reference."""
    reference = remembered(oracle_backward, call, *inputs[:4], out, lse, inputs.sinks, dlse)
    tol_only = tol_only or dlse is not None
    zero = zero_bound(call, inputs)

    def peer(index: int) -> Tensor:
        return remembered(peer_backward, call, out, lse, *inputs)[index]

    for index, (name, x, wanted) in enumerate(zip(OUTPUTS, gradients, reference[:3], strict=True)):
        assert x.dtype == inputs.q.dtype
        assert_close(name, x, wanted, partial(peer, index), zero, tol_only)
    if dsinks is not None:
        assert_dsinks(call, inputs, out, lse, dsinks, reference, None if dlse is None else to_float64(dlse))
    return reference


def assert_dsinks(
    call: Call,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dsinks: Tensor,
    reference: oracle.Gradients,
    dlse: oracle.Array | None,
) -> None:
    """The sink gradient is float32, (N1,), and off by no more than the rounding of its terms."""
    assert inputs.sinks is not None
    assert reference.dsinks is not None
    assert dsinks.dtype == torch.float32
    assert dsinks.shape == inputs.sinks.shape
    out64, dout64, lse64 = to_float64(out), to_float64(inputs.dout), to_float64(lse)
    for h in range(len(reference.dsinks)):
        size = 0.0
        for sequence in call.sequences(inputs.q, inputs.k):
            terms = np.abs(
                oracle.rows(out64, call.layout, sequence, h, "q")
                * oracle.rows(dout64, call.layout, sequence, h, "q")
            )
            row_lse = oracle.lse_rows(lse64, call.layout, sequence, h)
            row = terms.sum(axis=1)
            if dlse is not None:
                row = row + np.abs(oracle.lse_rows(dlse, call.layout, sequence, h))
            size += float((oracle.sink_probability(float(inputs.sinks[h]), row_lse) * row).sum())
        gap = abs(float(dsinks[h]) - reference.dsinks[h])
        assert gap <= 2e-6 * size, f"dsinks[{h}]: off by {gap:.3e}, allowed {2e-6 * size:.3e}"
