"""Head words 8..15: which problem, target, route and split a tensor is for, and whether it fits a call.

The words are those of the table IDENTITY in `layout.py`. Numbers wider than their 16 bits are folded; the crc
in the last word covers them unfolded, and the lengths. A bound (max_seqlen) is no part of it, because it
never changes a result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from operator import lshift
from struct import Struct, unpack_from
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from .errors import InvalidTypeError, MetadataError, message
from .layout import (
    FORMAT_VERSION,
    HEAD_WORDS,
    IDENTITY,
    LAYOUT_CODES,
    MAGIC,
    Int32Array,
    Route,
    Split,
    total_words,
)

if TYPE_CHECKING:
    from .problem import AttentionProblem
    from .split_check import Finding
    from .terms import Target

FIRST_WORD = 8
_SHIFTS = {bits.name: 32 * (bits.word - FIRST_WORD) + bits.shift for bits in IDENTITY}
_CRC_SHIFT = 32 * (HEAD_WORDS - 1 - FIRST_WORD)
FREE_FIELDS = ("route", "split", "is_grad", "cube_slots", "target_id")
"""Fields that do not depend on the problem; any value of them fits a call."""
_FREE_MASK = sum(
    ((1 << bits.width) - 1) << _SHIFTS[bits.name] for bits in IDENTITY if bits.name in FREE_FIELDS
)
PROBLEM_MASK = (1 << 32 * (HEAD_WORDS - FIRST_WORD)) - 1 - _FREE_MASK
"""Bits of words 8..15, taken as one little-endian number, that the problem alone determines."""
_FLAG_SHIFTS = [bits.shift for bits in IDENTITY if bits.word == 9 and bits.name not in FREE_FIELDS]
_pack_numbers = Struct("<15q").pack
# Magic number, flags, the fields of the words behind them, which are whole bytes, and the crc.
_pack_words = Struct("<II" + "".join("BH"[bits.width > 8] for bits in IDENTITY if bits.word > 9) + "I").pack
GRAD_BIT = 1 << _SHIFTS["is_grad"]

_EXACT_BELOW = 0x8000
_UNBOUNDED = 0xFFFF


def fold16(value: int) -> int:
    """Folds a number into 16 bits: exact below 32768, 0xffff for -1, else 0x8000 and a 15-bit hash."""
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


def problem_identity(problem: AttentionProblem) -> int:
    """Returns words 8..15 as one little-endian number, with what the problem does not determine zero; use the
    cached `problem.identity`.
    """
    numbers = _numbers(problem)
    crc = crc32(_pack_numbers(*numbers))
    for list_ in (problem.cu_seqlens_q, problem.cu_seqlens_kv, problem.seqused_q, problem.seqused_kv):
        if list_ is not None:
            crc = crc32(list_.raw, crc)
    flags = sum(map(lshift, (FORMAT_VERSION, *numbers[:6]), _FLAG_SHIFTS))
    n1, n2, b, d, dv, s1, s2, left, right = numbers[6:]
    n1, n2, s1, s2, left, right = map(fold16, (n1, n2, s1, s2, left, right))
    words = _pack_words(MAGIC, flags, n1, n2, b, 0, d - 1, dv - 1, 0, s1, s2, left, right, crc)
    return int.from_bytes(words, "little")


_NUMBERED = [bits.name.removesuffix("_minus_1") for bits in IDENTITY if bits.name not in FREE_FIELDS][1:]


def _numbers(problem: AttentionProblem) -> tuple[int, ...]:
    """What the problem has for each field of _NUMBERED, not folded."""
    cu_q, cu_kv, used_q, used_kv = (
        problem.cu_seqlens_q, problem.cu_seqlens_kv, problem.seqused_q, problem.seqused_kv
    )  # fmt: skip
    return (
        LAYOUT_CODES.index(problem.layout), problem.mask_mode,
        cu_q is not None, cu_kv is not None, used_q is not None, used_kv is not None,
        problem.n1, problem.n2, problem.b, problem.d, problem.dv,
        0 if cu_q is not None or used_q is not None else problem.s1,
        0 if cu_kv is not None or used_kv is not None else problem.s2,
        problem.win_left, problem.win_right,
    )  # fmt: skip


def identity_words(
    problem: AttentionProblem, target: Target, route: Route, split: Split, is_grad: bool, slots: int
) -> Int32Array:
    """Returns the head words 8..15 of a metadata tensor, int32 (8,)."""
    bits = (
        problem.identity
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

_REMEDY = "Make it with flash_attn_metadata from the arguments of this call"

# in the order in which differences are reported: identity field, argument name
_COMPARED = (
    ("layout", "layout_q"),
    ("n1", "num_heads_q"),
    ("n2", "num_heads_kv"),
    ("d_minus_1", "head_dim"),
    ("dv_minus_1", "head_dim_v"),
    ("b", "batch_size"),
    ("has_cu_seqlens_q", "cu_seqlens_q"),
    ("has_cu_seqlens_kv", "cu_seqlens_kv"),
    ("has_seqused_q", "seqused_q"),
    ("has_seqused_kv", "seqused_kv"),
    ("s1", "max_seqlen_q"),
    ("s2", "max_seqlen_kv"),
    ("mask_mode", "mask_mode"),
    ("win_left", "win_left"),
    ("win_right", "win_right"),
)


def check_metadata(op: str, metadata: Any, problem: AttentionProblem, need_grad: bool) -> None:
    """Checks that a metadata tensor was made for this problem; target, split and route are free.

    What the operators run before every call: a comparison of eight words, about 2 us.

    Args:
        op: Operator the user called, for the message.
        metadata: int32 array (n,) on the host.
        problem: What the call computes.
        need_grad: Whether the backward split must be there.

    Raises:
        InvalidTypeError: If it is not an int32 array.
        MetadataError: If it is truncated, was not made by flash_attn_metadata, or was made for another
            problem; the message names the first field that differs, with both values.
    """
    if type(metadata) is not np.ndarray or metadata.dtype != np.int32:
        found = metadata.dtype if isinstance(metadata, np.ndarray) else type(metadata).__name__
        raise InvalidTypeError(message(op, "metadata", "must be an int32 array", found, remedy=_REMEDY))
    if metadata.ndim != 1:
        raise _error(op, "must have one dimension", f"shape {metadata.shape}")
    _check_head(op, metadata[:HEAD_WORDS].tobytes(), len(metadata), problem, need_grad)


@lru_cache(maxsize=256)  # what has passed once passes; errors are not cached
def _check_head(op: str, head: bytes, length: int, problem: AttentionProblem, need_grad: bool) -> None:
    if len(head) < 4 * HEAD_WORDS:
        raise _error(op, f"must have at least {HEAD_WORDS} words", f"{length} words")
    bits = int.from_bytes(head[4 * FIRST_WORD :], "little")
    if bits & PROBLEM_MASK != problem.identity:
        if field(bits, "dv_minus_1") == problem.d - 1:
            # CANN's signature has no head_dim_v, so its callers make metadata for Dv = D. No range depends on
            # Dv: it fits.
            problem = replace(problem, dv=problem.d)
        if bits & PROBLEM_MASK != problem.identity:
            _raise_difference(op, bits, problem)
    section_num, _, _, _, aic, aiv = unpack_from("<6i", head)
    if section_num < 1 or aic < 1 or aiv < 1:
        raise _error(op, "must hold positive counts", f"section_num={section_num}, aic={aic}, aiv={aiv}")
    is_grad = bits & GRAD_BIT != 0
    words = total_words(section_num, aic, aiv, field(bits, "cube_slots"), is_grad)
    if length != words:
        raise _error(op, f"must have {words} words by its own head", f"{length} words")
    if need_grad and not is_grad:
        raise _error(op, "must be made with is_grad_enabled=True", "is_grad_enabled=False")


def _error(op: str, rule: str, got: object, remedy: str = _REMEDY) -> MetadataError:
    return MetadataError(message(op, "metadata", rule, got, remedy=remedy))


def _raise_difference(op: str, bits: int, problem: AttentionProblem) -> None:
    """Raises the error for the first field of words 8..15 that differs from the problem's."""
    magic = bits & 0xFFFFFFFF
    if magic != MAGIC:
        raise _error(op, "must be made by flash_attn_metadata of fag", f"word {FIRST_WORD} = {magic:#x}")
    version = field(bits, "format_version")
    if version != FORMAT_VERSION:
        raise _error(op, f"must have format version {FORMAT_VERSION}", f"version {version}")
    numbers = dict(zip(_NUMBERED, _numbers(problem), strict=True))
    for name, argument in _COMPARED:
        if field(bits, name) != field(problem.identity, name):
            wanted = _show(name, argument, numbers[name.removesuffix("_minus_1")])
            raise _error(op, f"must be made for {wanted}", _show_folded(name, argument, field(bits, name)))
    lists = [
        name
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv")
        if numbers[f"has_{name}"]
    ]
    raise _error(
        op,
        f"must be made for the same {', '.join(lists) if lists else 'sizes'}",
        f"fingerprint {bits >> _CRC_SHIFT:#010x}, this call has {problem.identity >> _CRC_SHIFT:#010x}",
    )


def _show(name: str, argument: str, value: int) -> str:
    if name == "layout":
        return f"{argument}={LAYOUT_CODES[value] if value < len(LAYOUT_CODES) else value}"
    if name.startswith("has_"):
        return f"{argument} {'given' if value else 'not given'}"
    return f"{argument}={value}"


def _show_folded(name: str, argument: str, folded: int) -> str:
    if name in ("n1", "n2", "s1", "s2", "win_left", "win_right"):
        value = unfold16(folded)
        if value is None:
            return f"another {argument} >= 32768"
        return _show(name, argument, value)
    return _show(name, argument, folded + name.endswith("_minus_1"))


@dataclass(frozen=True)
class Report:
    """What `check` found wrong; nothing if the tensor is right."""

    findings: tuple[Finding, ...]

    @property
    def is_ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def __str__(self) -> str:
        if self.is_ok:
            return "ok: belongs to the problem, every visible block and tile is covered exactly once"
        return "\n".join(f"{finding.part}: {finding.field}: {finding.text}" for finding in self.findings)


def check(metadata: Any, problem: AttentionProblem) -> Report:
    """Checks a metadata tensor in full, in milliseconds: does it belong, is every visible tile covered once?

    Args:
        metadata: int32 array (n,) on the host, made by flash_attn_metadata or by CANN's operator. The latter
            has no identity, so that only its splits are checked.
        problem: What it should be for.
    """
    # Imported here, so that `import fag_metadata` stays quick.
    from .split_check import Finding, find_forward_faults, find_grad_faults
    from .view import unpack

    try:
        view = unpack(metadata)
        if view.identity is not None:
            check_metadata("check", metadata, problem, need_grad=False)
    except (InvalidTypeError, MetadataError) as error:
        return Report((Finding("head", "metadata", str(error)),))
    findings = find_forward_faults(view.forward, problem)
    if view.grad is not None:
        findings += find_grad_faults(view.grad, problem)
    return Report(tuple(findings))
