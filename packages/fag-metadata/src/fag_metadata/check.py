"""Does a metadata tensor belong to a call, and is it consistent?

`check_metadata` is what the operators run before every call: a comparison of eight words, about 2 us when
they match, and an error that names the first field that differs. `check` is the full report for people and
tests; the forward half of it is in `forward_check.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from struct import unpack_from
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import InvalidTypeError, MetadataError, message
from .findings import Finding
from .identity import FIRST_WORD, GRAD_BIT, PROBLEM_MASK, field, unfold16
from .layout import FORMAT_VERSION, HEAD_WORDS, LAYOUT_CODES, MAGIC, total_words

if TYPE_CHECKING:
    from .problem import AttentionProblem

_REMEDY = "Make it with flash_attn_metadata from the arguments of this call"
_HEAD_BYTES = 4 * HEAD_WORDS
_FIRST_BYTE = 4 * FIRST_WORD

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

    Args:
        op: Operator the user called, for the message.
        metadata: int32 array (n,) on the host.
        problem: What the call computes.
        need_grad: Whether the backward split must be there.

    Raises:
        InvalidTypeError: If it is not an int32 array.
        MetadataError: If it is truncated, was not made by flash_attn_metadata, or was made for another
            problem; the message names the first field that differs, with both values.

    Example:
        >>> from fag_metadata import AttentionProblem, flash_attn_metadata
        >>> sizes = dict(batch_size=1, max_seqlen_q=9, max_seqlen_kv=9)
        >>> problem = AttentionProblem.from_metadata_args(8, 4, 64, **sizes)
        >>> metadata = flash_attn_metadata(8, 4, 64, **sizes)
        >>> check_metadata("flash_attn", metadata, problem, need_grad=False)
    """
    if type(metadata) is not np.ndarray or metadata.dtype != np.int32:
        found = metadata.dtype if isinstance(metadata, np.ndarray) else type(metadata).__name__
        raise InvalidTypeError(message(op, "metadata", "must be an int32 array", found, remedy=_REMEDY))
    if metadata.ndim != 1:
        raise _error(op, "must have one dimension", f"shape {metadata.shape}")
    _check_head(op, metadata[:HEAD_WORDS].tobytes(), len(metadata), problem, need_grad)


@lru_cache(maxsize=256)  # what has passed once passes; errors are not cached
def _check_head(op: str, head: bytes, length: int, problem: AttentionProblem, need_grad: bool) -> None:
    if len(head) < _HEAD_BYTES:
        raise _error(op, f"must have at least {HEAD_WORDS} words", f"{length} words")
    bits = int.from_bytes(head[_FIRST_BYTE:], "little")
    if bits & PROBLEM_MASK != problem.identity.bits:
        if field(bits, "dv_minus_1") == problem.d - 1:
            # CANN's signature has no head_dim_v, so its callers make metadata for Dv = D. No range depends on
            # Dv: it fits.
            problem = replace(problem, dv=problem.d)
        if bits & PROBLEM_MASK != problem.identity.bits:
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
    expected = problem.identity
    for name, argument in _COMPARED:
        if field(bits, name) != field(expected.bits, name):
            wanted = _show(name, argument, expected.values[name])
            raise _error(op, f"must be made for {wanted}", _show_folded(name, argument, field(bits, name)))
    crc = bits >> 32 * (HEAD_WORDS - 1 - FIRST_WORD)
    lists = [
        name
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv")
        if expected.values[f"has_{name}"]
    ]
    raise _error(
        op,
        f"must be made for the same {', '.join(lists) if lists else 'sizes'}",
        f"fingerprint {crc:#010x}, this call has {expected.crc:#010x}",
    )


def _show(name: str, argument: str, value: int) -> str:
    if name == "layout":
        return f"{argument}={LAYOUT_CODES[value] if value < len(LAYOUT_CODES) else value}"
    if name.endswith("_minus_1"):
        return f"{argument}={value + 1}"
    if name.startswith("has_"):
        return f"{argument} {'given' if value else 'not given'}"
    return f"{argument}={value}"


def _show_folded(name: str, argument: str, folded: int) -> str:
    if name in ("n1", "n2", "s1", "s2", "win_left", "win_right"):
        value = unfold16(folded)
        if value is None:
            return f"another {argument} >= 32768"
        return _show(name, argument, value)
    return _show(name, argument, folded)


@dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        findings: What is wrong; empty if the tensor is right.
    """

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
    """Checks a metadata tensor in full: does it belong, is every visible tile covered once?

    Takes milliseconds; the operators use check_metadata.

    Args:
        metadata: int32 array (n,) on the host, made by flash_attn_metadata or by CANN's operator. The latter
            has no identity, so that only its splits are checked.
        problem: What it should be for.

    Returns:
        A report that lists everything that is wrong.

    Example:
        >>> from fag_metadata import AttentionProblem, flash_attn_metadata
        >>> sizes = dict(batch_size=1, max_seqlen_q=300, max_seqlen_kv=300)
        >>> metadata = flash_attn_metadata(8, 2, 64, **sizes, is_grad_enabled=True)
        >>> problem = AttentionProblem.from_metadata_args(8, 2, 64, **sizes)
        >>> check(metadata, problem).is_ok
        True
        >>> metadata[16 + 16 * 96 + 44] -= 1  # the end of core 0
        >>> print(check(metadata, problem))
        backward: start: tiles [2, 3) before core 1 are in no range (5632 visible pairs)
    """
    # Imported here, so that `import fag_metadata` stays quick.
    from .forward_check import find_forward_faults
    from .grad_check import find_grad_faults
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
