"""Public cases about lengths: 6, 27, 28, 30."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import bound
import harness
import numpy as np
import oracle
import pytest
import torch
from harness import Api, Inputs
from oracle import CAUSAL, NO_MASK, SLIDING_WINDOW, Call

INF = float("inf")

# ---- PC-06: empty sequences ------------------------------------------------------------------------------

PC06 = Call("TND", cu_seqlens_q=(0, 3, 3, 5, 5), cu_seqlens_kv=(0, 2, 6, 6, 9))


@pytest.mark.parametrize("layout", ["TND"])
@pytest.mark.parametrize(
    ("mode", "wanted"), [(NO_MASK, (3.0, 3.0)), (CAUSAL, (3.0, 1.0))], ids=["full", "causal"]
)
def test_pc06_empty_sequences_by_hand(api: Api, layout: str, mode: int, wanted: tuple[float, float]) -> None:
    # Causal, 3 queries on 2 keys: the first sees nothing, the second key 0, the third both: (1.5, 0.5) per
    # query head, and two query heads share a kv head.
    call = harness.with_changes(PC06, mask_mode=mode)
    inputs = harness.ones_inputs(call, 0, 0, 0, 4, 2, 64)
    inputs = inputs._replace(v=inputs.v[..., :32].contiguous(), dout=inputs.dout[..., :32].contiguous())
    got = harness.run(api, call, inputs)
    for row, value in enumerate(wanted):
        assert torch.all(got.dv[row] == value)
    check_empty_sequences(got)


@pytest.mark.parametrize("layout", ["TND"])
@pytest.mark.parametrize("mode", [NO_MASK, CAUSAL], ids=["full", "causal"])
def test_pc06_empty_sequences_random(api: Api, layout: str, mode: int) -> None:
    call = harness.with_changes(PC06, mask_mode=mode)
    inputs = harness.random_inputs(call, n1=4, n2=2, d=64, dv=32)
    got = harness.run(api, call, inputs)
    bound.assert_forward(call, inputs, got.out, got.lse)
    bound.assert_gradients(call, inputs, got.out, got.lse, got[2:])
    assert torch.count_nonzero(got.dq[:3]) > 0
    check_empty_sequences(got)


def check_empty_sequences(got: harness.Result) -> None:
    assert torch.count_nonzero(got.dk[2:]) == 0
    assert torch.count_nonzero(got.dv[2:]) == 0
    assert torch.count_nonzero(got.dq[3:]) == 0
    assert torch.count_nonzero(got.out[3:]) == 0
    assert torch.all(got.lse[:, 3:] == -INF)


EMPTY = {
    "b0": (0, 5, 7),
    "s1-0": (2, 0, 7),
    "s2-0": (2, 5, 0),
    "both-0": (2, 0, 0),
}


@pytest.mark.parametrize("size", EMPTY)
@pytest.mark.parametrize("mode", [NO_MASK, CAUSAL], ids=["full", "causal"])
def test_pc06_empty_tensors_give_empty_or_zero(api: Api, layout: str, mode: int, size: str) -> None:
    b, s1, s2 = EMPTY[size]
    call = harness.uniform(layout, b, s1, s2, mask_mode=mode)
    inputs = harness.random_inputs(call, b, s1, s2, 4, 2, 64, 32)
    got = harness.run(api, call, inputs)
    assert got.out.shape == inputs.dout.shape
    assert got.lse.shape == oracle.lse_shape(inputs.q, layout)
    for x, like in zip(got[2:], inputs[:3], strict=True):
        assert x.shape == like.shape
    for x in (got.out, *got[2:]):
        assert x.dtype == torch.bfloat16
        assert torch.count_nonzero(x) == 0
    assert got.lse.dtype == torch.float32
    assert torch.all(got.lse == -INF)
    front = harness.run_front(call, inputs)
    harness.assert_same_bits(front[:5], got)


# ---- PC-27: bounds on the sequence lengths ---------------------------------------------------------------

PC27 = harness.packed((5, 17, 3))


@pytest.mark.parametrize("layout", ["TND"])
@pytest.mark.parametrize("longest", [17, 64, 2**31 - 1])
def test_pc27_bound_changes_no_bit(api: Api, layout: str, longest: int) -> None:
    inputs = harness.random_inputs(PC27, n1=2, n2=1, d=16)
    wanted = harness.run(api, PC27, inputs)
    bound.assert_gradients(PC27, inputs, wanted.out, wanted.lse, wanted[2:])
    got = harness.run(api, PC27, inputs, max_seqlen_q=longest, max_seqlen_kv=longest)
    harness.assert_same_bits(got, wanted)


@pytest.mark.parametrize("layout", ["TND"])
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_kv"])
@pytest.mark.parametrize("value", [16, 1, 0, -2])
def test_pc27_refuses_a_bound_below_a_sequence(api: Api, layout: str, name: str, value: int) -> None:
    inputs = harness.random_inputs(PC27, n1=2, n2=1, d=16)
    out, lse = harness.run_forward(api, PC27, inputs)
    with pytest.raises(api.value_error, match=harness.refusal("flash_attn", name, value)):
        harness.run_forward(api, PC27, inputs, **{name: value})
    with pytest.raises(api.value_error, match=harness.refusal("flash_attn_grad", name, value)):
        harness.run_backward(api, PC27, inputs, out, lse, **{name: value})


@pytest.mark.parametrize("layout", ["TND"])
def test_pc27_attention_does_not_cross_sequences(api: Api, layout: str) -> None:
    inputs = harness.random_inputs(PC27, n1=2, n2=1, d=16)
    wanted = harness.run(api, PC27, inputs)
    k = inputs.k.clone()
    k[5:22] *= 100
    got = harness.run(api, PC27, inputs._replace(k=k))
    assert not torch.equal(got.dq[5:22], wanted.dq[5:22])
    for rows in (slice(0, 5), slice(22, 25)):
        harness.assert_same_bits([x[rows] for x in got[2:]], [x[rows] for x in wanted[2:]])


# ---- PC-28: malformed lengths ----------------------------------------------------------------------------


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# name -> (arguments that replace the good ones, argument named, kind of error, what the message must hold)
MALFORMED: dict[str, tuple[dict[str, object], str, str, str]] = {
    "int64": ({"cu_seqlens_q": torch.tensor([0, 6, 12])}, "cu_seqlens_q", "type", "int64"),
    "float": ({"cu_seqlens_kv": torch.tensor([0.0, 6, 12])}, "cu_seqlens_kv", "type", "float32"),
    "two-axes": ({"cu_seqlens_q": int32(0, 6, 12)[:, None]}, "cu_seqlens_q", "value", "(3, 1)"),
    "no-axis": ({"cu_seqlens_q": torch.tensor(12, dtype=torch.int32)}, "cu_seqlens_q", "value", "()"),
    "empty": ({"cu_seqlens_q": int32()}, "cu_seqlens_q", "value", "0 elements"),
    "first-not-0": ({"cu_seqlens_q": int32(1, 6, 12)}, "cu_seqlens_q", "value", "got 1"),
    "decreasing": (
        {"cu_seqlens_kv": int32(0, 8, 6, 12), "cu_seqlens_q": int32(0, 6, 8, 12)},
        *("cu_seqlens_kv", "value", "6"),
    ),
    "negative": ({"cu_seqlens_kv": int32(0, -1, 12)}, "cu_seqlens_kv", "value", "-1"),
    "past-the-end": ({"cu_seqlens_q": int32(0, 6, 13)}, "cu_seqlens_q", "value", "got 13"),
    "far-past-the-end": (
        {"cu_seqlens_kv": int32(0, 6, 2**31 - 1)},
        *("cu_seqlens_kv", "value", "got 2147483647"),
    ),
    "short-of-the-end": ({"cu_seqlens_q": int32(0, 6, 11)}, "cu_seqlens_q", "value", "got 11"),
    "unequal-count": ({"cu_seqlens_kv": int32(0, 6, 8, 12)}, "cu_seqlens_kv", "value", "3"),
    "missing-q": ({"cu_seqlens_q": None}, "cu_seqlens_q", "value", "TND"),
    "missing-kv": ({"cu_seqlens_kv": None}, "cu_seqlens_kv", "value", "TND"),
    "seqused-too-long": ({"seqused_q": int32(6, 7)}, "seqused_q", "value", "got 7"),
    "seqused-negative": ({"seqused_kv": int32(-1, 2)}, "seqused_kv", "value", "got -1"),
    "seqused-int64": ({"seqused_q": torch.tensor([1, 2])}, "seqused_q", "type", "int64"),
    "seqused-count": ({"seqused_kv": int32(1, 2, 3)}, "seqused_kv", "value", "3 elements"),
    "seqused-two-axes": ({"seqused_q": int32(1, 2)[None]}, "seqused_q", "value", "(1, 2)"),
}  # fmt: skip


def refused_everywhere(
    api: Api,
    call: Call,
    inputs: Inputs,
    changes: dict[str, object],
    argument: str,
    error: type[Exception],
    text: str,
) -> None:
    """Both operators refuse the changed call by the argument's name, and leave the inputs alone."""
    out, lse = harness.run_forward(api, call, inputs)
    copies = [x.clone() for x in (*inputs[:4], out, lse)]
    attempts: dict[str, Callable[[], object]] = {
        "flash_attn": lambda: harness.run_forward(api, call, inputs, **changes),
        "flash_attn_grad": lambda: harness.run_backward(api, call, inputs, out, lse, **changes),
    }
    for op, attempt in attempts.items():
        with pytest.raises(error, match=rf"(?s)\b{op}: {argument}\b.*{re.escape(text)}"):
            attempt()
    harness.assert_same_bits([*inputs[:4], out, lse], copies)


@pytest.mark.parametrize("layout", ["TND"])
@pytest.mark.parametrize("fault", MALFORMED)
def test_pc28_refuses_malformed_lengths(api: Api, layout: str, fault: str) -> None:
    call = harness.packed((6, 6))
    changes, argument, kind, text = MALFORMED[fault]
    error = api.type_error if kind == "type" else api.value_error
    inputs = harness.random_inputs(call, n1=2, n2=1, d=8)
    refused_everywhere(api, call, inputs, changes, argument, error, text)


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_kv"])
def test_pc28_refuses_cu_seqlens_outside_tnd(api: Api, layout: str, name: str) -> None:
    call = Call(layout)
    inputs = harness.random_inputs(call, 2, 6, 6, 2, 1)
    refused_everywhere(api, call, inputs, {name: int32(0, 6, 12)}, name, api.value_error, layout)


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
@pytest.mark.parametrize(
    ("values", "text"),
    [((7, 1), "got 7"), ((1, -1), "got -1"), ((1, 2, 3), "3 elements")],
    ids=["long", "negative", "count"],
)
@pytest.mark.parametrize("name", ["seqused_q", "seqused_kv"])
def test_pc28_refuses_seqused_that_does_not_fit(
    api: Api, layout: str, name: str, values: tuple[int, ...], text: str
) -> None:
    call = Call(layout)
    inputs = harness.random_inputs(call, 2, 6, 6, 2, 1)
    refused_everywhere(api, call, inputs, {name: int32(*values)}, name, api.value_error, text)


@pytest.mark.parametrize("layout", ["TND"])
@pytest.mark.parametrize("api", harness.TORCH_APIS, ids=lambda api: api.name)
def test_pc28_refuses_lengths_on_another_device(api: Api, layout: str) -> None:
    call = harness.packed((6, 6))
    inputs = harness.random_inputs(call, n1=2, n2=1, d=8)
    changes = {"cu_seqlens_q": int32(0, 6, 12).to("meta")}
    refused_everywhere(api, call, inputs, changes, "cu_seqlens_q", api.value_error, "meta")


# ---- PC-30: packed equals padded, nothing crosses a boundary ---------------------------------------------

PC30_LENGTHS = {
    "seven": (5, 1, 8, 64, 63, 65, 2),
    "two-hundred": tuple(int(n) for n in np.random.default_rng(30).integers(1, 71, 200)),
}
PC30_MASKS = {
    "full": {},
    "causal": {"mask_mode": CAUSAL},
    "window": {"mask_mode": SLIDING_WINDOW, "win_left": 16, "win_right": 4},
}


@pytest.mark.parametrize("layout", ["TND"])
@pytest.mark.parametrize("mask", PC30_MASKS)
@pytest.mark.parametrize("lengths", PC30_LENGTHS)
def test_pc30_packed_padded_and_single_agree(layout: str, lengths: str, mask: str) -> None:
    slots = PC30_LENGTHS[lengths]
    call = harness.packed(slots, **PC30_MASKS[mask])
    inputs = harness.random_inputs(call, n1=4, n2=2, d=64)
    api = harness.TORCH_OPS
    packed = harness.run(api, call, inputs)
    bound.assert_gradients(call, inputs, packed.out, packed.lse, packed[2:], tol_only=True)

    padded_call = Call("BSND", seqused_q=slots, seqused_kv=slots, **PC30_MASKS[mask])
    cu = call.cu_seqlens_q
    padded = harness.run(api, padded_call, to_padded(inputs, cu))
    single_call = Call("BSND", **PC30_MASKS[mask])
    for i, length in enumerate(slots):
        rows = slice(cu[i], cu[i + 1])
        alone = harness.run(api, single_call, Inputs(*(x[rows][None] for x in inputs[:4])))
        from_packed = [packed.out[rows], packed.lse[:, rows], *(x[rows] for x in packed[2:])]
        from_padded = [
            padded.out[i, :length],
            padded.lse[i, :, :length],
            *(x[i, :length] for x in padded[2:]),
        ]
        harness.assert_same_bits(from_packed, from_padded, f"sequence {i}, packed and padded:")
        harness.assert_same_bits(from_packed, [x[0] for x in alone], f"sequence {i}, packed and alone:")


def to_padded(inputs: Inputs, cu: tuple[int, ...]) -> Inputs:
    """BSND tensors with garbage behind each sequence."""
    longest = max(b - a for a, b in itertools.pairwise(cu))
    made = []
    for x in inputs[:4]:
        dense = torch.full((len(cu) - 1, longest, *x.shape[1:]), float("nan"), dtype=x.dtype)
        for i, (a, b) in enumerate(itertools.pairwise(cu)):
            dense[i, : b - a] = x[a:b]
        made.append(dense)
    return Inputs(*made)


@pytest.mark.parametrize("layout", ["TND"])
@pytest.mark.parametrize("mask", PC30_MASKS)
@pytest.mark.parametrize(("lengths", "changed"), [("seven", 4), ("two-hundred", 77)])
def test_pc30_one_sequence_does_not_touch_another(
    api: Api, layout: str, lengths: str, changed: int, mask: str
) -> None:
    call = harness.packed(PC30_LENGTHS[lengths], **PC30_MASKS[mask])
    inputs = harness.random_inputs(call, n1=4, n2=2, d=64)
    wanted = harness.run(api, call, inputs)
    rows = slice(call.cu_seqlens_q[changed], call.cu_seqlens_q[changed + 1])
    k = inputs.k.clone()
    k[rows] *= 1000
    got = harness.run(api, call, inputs._replace(k=k))
    assert not torch.equal(got.dq[rows], wanted.dq[rows])
    others = torch.ones(len(k), dtype=torch.bool)
    others[rows] = False
    harness.assert_same_bits([x[others] for x in got[2:]], [x[others] for x in wanted[2:]])
