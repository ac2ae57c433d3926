"""What the demo checks after training: gradients, and loss and speed beside PyTorch's attention."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from fag_torch.demo.data import Batch
from fag_torch.demo.model import Attention, Model, attend, attend_sdpa
from fag_torch.demo.train import loss_of


@dataclass(frozen=True)
class Call:
    """One attention call inside the model, with the gradients that our kernels gave it."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor
    window: int | None
    out: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What attention is differentiated by."""
        return self.q, self.k, self.v, self.sinks


def gradient_error(model: Model, batch: Batch) -> float:
    """Largest error of the attention gradients of one batch against float64.

    The reference is the plain formula in float64 with autograd, document by document, on the same bfloat16
    inputs and the same upstream gradient as our kernels had inside the model.

    Returns:
        max over the layers and over dq, dk, dv and dsinks of ||ours - reference|| / ||reference||.
    """
    calls = []

    def recording(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, batch: Batch) -> Tensor:
        out = attend(q, k, v, sinks, window, batch)
        for tensor in (q, k, v, out):
            tensor.retain_grad()
        calls.append(Call(q, k, v, sinks, window, out))
        return out

    model.zero_grad()
    loss_of(model, batch, recording).backward()  # type: ignore[no-untyped-call]
    return max(_error(call, batch) for call in calls)


def _error(call: Call, batch: Batch) -> float:
    leaves = [tensor.detach().double().requires_grad_() for tensor in call.inputs]
    q, k, v, sinks = leaves
    upstream = _gradient(call.out).double()
    for begin, length in zip(batch.cu_seqlens.tolist(), batch.lengths, strict=False):
        rows = slice(begin, begin + length)
        out = reference_attention(q[rows], k[rows], v[rows], sinks, call.window)
        out.backward(upstream[rows])  # type: ignore[no-untyped-call]
    errors = []
    for ours, leaf in zip(call.inputs, leaves, strict=True):
        exact = _gradient(leaf)
        errors.append(float((_gradient(ours).double() - exact).norm() / exact.norm()))
    return max(errors)


def _gradient(tensor: Tensor) -> Tensor:
    if tensor.grad is None:
        raise RuntimeError("backward gave a tensor of the attention call no gradient")
    return tensor.grad


def reference_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """Causal attention of one document with a window and sinks, straight from the formulas.

    Args:
        q: Queries, (s, n1, d).
        k: Keys, (s, n2, d).
        v: Values, (s, n2, d).
        sinks: Logit of each head that takes probability and has no value, (n1,).
        window: Keys that a query sees, itself included; None: all earlier ones.

    Returns:
        (s, n1, d), in the inputs' type.
    """
    s, n1, d = q.shape
    group = n1 // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(d)
    i, j = torch.arange(s)[:, None], torch.arange(s)[None]
    hidden = j > i
    if window is not None:
        hidden = hidden | (j <= i - window)
    scores = scores.masked_fill(hidden, -math.inf)
    with_sink = torch.cat([scores, sinks[:, None, None].expand(n1, s, 1)], dim=-1)
    return torch.einsum("hij,jhd->ihd", with_sink.softmax(-1)[..., :s], v)


@dataclass(frozen=True)
class Speed:
    """Forward and backward of the whole model on one batch, with either attention.

    Attributes:
        tokens_per_s: With fag_torch, packed.
        tokens_per_s_sdpa: With PyTorch's SDPA, padded; real tokens counted, padding not.
        loss: With fag_torch.
        loss_sdpa: With SDPA: the same weights and function, so the same loss within rounding.
    """

    tokens_per_s: float
    tokens_per_s_sdpa: float
    loss: float
    loss_sdpa: float


def measure_speed(model: Model, batch: Batch, repeats: int = 3) -> Speed:
    """Times both attentions in turn, after one untimed step each; the median of `repeats` counts."""
    seconds: dict[Attention, list[float]] = {attend: [], attend_sdpa: []}
    losses: dict[Attention, float] = {}
    for repeat in range(-1, repeats):
        for attention, times in seconds.items():
            model.zero_grad()
            start = time.perf_counter()
            loss = loss_of(model, batch, attention)
            loss.backward()  # type: ignore[no-untyped-call]
            if repeat >= 0:
                times.append(time.perf_counter() - start)
            losses[attention] = loss.item()
    tokens = len(batch.tokens)
    ours, sdpa = (tokens / statistics.median(times) for times in seconds.values())
    return Speed(ours, sdpa, losses[attend], losses[attend_sdpa])
