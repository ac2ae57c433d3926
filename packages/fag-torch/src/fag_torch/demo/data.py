"""Real text that every machine has: the sources of Python's own standard library, as packed documents.

A document is a function, a method or what stands between two of them, cut to at most `max_length` bytes. A
batch is as many documents as fit into `tokens` tokens, one after another without padding (layout TND).
Tokens are bytes; byte 0, which no source holds, stands before each document.
"""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

VOCABULARY = 256
START = 0

_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
_BEGINS = re.compile(rb"\n(?=(?:    )?(?:def |class |async def |@))")
_MIN_LENGTH = 24
_MAX_FILE_BYTES = 400_000


@dataclass(frozen=True)
class Batch:
    """Packed documents of one training step.

    Attributes:
        tokens: Input bytes, int64 (T,).
        targets: The byte that follows each input byte, int64 (T,).
        lengths: Tokens of each document, in order; their sum is T.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    lengths: tuple[int, ...]

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """First token of each document and, last, T: int32 (B + 1,)."""
        return torch.tensor(np.cumsum((0, *self.lengths)), dtype=torch.int32)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Place of each token in its document, int64 (T,)."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    @cached_property
    def rows(self) -> torch.Tensor:
        """Document of each token, int64 (T,)."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))


def read_documents(max_length: int) -> list[bytes]:
    """The standard library as documents of at most `max_length` bytes, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for file in sorted(root.rglob("*.py")):
        inside = file.relative_to(root).parts
        if _SKIPPED_FOLDERS.intersection(inside) or file.stat().st_size > _MAX_FILE_BYTES:
            continue
        for part in _BEGINS.split(file.read_bytes()):
            text = part.strip(b"\n").replace(b"\0", b"")
            documents += [text[i : i + max_length] for i in range(0, len(text), max_length)]
    return [document for document in documents if len(document) >= _MIN_LENGTH]


class Batches:
    """Endless packed batches, drawn without replacement epoch by epoch; one seed gives one sequence."""

    def __init__(self, documents: list[bytes], tokens: int, seed: int) -> None:
        self._documents = documents
        self._tokens = tokens
        self._random = np.random.default_rng(seed)
        self._order: list[int] = []

    def next(self) -> Batch:
        """The next batch: exactly the documents that fit, the last one cut so that T is `tokens`."""
        inputs, targets, lengths = [], [], []
        room = self._tokens
        while room > 0:
            if not self._order:
                self._order = list(self._random.permutation(len(self._documents)))
            document = self._documents[self._order.pop()][:room]
            codes = np.frombuffer(document, np.uint8).astype(np.int64)
            inputs.append(np.concatenate([[START], codes[:-1]]))
            targets.append(codes)
            lengths.append(len(codes))
            room -= len(codes)
        tokens = torch.from_numpy(np.concatenate(inputs))
        return Batch(tokens, torch.from_numpy(np.concatenate(targets)), tuple(lengths))
