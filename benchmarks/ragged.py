"""What PyTorch users do with sequences of different lengths: one call for each, or a padded batch."""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from cases import Case
from contenders import Gradients, Inputs, Jobs, flash_jobs
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class PerSequence:
    """PyTorch's flash attention on views of each sequence in turn; results are packed again."""

    name = "loop"

    def why_not(self, case: Case) -> str:
        return "" if case.lengths else "ragged batches only"

    def jobs(self, case: Case, x: Inputs) -> Jobs:
        ends = list(accumulate(case.lengths))

        def part(tensor: Tensor, end: int, length: int) -> Tensor:
            return tensor[end - length : end].transpose(0, 1)[None]

        parts = [
            flash_jobs(
                Inputs(*(part(t, end, length) for t in (x.q, x.k, x.v, x.dout))), is_causal=case.is_causal
            )
            for end, length in zip(ends, case.lengths, strict=True)
        ]

        def backward() -> Gradients:
            dq, dk, dv = zip(*(one.backward() for one in parts), strict=True)
            return _packed(dq), _packed(dk), _packed(dv)

        return Jobs(lambda: _packed([one.forward() for one in parts]), backward)


def _packed(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.cat([part[0].transpose(0, 1) for part in parts])


class Padded:
    """PyTorch's flash attention on one batch that is padded beforehand and stays padded.

    A causal mask hides the padding behind a sequence by itself; else a mask hides the padded keys. The
    upstream gradient of the padding is zero.
    """

    name = "padded"
    most_waste = 8  # beyond, it is not worth the time: the loop is far ahead

    def why_not(self, case: Case) -> str:
        if not case.lengths:
            return "ragged batches only"
        padded = case.b * case.n1 * case.pairs_of(case.s)
        if padded > self.most_waste * case.pairs:
            return f"{padded / case.pairs:.0f} times the visible pairs"
        return ""

    def jobs(self, case: Case, x: Inputs) -> Jobs:
        def pad(tensor: Tensor) -> Tensor:
            rows = pad_sequence(list(tensor.split(case.lengths)), batch_first=True)
            return rows.transpose(1, 2).contiguous()

        mask = None
        if not case.is_causal:
            is_padding = torch.arange(case.s)[None, :] >= torch.tensor(case.lengths)[:, None]
            mask = torch.zeros(case.b, case.s, dtype=x.q.dtype).masked_fill_(is_padding, -math.inf)
            mask = mask[:, None, None, :]
        run = flash_jobs(Inputs(*map(pad, (x.q, x.k, x.v, x.dout))), is_causal=case.is_causal, mask=mask)

        def unpad(tensor: Tensor) -> Tensor:
            rows = tensor.transpose(1, 2)
            return torch.cat([rows[i, :length] for i, length in enumerate(case.lengths)])

        return Jobs(run.forward, run.backward, unpad)
