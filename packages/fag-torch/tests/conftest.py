"""Calls to test with, and a float64 reference in plain PyTorch.

`make_call` builds one call in any layout from sequence lengths; CALLS is the small table that most tests run
over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

LAYOUTS = ("BSND", "BNSD", "TND")


@dataclass
class Call:
    """Tensors and arguments of one attention call.

    `front` are keyword arguments of flash_attention, `raw` those that both raw operators take.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    front: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def requiring_grad(self) -> Call:
        tensors = [t.detach().clone().requires_grad_() for t in self.qkv]
        front = dict(self.front)
        if front.get("sinks") is not None:
            front["sinks"] = front["sinks"].detach().clone().requires_grad_()
        return Call(*tensors, front, self.raw)

    def internal(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of torch.ops.fag.attention_forward."""
        front = self.front
        lengths = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv", "sinks", "metadata")
        scalars = {
            "softmax_scale": front.get("softmax_scale"),
            "mask_mode": int(front.get("mask_mode", 0)),
            "win_left": front.get("win_left", -1),
            "win_right": front.get("win_right", -1),
            "max_seqlen_q": -1,
            "max_seqlen_kv": -1,
            "layout": front["layout"],
        }
        return (*self.qkv, *(front.get(name) for name in lengths)), scalars


def build_call(
    layout: str = "BSND",
    lengths_q: Sequence[int] = (5, 5),
    lengths_kv: Sequence[int] | None = None,
    *,
    n1: int = 4,
    n2: int = 2,
    d: int = 16,
    dv: int | None = None,
    dtype: torch.dtype = torch.float32,
    mask_mode: int = 0,
    window: tuple[int, int] = (-1, -1),
    sinks: bool = False,
    used_q: Sequence[int] | None = None,
    used_kv: Sequence[int] | None = None,
    seed: int = 0,
) -> Call:
    generator = torch.Generator().manual_seed(seed)

    def random(lengths: Sequence[int], heads: int, width: int) -> Tensor:
        if layout == "TND":
            shape: tuple[int, ...] = (sum(lengths), heads, width)
        else:
            assert len(set(lengths)) <= 1
            s = lengths[0] if lengths else 0
            shape = (len(lengths), s, heads, width) if layout == "BSND" else (len(lengths), heads, s, width)
        return torch.randn(shape, generator=generator).to(dtype)

    lengths_kv = lengths_q if lengths_kv is None else lengths_kv
    dv = d if dv is None else dv
    q, k, v = random(lengths_q, n1, d), random(lengths_kv, n2, d), random(lengths_kv, n2, dv)
    shared: dict[str, Any] = {"mask_mode": mask_mode, "win_left": window[0], "win_right": window[1]}
    if layout == "TND":
        for side, lengths in (("q", lengths_q), ("kv", lengths_kv)):
            shared[f"cu_seqlens_{side}"] = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(
                0, dtype=torch.int32
            )
    for side, used in (("q", used_q), ("kv", used_kv)):
        if used is not None:
            shared[f"seqused_{side}"] = torch.tensor(used, dtype=torch.int32)
    if sinks:
        shared["sinks"] = torch.randn(n1, generator=generator)
    layouts = {f"layout_{name}": layout for name in ("q", "kv", "out")}
    return Call(q, k, v, {**shared, "layout": layout}, {**shared, **layouts})


CALLS: dict[str, dict[str, Any]] = {
    "bsnd": {},
    "bnsd-causal-gqa4": {"layout": "BNSD", "n1": 8, "mask_mode": 3, "lengths_kv": (7, 7)},
    "bsnd-window-sinks": {"mask_mode": 4, "window": (2, 0), "sinks": True},
    "bsnd-seqused-dv": {"used_q": (5, 2), "used_kv": (9, 0), "lengths_kv": (9, 9), "dv": 8, "mask_mode": 3},
    "tnd-causal": {"layout": "TND", "lengths_q": (3, 1, 6), "lengths_kv": (4, 1, 6), "mask_mode": 3},
    "tnd-empty-sequences": {"layout": "TND", "lengths_q": (3, 0, 2, 0), "lengths_kv": (2, 4, 0, 0)},
    "tnd-sinks-bf16": {"layout": "TND", "lengths_q": (7, 2), "sinks": True, "dtype": torch.bfloat16},
    "bsnd-no-queries": {"lengths_q": (0, 0), "lengths_kv": (4, 4)},
    "bsnd-no-keys": {"lengths_q": (4, 4), "lengths_kv": (0, 0)},
    "bnsd-no-batch": {"layout": "BNSD", "lengths_q": (), "lengths_kv": ()},
}


@pytest.fixture(scope="session")
def make_call() -> Callable[..., Call]:
    return build_call


@pytest.fixture(params=list(CALLS))
def call(request: pytest.FixtureRequest) -> Call:
    return build_call(**CALLS[request.param])


def _per_sequence(call: Call) -> list[tuple[Tensor, Tensor, Tensor, Any]]:
    """(q, k, v, where in the output) of each sequence, heads first, lengths applied."""
    front, layout = call.front, call.front["layout"]
    parts = []
    if layout == "TND":
        cu_q, cu_kv = front["cu_seqlens_q"].tolist(), front["cu_seqlens_kv"].tolist()
        slots = [
            (slice(a, b), slice(c, e)) for a, b, c, e in zip(cu_q, cu_q[1:], cu_kv, cu_kv[1:], strict=False)
        ]
        tensors = [t.transpose(0, 1) for t in call.qkv]
        rows = [([t[:, q_slot if i == 0 else kv_slot] for i, t in enumerate(tensors)], (slice(None), q_slot))
                for q_slot, kv_slot in slots]  # fmt: skip
    else:
        tensors = [t.transpose(1, 2) if layout == "BSND" else t for t in call.qkv]
        rows = [([t[i] for t in tensors], (i,)) for i in range(call.q.shape[0])]
    for i, ((q, k, v), where) in enumerate(rows):
        used_q = int(front["seqused_q"][i]) if "seqused_q" in front else q.shape[1]
        used_kv = int(front["seqused_kv"][i]) if "seqused_kv" in front else k.shape[1]
        parts.append((q[:, :used_q], k[:, :used_kv], v[:, :used_kv], (where, used_q)))
    return parts


def reference_attention(call: Call) -> tuple[Tensor, Tensor]:
    """out and lse by float64 autograd, in the layout of the call: exact where the formulas are."""
    front, layout = call.front, call.front["layout"]
    mode, left, right = int(front["mask_mode"]), front["win_left"], front["win_right"]
    n1, dv = call.q.shape[-3 if layout == "BNSD" else -2], call.v.shape[-1]
    scale = front.get("softmax_scale") or call.q.shape[-1] ** -0.5
    if layout == "TND":
        out = torch.zeros(n1, call.q.shape[0], dv, dtype=torch.float64)
        lse = torch.full((n1, call.q.shape[0]), -torch.inf, dtype=torch.float64)
    else:
        b, s1 = call.q.shape[0], call.q.shape[2 if layout == "BNSD" else 1]
        out = torch.zeros(b, n1, s1, dv, dtype=torch.float64)
        lse = torch.full((b, n1, s1), -torch.inf, dtype=torch.float64)
    for q, k, v, (where, rows) in _per_sequence(call):
        groups = n1 // k.shape[0]
        k, v = k.double().repeat_interleave(groups, 0), v.double().repeat_interleave(groups, 0)
        i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])[None, :]
        offset = k.shape[1] - q.shape[1]
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        if mode == 3:
            visible = j <= i + offset
        if mode == 4 and left >= 0:
            visible = visible & (j >= i + offset - left)
        if mode == 4 and right >= 0:
            visible = visible & (j <= i + offset + right)
        scores = (scale * q.double() @ k.transpose(1, 2)).masked_fill(~visible, -torch.inf)
        if front.get("sinks") is not None:
            sinks = front["sinks"].double()[:, None, None].expand(n1, q.shape[1], 1)
            scores = torch.cat([scores, sinks], -1)
        has_key = torch.isfinite(scores).any(-1)
        safe = scores.masked_fill(~has_key[..., None], 0.0)
        probabilities = torch.softmax(safe, -1)[..., : k.shape[1]].masked_fill(~visible, 0.0)
        row_lse = (
            torch.logsumexp(safe, -1) if safe.shape[-1] else torch.zeros(n1, q.shape[1], dtype=torch.float64)
        )
        slot = (*where[:-1], where[-1]) if layout == "TND" else where
        if layout == "TND":
            start = slot[1].start
            out[:, start : start + rows] = probabilities @ v
            lse[:, start : start + rows] = row_lse.masked_fill(~has_key, -torch.inf)
        else:
            out[slot[0], :, :rows] = probabilities @ v
            lse[slot[0], :, :rows] = row_lse.masked_fill(~has_key, -torch.inf)
    if layout == "TND":
        return out.transpose(0, 1), lse
    return out.transpose(1, 2) if layout == "BSND" else out, lse


@pytest.fixture(scope="session")
def reference() -> Callable[[Call], tuple[Tensor, Tensor]]:
    return reference_attention


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", LAYOUTS)
