"""Head words 8..15: which problem, target, route and split a metadata tensor was made for.

The words are those of the table IDENTITY in `layout.py`. Numbers wider than their 16 bits are folded; the crc
in the last word covers them unfolded, and the lengths. A bound (max_seqlen) is no part of it, because it
never changes a result.
"""

from __future__ import annotations

from struct import pack as pack_bytes
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import numpy as np

from .layout import FORMAT_VERSION, HEAD_WORDS, IDENTITY, LAYOUT_CODES, MAGIC, Int32Array, Route, Split

if TYPE_CHECKING:
    from .problem import AttentionProblem
    from .targets import Target

FIRST_WORD = 8
_SHIFTS = {bits.name: 32 * (bits.word - FIRST_WORD) + bits.shift for bits in IDENTITY}
_BATCH_SHIFT = _SHIFTS["b"]
_MAGIC_SHIFT = 0
_CRC_SHIFT = 32 * (HEAD_WORDS - 1 - FIRST_WORD)
FREE_FIELDS = ("route", "split", "is_grad", "cube_slots", "target_id")
"""Fields that do not depend on the problem; any value of them fits a call."""
_FREE_MASK = sum(
    ((1 << bits.width) - 1) << _SHIFTS[bits.name] for bits in IDENTITY if bits.name in FREE_FIELDS
)
PROBLEM_MASK = (1 << 32 * (HEAD_WORDS - FIRST_WORD)) - 1 - _FREE_MASK
"""Bits of words 8..15, taken as one little-endian number, that the problem alone determines."""
_PROBLEM_SHIFTS = {name: shift for name, shift in _SHIFTS.items() if name not in FREE_FIELDS}
GRAD_BIT = 1 << _SHIFTS["is_grad"]

_EXACT_BELOW = 0x8000
_UNBOUNDED = 0xFFFF


class ProblemIdentity(NamedTuple):
    """What a problem puts into words 8..15.

    Attributes:
        bits: The words as one little-endian number, with the free fields zero.
        numbers: Values before folding, in the order of IDENTITY.
        crc: The last word.
    """

    bits: int
    numbers: tuple[int, ...]
    crc: int

    @property
    def values(self) -> dict[str, int]:
        """Field name -> value before folding."""
        return dict(zip(_PROBLEM_SHIFTS, self.numbers, strict=True))


def fold16(value: int) -> int:
    """Folds a number into 16 bits: exact below 32768, 0xffff for -1, else 0x8000 and a 15-bit hash.

    Example:
        >>> fold16(4096), fold16(-1), fold16(2**20) & 0x8000
        (4096, 65535, 32768)
    """
    if 0 <= value < _EXACT_BELOW:
        return value
    if value < 0:
        return _UNBOUNDED
    folded = (value ^ value >> 15 ^ value >> 30) & 0x7FFF
    return _EXACT_BELOW | (folded if folded != 0x7FFF else 0)


def unfold16(folded: int) -> int | None:
    """Returns the number that was folded, or None if only its hash is known."""
    if folded == _UNBOUNDED:
        return -1
    return folded if folded < _EXACT_BELOW else None


def problem_identity(problem: AttentionProblem) -> ProblemIdentity:
    """Returns the part of words 8..15 that the problem determines; use the cached `problem.identity`."""
    lists = (problem.cu_seqlens_q, problem.cu_seqlens_kv, problem.seqused_q, problem.seqused_kv)
    s1 = 0 if problem.has_lengths_q else problem.s1
    s2 = 0 if problem.has_lengths_kv else problem.s2
    layout = LAYOUT_CODES.index(problem.layout.value)
    present = [int(list_ is not None) for list_ in lists]
    sizes = (problem.n1, problem.n2, problem.b, problem.d, problem.dv, s1, s2)
    windows = (problem.win_left, problem.win_right)
    crc = crc32(pack_bytes("<15q", layout, problem.mask_mode, *present, *sizes, *windows))
    for list_ in lists:
        if list_ is not None:
            crc = crc32(list_.raw, crc)
    n1, n2, b, d, dv, _, _ = sizes
    numbers = (
        FORMAT_VERSION, layout, int(problem.mask_mode), *present, n1, n2, b, d - 1, dv - 1, s1, s2, *windows
    )  # fmt: skip
    bits = MAGIC << _MAGIC_SHIFT | crc << _CRC_SHIFT
    for shift, value in zip(_PROBLEM_SHIFTS.values(), numbers, strict=True):
        # a batch size uses all 16 bits, and needs no folding
        bits |= (value if 0 <= value < _EXACT_BELOW or shift == _BATCH_SHIFT else fold16(value)) << shift
    return ProblemIdentity(bits, numbers, crc)


def identity_words(
    problem: AttentionProblem, target: Target, route: Route, split: Split, is_grad: bool, slots: int
) -> Int32Array:
    """Returns the head words 8..15 of a metadata tensor, int32 (8,)."""
    bits = (
        problem.identity.bits
        | int(route) << _SHIFTS["route"]
        | int(split) << _SHIFTS["split"]
        | int(is_grad) << _SHIFTS["is_grad"]
        | slots << _SHIFTS["cube_slots"]
        | target.target_id << _SHIFTS["target_id"]
    )
    return np.frombuffer(bits.to_bytes(4 * (HEAD_WORDS - FIRST_WORD), "little"), np.int32)


def field(bits: int, name: str) -> int:
    """Returns a field of IDENTITY out of words 8..15 taken as one little-endian number."""
    width = _WIDTHS[name]
    return bits >> _SHIFTS[name] & ((1 << width) - 1)


_WIDTHS = {bits.name: bits.width for bits in IDENTITY}
