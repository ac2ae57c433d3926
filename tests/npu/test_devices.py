"""Several devices and threads: the device guard, wrong mixes, and caches that all threads share."""

from __future__ import annotations

import threading

import attention
import pytest
import torch
from attention import OPS, ROUTES
from harness import Inputs, random_inputs
from oracle import Call
from stub import Stub

import fag_torch

CALL = Call("BSND")


def inputs_of(seed: int = 0, with_sinks: bool = False, s1: int = 9) -> Inputs:
    return random_inputs(CALL, 1, s1, 11, 2, 1, 64, dtype=torch.float16, seed=seed, with_sinks=with_sinks)


@pytest.mark.parametrize("route", ROUTES)
def test_a_call_runs_on_the_device_of_its_tensors(
    route: str, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever is current, and leaves that as it was."""
    monkeypatch.setenv("FAG_NPU_ROUTE", route)
    inputs = inputs_of(s1=10)
    for current in (0, 1):
        with torch.npu.device(current):
            for index in (0, 1):
                there = attention.carry(inputs, f"npu:{index}")
                result = attention.run(CALL, there)
                front = attention.run_front(CALL, there)
                assert torch.npu.current_device() == current
                assert all(x.device.index == index for x in (*result[:5], *front[:5]))
                attention.assert_right(CALL, inputs, result)
                attention.assert_right(CALL, inputs, front)
    metadata = fag_torch.flash_attn_metadata(
        2, 1, 64, batch_size=1, max_seqlen_q=9, max_seqlen_kv=11, device="npu:1"
    )
    assert str(metadata.device) == "npu:1"


ARGUMENTS = ("k", "v", "dout", "attn_out", "softmax_lse", "sinks", "metadata")


@pytest.mark.parametrize("other", ["cpu", "npu:1"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_wrong_mixes_are_refused_by_name(name: str, other: str, stub: Stub) -> None:
    inputs = inputs_of(with_sinks=True)
    there = attention.carry(inputs)
    out, lse, *_ = attention.run(CALL, there)
    metadata = OPS.flash_attn_metadata(
        2, 1, 64, batch_size=1, max_seqlen_q=9, max_seqlen_kv=11, is_grad_enabled=True
    )
    given = {
        "q": there.q, "k": there.k, "v": there.v, "dout": there.dout, "attn_out": out, "softmax_lse": lse,
        "sinks": there.sinks, "metadata": metadata,
    }  # fmt: skip
    given[name] = given[name].to(other)
    torch.npu.synchronize()
    stub.clear_calls()
    with pytest.raises(
        RuntimeError, match=f"flash_attn_grad: {name} must be on the device of q, got {other}.*q=npu:0"
    ):
        OPS.flash_attn_grad(**given)
    if name in ("k", "v", "sinks", "metadata"):
        forward = {key: given[key] for key in ("q", "k", "v", "sinks", "metadata")}
        with pytest.raises(RuntimeError, match=f"flash_attn: {name} must be on the device of q, got {other}"):
            OPS.flash_attn(**forward)
        with pytest.raises(ValueError, match=f"flash_attention: {name} must be on the device of q"):
            fag_torch.flash_attention(**forward)
    assert not any("aclnn" in call.symbol or "Launch" in call.symbol for call in stub.calls())


def test_queries_on_the_host_with_keys_on_the_device_are_refused() -> None:
    inputs = inputs_of()
    there = attention.carry(inputs)
    with pytest.raises(RuntimeError, match="flash_attn: k must be on the device of q, got npu:0.*q=cpu"):
        OPS.flash_attn(inputs.q, there.k, there.v)


def test_lengths_on_the_host_are_refused() -> None:
    call = Call("TND", cu_seqlens_q=(0, 5, 12), cu_seqlens_kv=(0, 9, 20))
    there = attention.carry(random_inputs(call, n1=2, n2=1, d=64, dtype=torch.float16))
    on_host = {name: x.cpu() for name, x in attention.lengths(call).items()}
    with pytest.raises(ValueError, match="cu_seqlens_q must be on the device of q, got cpu"):
        fag_torch.flash_attention(*there[:3], layout="TND", **on_host)
    mixed = attention.lengths(call) | {"cu_seqlens_kv": on_host["cu_seqlens_kv"]}
    with pytest.raises(ValueError, match="cu_seqlens_kv must be on the device of the other lengths, got cpu"):
        fag_torch.flash_attn_metadata(2, 1, 64, **mixed, layout_q="TND", layout_kv="TND", layout_out="TND")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.usefixtures("shortcut")
def test_a_thread_that_has_touched_no_device_may_come_first(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch_npu takes device 0 for current there, CANN knows of none."""
    monkeypatch.setenv("FAG_NPU_ROUTE", route)
    inputs = inputs_of(s1=31)
    there = attention.carry(inputs)
    torch.npu.synchronize()
    results: list[attention.Result] = []
    worker = threading.Thread(target=lambda: results.append(attention.run(CALL, there)))
    worker.start()
    worker.join()
    torch.npu.synchronize()
    (result,) = results
    attention.assert_right(CALL, inputs, result)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.usefixtures("shortcut")
def test_eight_threads_on_two_devices(route: str, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """All meet one problem for the first time, and problems of their own; each on a stream of its own."""
    monkeypatch.setenv("FAG_NPU_ROUTE", route)
    threads, rounds = 8, 3
    problems = [inputs_of(seed, s1=20) for seed in range(threads)]
    own = [inputs_of(seed, s1=21 + seed) for seed in range(threads)]
    wanted = [[attention.run(CALL, attention.carry(x)) for x in (problems[i], own[i])] for i in range(2)]
    for i in range(2):
        for inputs, result in zip((problems[i], own[i]), wanted[i], strict=True):
            attention.assert_right(CALL, inputs, result)
    errors: list[BaseException] = []
    results: dict[int, list[attention.Result]] = {}
    start = threading.Barrier(threads)

    def work(index: int) -> None:
        try:
            device = f"npu:{index % 2}"
            with torch.npu.device(device), torch.npu.stream(torch.npu.Stream(device)):
                start.wait()
                results[index] = []
                for _ in range(rounds):
                    for inputs in (problems[index], own[index]):
                        results[index].append(attention.run(CALL, attention.carry(inputs, device)))
                torch.npu.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    for device in range(2):
        torch.npu.synchronize(device)
    for index, made in results.items():
        for i, result in enumerate(made):
            inputs = (problems[index], own[index])[i % 2]
            host = attention.Result(*(x.cpu() for x in result[:5]))
            if i < 2:
                attention.bound.assert_gradients(CALL, inputs, host.out, host.lse, host[2:5])
            else:
                attention.harness.assert_same_bits(host[:5], [x.cpu() for x in made[i % 2][:5]])
