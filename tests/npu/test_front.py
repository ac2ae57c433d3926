"""Training through the autograd front on an NPU: the demo's model, whose other operators run on the CPU."""

from __future__ import annotations

import attention
import numpy as np
import pytest
import torch
from stub import Stub
from torch import Tensor

import fag_torch
from fag_torch.demo.data import Batch, Batches
from fag_torch.demo.model import Config, Model, attend

STEPS = 5
CONFIG = Config(layers=2, n1=2, n2=1, d=64, window=8)


def attend_on_npu(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, batch: Batch) -> Tensor:
    """As the demo's, with q, k, v, sinks and lengths carried to the device and the output back."""
    lengths = batch.cu_seqlens.to("npu")
    out = fag_torch.flash_attention(
        q.to("npu"), k.to("npu"), v.to("npu"), layout="TND",
        mask_mode="causal" if window is None else "sliding_window",
        win_left=-1 if window is None else window - 1, win_right=-1 if window is None else 0,
        cu_seqlens_q=lengths, cu_seqlens_kv=lengths, sinks=sinks.to("npu"),
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.cpu()


def train(attention_of: object) -> tuple[list[float], Model]:
    torch.manual_seed(0)
    text = [bytes(np.random.default_rng(i).integers(97, 103, 30, dtype=np.uint8)) for i in range(20)]
    batches = Batches(text, 48, seed=0)
    model = Model(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(batches.next(), attention_of)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.usefixtures("shortcut")
def test_the_demo_model_trains(stub: Stub) -> None:
    wanted, _ = train(attend)
    losses, model = train(attend_on_npu)
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, wanted, rtol=2e-3)
    assert all(block.sinks.abs().max() > 0 for block in model.blocks), "sinks learn too"
    launches = sum(call.symbol == "rtKernelLaunch" for call in stub.calls())
    assert launches >= STEPS * CONFIG.layers * 5, "a forward, and four kernels of the gradient"


def test_autocast_takes_its_dtype() -> None:
    call = attention.Call("BSND")
    inputs = attention.harness.random_inputs(call, 1, 9, 11, 2, 1, 64, dtype=torch.float32)
    q, k, v = (x.to("npu").requires_grad_() for x in inputs[:3])
    with torch.autocast("npu", torch.float16):
        out = fag_torch.flash_attention(q, k, v)
    assert out.dtype == torch.float16
    out.backward(inputs.dout.half().to("npu"))
    rounded = attention.Inputs(*(x.half() for x in inputs[:4]))
    wanted = attention.run_front(call, attention.carry(rounded))
    for leaf, half in zip((q, k, v), wanted[2:5], strict=True):
        assert leaf.grad.dtype == torch.float32
        assert torch.equal(leaf.grad.cpu(), half.cpu().float())


def test_what_the_cpu_refuses_is_refused_in_the_same_words() -> None:
    q = torch.randn(1, 9, 2, 64, dtype=torch.float16).to("npu")
    k = torch.randn(1, 9, 3, 64, dtype=torch.float16).to("npu")
    on_host = q.cpu(), k.cpu(), k.cpu()
    for wrong in ({}, {"mask_mode": 7}, {"win_left": 3}, {"layout": "BSN"}, {"max_seqlen_q": 2.5}):
        messages = []
        for tensors in ((q, k, k), on_host):
            with pytest.raises((ValueError, TypeError)) as caught:
                fag_torch.flash_attention(*tensors, **wrong)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_second_derivatives_are_refused() -> None:
    leaf = torch.randn(1, 9, 2, 64, dtype=torch.float16).to("npu").requires_grad_()
    out = fag_torch.flash_attention(leaf, leaf, leaf)
    (gradient,) = torch.autograd.grad(out, leaf, torch.ones_like(out), create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        gradient.backward(torch.ones_like(gradient))
