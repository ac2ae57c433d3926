"""The training loop: AdamW, a short warm-up, a progress bar; one seed gives one history on one machine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cache

import torch
from tqdm import tqdm

import fag_kernel.abi
from fag_torch.demo.data import Batch, Batches, read_documents
from fag_torch.demo.model import Attention, Config, Model, attend

LEARNING_RATE = 1.5e-3
WARM_UP_STEPS = 20
LAST_STEPS = 10  # last_loss is their mean


@dataclass
class History:
    """What training leaves behind.

    Attributes:
        model: The trained model.
        batch: The batch of the last step.
        losses: Loss of each step, nats per byte.
        seconds: Wall time of all steps.
    """

    model: Model
    batch: Batch
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def first_loss(self) -> float:
        """Loss before the first update."""
        return self.losses[0]

    @property
    def last_loss(self) -> float:
        """Mean loss of the last ten steps."""
        last = self.losses[-LAST_STEPS:]
        return sum(last) / len(last)


def loss_of(model: Model, batch: Batch, attention: Attention = attend) -> torch.Tensor:
    """The loss; matrix products outside attention run in bfloat16 where the CPU has instructions for them."""
    with torch.autocast("cpu", torch.bfloat16, enabled=_has_bfloat16_products()):
        loss: torch.Tensor = model(batch, attention)
        return loss


@cache
def _has_bfloat16_products() -> bool:
    """Asked once: listing the levels asks the system for the use of AMX tiles."""
    return "avx512_bf16" in fag_kernel.abi.cpu_levels()


def train(steps: int, seed: int, tokens: int, max_length: int, config: Config) -> History:
    """Trains a model on the standard library's sources.

    Args:
        steps: Number of updates, at least 1.
        seed: Of the weights and of the order of the documents.
        tokens: Bytes in each step.
        max_length: Longest document, in bytes.
        config: Sizes of the model.

    Returns:
        The model, the last batch and the losses.
    """
    torch.manual_seed(seed)
    batches = Batches(read_documents(max_length), tokens, seed)
    model = Model(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
    history = History(model, batches.next())
    start = time.perf_counter()
    with tqdm(range(steps), desc="training", unit="step", dynamic_ncols=True) as bar:
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = _learning_rate(step, steps)
            loss = loss_of(model, history.batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            history.losses.append(loss.item())
            bar.set_postfix(loss=f"{history.losses[-1]:.3f}", refresh=False)
            if step < steps - 1:
                history.batch = batches.next()
    history.seconds = time.perf_counter() - start
    return history


def _learning_rate(step: int, steps: int) -> float:
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return LEARNING_RATE * warm_up * (1 - 0.9 * step / steps)
