"""What a repeated call finds again: the right thing only, whatever was called before, also after a fork."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import numpy as np
import pytest
import torch

import fag_torch
from fag_torch import cpu, prepare

LAYOUTS = ("BSND", "BSND", "BSND")
NO_LENGTHS = (None, None, None, None)


@pytest.fixture
def empty_cache(monkeypatch):
    monkeypatch.setattr(prepare, "_cache", {})
    monkeypatch.setattr(prepare, "_problems", {})
    monkeypatch.setattr(prepare, "_cached_length_bytes", 0)


def find(op, call, *scalars):
    return prepare.prepare(
        op, *call.qkv, None, None, None, NO_LENGTHS, *(scalars or (0, -1, -1, -1, -1)), *LAYOUTS
    )


FRONTS = (fag_torch.flash_attn, fag_torch.flash_attention)


@pytest.mark.parametrize("front", FRONTS, ids=lambda front: front.__name__)
@pytest.mark.parametrize("name", ["win_left", "max_seqlen_q"])
@pytest.mark.parametrize(
    ("known", "value"),
    [(7, 7.0), (1, True), (-1, -1.0), (-1, [-1]), (-1, np.array(-1.0)), (-1, torch.tensor(-1.0))],
    ids=repr,
)
def test_equal_values_of_other_types_are_still_refused(make_call, front, name, known, value):
    """1.0 == True == 1 and all have one hash: a dictionary alone would take them for each other."""
    call = make_call("BSND", (1, 1))
    messages = []
    for _ in range(2):
        with pytest.raises(TypeError, match=f"{front.__name__}: {name} must be an int") as caught:
            front(*call.qkv, mask_mode=4, **{name: value})
        messages.append(str(caught.value))
        front(*call.qkv, mask_mode=4, **{name: known})
    assert messages[0] == messages[1]


@pytest.mark.parametrize("front", FRONTS, ids=lambda front: front.__name__)
def test_mask_modes_of_other_types_are_still_refused(make_call, front):
    call = make_call()
    front(*call.qkv, mask_mode=0)
    front(*call.qkv, mask_mode=3)
    for value in (False, 0.0, 3.0):
        with pytest.raises(TypeError, match=f"{front.__name__}: mask_mode must be"):
            front(*call.qkv, mask_mode=value)


def test_every_spelling_of_an_argument_finds_the_same_problem(make_call, empty_cache):
    call = make_call()
    found = [
        find("flash_attn", call, mode, left, -1, -1, -1)
        for mode in (3, "causal", "CAUSAL", fag_torch.MaskMode.CAUSAL)
        for left in (-1, np.int64(-1), np.int32(-1))
    ]
    assert {id(each.problem) for each in found} == {id(found[0].problem)}
    assert find("flash_attn", call, "causal", -1, -1, -1, -1) is found[3]


def test_operators_share_the_problem_that_made_the_cache_full(make_call, empty_cache, monkeypatch):
    monkeypatch.setattr(prepare, "_CACHE_ENTRIES", 2)
    for length in (3, 4, 5):
        call = make_call("BSND", (length, length))
        first = find("flash_attn", call)
    assert len(prepare._cache) == 1
    assert find("flash_attention", call).problem is first.problem


def spread(tensor):
    """The same values with other strides."""
    b, s, n, d = tensor.shape
    wide = torch.full((b, n, s + 3, d + 5), 7.0, dtype=tensor.dtype)
    wide[:, :, :s, :d] = tensor.transpose(1, 2)
    return wide[:, :, :s, :d].transpose(1, 2)


def test_strides_are_those_of_the_call_at_hand(make_call):
    """The kernel that is kept for contiguous tensors is for these alone."""
    call = make_call("BSND", (9, 9))
    out, lse = fag_torch.flash_attn(*call.qkv, return_softmax_lse=True)
    dout = torch.randn_like(out)
    grads = fag_torch.flash_attn_grad(*call.qkv, dout, out, lse, softmax_scale=1.0)
    for mixed in range(8):
        qkv = [spread(t) if mixed >> i & 1 else t for i, t in enumerate(call.qkv)]
        again, its_lse = fag_torch.flash_attn(*qkv, return_softmax_lse=True)
        assert torch.equal(again, out)
        assert torch.equal(its_lse, lse)
        for turned in (dout, spread(dout)):
            for kept in (out, spread(out)):
                got = fag_torch.flash_attn_grad(*qkv, turned, kept, lse, softmax_scale=1.0)
                assert all(map(torch.equal, got, grads))
    assert torch.equal(fag_torch.flash_attn(*call.qkv)[0], out)
    got = fag_torch.flash_attn_grad(*call.qkv, dout, out, lse, softmax_scale=1.0)
    assert all(map(torch.equal, got, grads))


def test_sinks_and_lse_may_have_strides(make_call):
    call = make_call("BSND", (9, 9))
    sinks = torch.arange(8.0)[::2]
    out, lse = fag_torch.flash_attn(*call.qkv, sinks=sinks, return_softmax_lse=True)
    assert torch.equal(out, fag_torch.flash_attn(*call.qkv, sinks=sinks.clone())[0])
    turned = lse.transpose(1, 2).contiguous().transpose(1, 2)
    got = fag_torch.flash_attn_grad(*call.qkv, out, out, turned, sinks=sinks)
    assert not turned.is_contiguous()
    assert all(
        map(torch.equal, got, fag_torch.flash_attn_grad(*call.qkv, out, out, lse, sinks=sinks.clone()))
    )


@pytest.mark.parametrize("name", ["dout", "attn_out", "softmax_lse"])
def test_a_wrong_shape_is_refused_after_the_right_one(make_call, name):
    call = make_call("BSND", (9, 9))
    out, lse = fag_torch.flash_attn(*call.qkv, return_softmax_lse=True)
    known = {"dout": out, "attn_out": out, "softmax_lse": lse}
    fag_torch.flash_attn_grad(*call.qkv, *known.values())
    with pytest.raises(ValueError, match=f"flash_attn_grad: {name} must"):
        fag_torch.flash_attn_grad(*call.qkv, *(known | {name: known[name][:, :3]}).values())


def test_repeated_calls_prepare_the_kernel_once(make_call, empty_cache, monkeypatch):
    prepared = []
    for name in ("prepare_forward", "prepare_backward"):
        make = getattr(cpu.abi, name)
        monkeypatch.setattr(cpu.abi, name, lambda *args, make=make: prepared.append(args) or make(*args))
    call = make_call()
    for _ in range(3):
        out, lse = fag_torch.flash_attn(*call.qkv, return_softmax_lse=True)
        fag_torch.flash_attn_grad(*call.qkv, out, out, lse)
    assert len(prepared) == 2


def test_wrong_metadata_is_refused_although_the_kernel_is_kept(make_call):
    call = make_call()
    sizes = {"batch_size": 2, "max_seqlen_q": 5, "max_seqlen_kv": 5}
    words = fag_torch.flash_attn_metadata(4, 2, 16, is_grad_enabled=True, **sizes)
    out, lse = fag_torch.flash_attn(*call.qkv, metadata=words, return_softmax_lse=True)
    fag_torch.flash_attn_grad(*call.qkv, out, out, lse)
    words[19:22] = -1  # the end of core 0
    with pytest.raises(ValueError, match="flash_attn: metadata"):
        fag_torch.flash_attn(*call.qkv, metadata=words)
    words[words[7] :] = -1
    with pytest.raises(ValueError, match="flash_attn_grad: metadata"):
        fag_torch.flash_attn_grad(*call.qkv, out, out, lse, metadata=words)


def test_threads_that_share_a_prepared_call_get_their_own_results(make_call):
    calls = [make_call("BSND", (33, 33), seed=seed) for seed in range(4)]
    expected = [fag_torch.flash_attn(*call.qkv)[0] for call in calls]

    def is_right(call, want):
        return all(torch.equal(fag_torch.flash_attn(*call.qkv)[0], want) for _ in range(200))

    with ThreadPoolExecutor(len(calls)) as pool:
        assert all(pool.map(is_right, calls, expected))


def test_who_interrupts_the_cache_may_attend(make_call, empty_cache, monkeypatch):
    """As a signal handler does that runs while its thread puts something in."""
    monkeypatch.setattr(prepare, "_cache_lock", type(prepare._cache_lock)())  # not to lock the others out
    call = make_call()
    results = []

    def interrupted():
        with prepare._cache_lock:
            results.append(fag_torch.flash_attn(*call.qkv)[0])

    thread = Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert len(results) == 1


FORK = """
import os, sys, threading
import torch, fag_torch
from fag_torch import prepare

def attend(length):
    q = torch.ones(1, length, 1, 16)
    return fag_torch.flash_attn(q, q, q)[0]

attend(3)
held, done = threading.Event(), threading.Event()
def hold():
    with prepare._cache_lock:
        held.set()
        done.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(attend(5), torch.ones(1, 5, 1, 16)) else 1)
status = os.waitpid(child, 0)[1]
done.set()
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_child_of_a_fork_does_not_wait_for_a_lock_of_its_parent():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=100)
