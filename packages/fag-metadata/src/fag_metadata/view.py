"""unpack: the int32 metadata tensor as typed, frozen values; the inverse of `layout.pack`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .errors import InvalidTypeError, MetadataError, message
from .identity import FIRST_WORD, field, unfold16
from .layout import (
    CANN_CUBE_SLOTS,
    FORMAT_VERSION,
    HEAD_WORDS,
    IDENTITY,
    LAYOUT_CODES,
    MAGIC,
    ForwardSplit,
    GradSplit,
    Int32Array,
    Route,
    Split,
    grad_offset,
    grad_words,
    pack,
    row_views,
    total_words,
)
from .terms import Layout, MaskMode

_OP = "unpack"


class ForwardRow(NamedTuple):
    """The forward blocks [start, end) of one cube core in one section.

    A position is (batch-head b * n2 + kv head, row block, column block).
    """

    section: int
    core: int
    start: tuple[int, int, int]
    end: tuple[int, int, int]
    first_slot: int


class MergeRow(NamedTuple):
    """What one vector core merges in one section; see FD_ROW in layout.py."""

    section: int
    core: int
    bn: int
    row: int
    first_slot: int
    num_partials: int
    row_start: int
    row_count: int


class TileRange(NamedTuple):
    """The backward tiles of one cube core, and the batch entry it starts in (variable lengths only)."""

    core: int
    start: int
    end: int
    batch: int


@dataclass(frozen=True)
class Identity:
    """What the head says about the problem, target and split, by the names of IDENTITY in layout.py.

    Numbers of the problem are None where only a fold of them is stored (32768 and more).
    """

    format_version: int
    route: Route
    split: Split
    layout: Layout
    mask_mode: MaskMode
    is_grad: bool
    has_cu_seqlens_q: bool
    has_cu_seqlens_kv: bool
    has_seqused_q: bool
    has_seqused_kv: bool
    n1: int | None
    n2: int | None
    b: int
    cube_slots: int
    d: int
    dv: int
    target_id: int
    s1: int | None
    s2: int | None
    win_left: int | None
    win_right: int | None
    crc: int


@dataclass(frozen=True, eq=False)
class Metadata:
    """A metadata tensor taken apart; `pack()` puts it together again, word for word.

    Attributes:
        identity: Problem, target and split, or None in a tensor of CANN's operator.
        aic: Cube cores.
        aiv: Vector cores.
        forward: Forward split.
        grad: Backward split, or None.
    """

    identity: Identity | None
    aic: int
    aiv: int
    forward: ForwardSplit
    grad: GradSplit | None
    _identity_words: Int32Array

    @property
    def forward_rows(self) -> list[ForwardRow]:
        """The FA rows of the cube cores that have work."""
        rows = []
        for section, core in np.argwhere(self.forward.fa[:, :, 3:6].any(axis=2)).tolist():
            words = self.forward.fa[section, core].tolist()
            rows.append(ForwardRow(section, core, tuple(words[0:3]), tuple(words[3:6]), words[6]))
        return rows

    @property
    def merge_rows(self) -> list[MergeRow]:
        """The FD rows of the vector cores that have work."""
        busy = np.argwhere(self.forward.fd[:, :, 5] > 0).tolist()
        return [
            MergeRow(section, core, *self.forward.fd[section, core, :6].tolist()) for section, core in busy
        ]

    @property
    def tile_ranges(self) -> list[TileRange]:
        """The backward ranges of the cube cores that have one; empty without gradient."""
        if self.grad is None:
            return []
        used = range(self.grad.used_cubes)
        return list(
            map(TileRange, used, *(x.tolist() for x in (self.grad.start, self.grad.end, self.grad.batch)))
        )

    def pack(self) -> Int32Array:
        """Returns the tensor again, int32 (n,), padded to our length."""
        return pack(self.forward, self.grad, self._identity_words)


def unpack(metadata: Any) -> Metadata:
    """Takes a metadata tensor apart, into typed, read-only values.

    Args:
        metadata: int32 array (n,) on the host, made by flash_attn_metadata or by CANN's operator.

    Raises:
        InvalidTypeError: If it is not an int32 array.
        MetadataError: If it is truncated, or its head is not one of this format.
    """
    words = np.asarray(metadata)
    if words.dtype != np.int32:
        raise InvalidTypeError(message(_OP, "metadata", "must be int32", words.dtype))
    if words.ndim != 1:
        raise _error("must have one dimension", f"shape {words.shape}")
    if len(words) < HEAD_WORDS:
        raise _error(f"must have at least {HEAD_WORDS} words", f"{len(words)} words")
    section_num, has_fd, m, k, aic, aiv, row_layout, offset = words[:8].tolist()
    if section_num < 1 or aic < 1 or aiv < 1:
        raise _error("must hold positive counts", f"section_num={section_num}, aic={aic}, aiv={aiv}")
    if row_layout != 0:
        raise _error("must have row_layout 0", row_layout)
    rows_end = grad_offset(section_num, aic, aiv)
    if offset not in (0, rows_end):
        raise _error(f"must have grad_offset 0 or {rows_end}", offset)
    identity = _unpack_identity(words)
    if identity is None:  # CANN's length is free
        slots = CANN_CUBE_SLOTS
        needed = rows_end + (grad_words(slots) if offset else 0)
    else:
        slots = identity.cube_slots
        if identity.is_grad != (offset != 0):
            raise _error("must have a grad_offset exactly with is_grad", offset, is_grad=identity.is_grad)
        needed = total_words(section_num, aic, aiv, slots, identity.is_grad)
    if len(words) < needed or (identity and len(words) > needed):
        raise _error(f"must have {needed} words by its own head", f"{len(words)} words")
    words = words.copy()
    words.flags.writeable = False
    forward = ForwardSplit(section_num, bool(has_fd), m, k, *row_views(words, section_num, aic, aiv))
    grad = GradSplit(slots, words[offset : offset + grad_words(slots)]) if offset else None
    return Metadata(identity, aic, aiv, forward, grad, words[FIRST_WORD:HEAD_WORDS])


def _error(rule: str, got: object, **related: object) -> MetadataError:
    return MetadataError(message(_OP, "metadata", rule, got, **related))  # type: ignore[arg-type]


def _unpack_identity(words: Int32Array) -> Identity | None:
    bits = int.from_bytes(words[FIRST_WORD:HEAD_WORDS].tobytes(), "little")
    if not bits:
        return None
    if bits & 0xFFFFFFFF != MAGIC:
        raise _error(f"must have magic {MAGIC:#x}, or zeros in words 8..15", hex(bits & 0xFFFFFFFF))
    values: dict[str, Any] = {place.name: field(bits, place.name) for place in IDENTITY}
    if values["format_version"] != FORMAT_VERSION:
        raise _error(f"must have format version {FORMAT_VERSION}", values["format_version"])
    try:
        values["layout"] = Layout(LAYOUT_CODES[values["layout"]])
        for name, kind in (("route", Route), ("split", Split), ("mask_mode", MaskMode)):
            values[name] = kind(values[name])
    except (ValueError, IndexError) as error:
        raise _error("must hold a known route, mask mode and layout", error) from None
    for name in values:
        if name.startswith(("has_", "is_")):
            values[name] = bool(values[name])
    for name in ("n1", "n2", "s1", "s2", "win_left", "win_right"):
        values[name] = unfold16(values[name])
    d, dv = values.pop("d_minus_1") + 1, values.pop("dv_minus_1") + 1
    return Identity(**values, d=d, dv=dv, crc=bits >> 32 * (HEAD_WORDS - 1 - FIRST_WORD))
