"""Public case 20 and 2: the same bits every time, whatever memory held before."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from fag_torch import flash_attention

LENGTHS = (300, 1, 513, 64)
MASKS = {"causal": {"mask_mode": 3}, "window": {"mask_mode": 4, "window": (64, 0)}}


@pytest.fixture
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def gradients(call):
    leaf = call.requiring_grad()
    out, lse = flash_attention(*leaf.qkv, **leaf.front, return_lse=True)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return out.detach(), lse.detach(), *(t.grad for t in leaf.qkv)


@pytest.fixture(params=list(MASKS))
def packed(request, make_call):
    return make_call("TND", LENGTHS, n1=8, n2=2, d=64, dtype=torch.bfloat16, **MASKS[request.param])


def test_pc20_repeats(packed):
    expected = gradients(packed)
    for _ in range(20):
        assert all(map(torch.equal, gradients(packed), expected))


@pytest.mark.usefixtures("_threads")
def test_pc20_number_of_threads(packed):
    expected = gradients(packed)
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, gradients(packed), expected))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("mask_mode", [0, 3])
def test_small_calls_in_a_row(mask_mode):
    """Small work is shared while threads are awake from the call before, and only then."""
    q, k, v = (torch.randn(1, 100, 1, 64) for _ in range(3))
    torch.set_num_threads(1)
    expected = flash_attention(q, k, v, mask_mode=mask_mode)
    torch.set_num_threads(2)
    for _ in range(50):
        assert torch.equal(flash_attention(q, k, v, mask_mode=mask_mode), expected)


def test_pc20_deterministic_mode_neither_warns_nor_refuses(packed):
    expected = gradients(packed)
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = gradients(packed)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, got, expected))


def test_pc20_alone_as_in_the_batch(packed, make_call):
    expected = gradients(packed)
    cu = packed.front["cu_seqlens_q"].tolist()
    for start, end in itertools.pairwise(cu):
        alone = make_call("TND", (end - start,), n1=8, n2=2, d=64, dtype=torch.bfloat16)
        alone.q, alone.k, alone.v = (t[start:end] for t in packed.qkv)
        alone.front |= {name: packed.front[name] for name in ("mask_mode", "win_left", "win_right")}
        leaf = alone.requiring_grad()
        out, lse = flash_attention(*leaf.qkv, **leaf.front, return_lse=True)
        generator = torch.Generator().manual_seed(1)
        upstream = torch.randn(expected[0].shape, generator=generator).to(out.dtype)[start:end]
        out.backward(upstream)
        assert torch.equal(out, expected[0][start:end])
        assert torch.equal(lse, expected[1][:, start:end])
        for tensor, whole in zip(leaf.qkv, expected[2:], strict=True):
            assert torch.equal(tensor.grad, whole[start:end])


def test_pc02_padding_is_neither_read_nor_left_unwritten(make_call, layout):
    """pc02: NaN in every unused row, NaN in the memory the results will lie in; zeros come out."""
    used = {"used_q": (5, 16), "used_kv": (9, 0)}
    call = make_call(layout, (16, 16), d=64, dtype=torch.bfloat16, **used)
    clean = make_call(layout, (16, 16), d=64, dtype=torch.bfloat16, **used)

    def unused(tensor, lengths):
        mask = torch.ones_like(tensor, dtype=torch.bool)
        for i, length in enumerate(lengths):
            if layout == "TND":
                mask[16 * i : 16 * i + length] = False
            elif layout == "BSND":
                mask[i, :length] = False
            else:
                mask[i, :, :length] = False
        return mask

    for name, lengths in (("q", (5, 16)), ("k", (9, 0)), ("v", (9, 0))):
        holes = unused(getattr(call, name), lengths)
        setattr(clean, name, getattr(call, name).masked_fill(holes, 0.0))
        setattr(call, name, getattr(call, name).masked_fill(holes, torch.nan))
    for _ in range(8):
        torch.full(call.q.shape, torch.nan, dtype=call.q.dtype)
    got, want = gradients(call), gradients(clean)
    assert all(map(torch.equal, got, want))
    for tensor, lengths in zip((got[0], *got[2:]), ((5, 16), (5, 16), (9, 0), (9, 0)), strict=True):
        assert not tensor[unused(tensor, lengths)].any()


def test_upstream_gradient_of_padding_is_not_read(make_call):
    call = make_call("BSND", (6, 6), used_q=(2, 6), dtype=torch.bfloat16)
    leaf, other = call.requiring_grad(), call.requiring_grad()
    upstream = torch.randn(2, 6, 4, 16).to(torch.bfloat16)
    flash_attention(*leaf.qkv, **leaf.front).backward(upstream)
    upstream = upstream.clone()
    upstream[0, 2:] = torch.nan
    flash_attention(*other.qkv, **other.front).backward(upstream)
    for one, two in zip(leaf.qkv, other.qkv, strict=True):
        assert torch.equal(one.grad, two.grad)


def test_pc15_non_finite_values_that_no_query_sees(make_call):
    """pc15: the last value row is NaN, and only the last query sees it."""
    call = make_call("BNSD", (8, 8), mask_mode=3, d=64, dtype=torch.bfloat16)
    dirty = make_call("BNSD", (8, 8), mask_mode=3, d=64, dtype=torch.bfloat16)
    dirty.v[:, :, 7] = torch.nan
    clean_grads, grads = gradients(call), gradients(dirty)
    assert torch.equal(grads[2][:, :, :7], clean_grads[2][:, :, :7])
    assert torch.equal(grads[4], clean_grads[4])
