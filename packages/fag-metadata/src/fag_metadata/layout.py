"""The int32 metadata tensor as one table of named fields; everything that knows an offset takes it from here.

The tensor is CANN's `flash_attn_metadata` (words 0..7 of the head, the rows and the FAG block), with our
identity in the head words 8..15 that CANN leaves zero:

    0                                head, 16 words
    16                               FA rows: section_num x aic x 16 words
    16 + section_num*aic*16          FD rows: section_num x aiv x 16 words
    16 + section_num*(aic+aiv)*16    FAG block, only with is_grad; C cube slots and 2*C vector slots

pack, unpack and `include/fag_metadata/layout.h` are derived from the tables HEAD, IDENTITY, FA_ROW, FD_ROW
and GRAD. A change of a table needs a step of FORMAT_VERSION.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from os import path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]

FORMAT_VERSION = 1
MAGIC = 0x31474146
"""The bytes "FAG1"."""

HEAD_WORDS = 16
ROW_WORDS = 16
CANN_CUBE_SLOTS = 36
"""Cube slots of CANN's FAG block. Targets with more cores get more slots, which no Ascend target needs."""
ALIGN_WORDS = 4096
MIN_WORDS = 8192
"""The view of the tensor that CANN's grad kernel declares."""

TILE = 128
"""Rows and columns of a backward tile; the last of a sequence may be smaller."""
BWD_UNIT_KEYS = 256
"""Every kernel sums dQ within units of this many keys from zero, then over the units in key order."""
FWD_UNIT_KEYS = 2048
"""The online softmax of a row starts afresh in each unit of this many keys; the units merge in key order."""
FWD_STEP_KEYS = 128
"""Keys of one step of the online softmax inside a unit."""


class Route(IntEnum):
    """Kernel template that a split is made for."""

    BN2GS1S2 = 0
    """Tiles of a head may be spread over cores."""
    BN2_SINGLE = 1
    """A core owns whole heads of one tile."""
    BN2_MULTIBLK = 2
    """A core owns whole heads of several tiles."""


class Split(IntEnum):
    """How the ranges were chosen."""

    CANN = 0
    """Word for word CANN's algorithm."""
    BALANCED = 1
    """By visible area."""


class LayoutWord(IntEnum):
    """CANN's layout word in the FAG block."""

    BSND = 1
    BNSD = 3
    TND = 4


LAYOUT_CODES = ("BSND", "BNSD", "TND")
"""Layout code of the identity: the index in this tuple."""


class Field(NamedTuple):
    """One named place of a table: `cubes` = 0 is one word, 1 one word per cube slot, 2 one per vector
    slot.
    """

    name: str
    cubes: int
    doc: str


class Bits(NamedTuple):
    """A named group of bits of a head word."""

    name: str
    word: int
    shift: int
    width: int
    doc: str


HEAD = (
    Field("section_num", 0, "sections, at least 1"),
    Field("has_fd", 0, "1 if any section has merge (flash-decode) work"),
    Field("m", 0, "rows of a forward base block"),
    Field("k", 0, "columns of a forward base block"),
    Field("aic", 0, "cube cores, FA rows per section"),
    Field("aiv", 0, "vector cores, FD rows per section"),
    Field("row_layout", 0, "0: the query heads of a kv head are merged into the rows"),
    Field("grad_offset", 0, "word offset of the FAG block, 0 without gradient"),
    Field("magic", 0, "MAGIC if made by this package"),
    Field("flags", 0, "format version, route, layout, mask mode, split, gradient, lists; see IDENTITY"),
    Field("heads", 0, "n1 and n2"),
    Field("batch_slots", 0, "batch size and cube slots of the FAG block"),
    Field("dims", 0, "d - 1, dv - 1, target id"),
    Field("lengths", 0, "s1 and s2; 0 on a side with explicit lengths"),
    Field("windows", 0, "win_left and win_right"),
    Field("identity_crc", 0, "crc32 of the whole identity: the fields above unfolded, and the lengths"),
)

IDENTITY = (
    Bits("format_version", 9, 0, 8, "FORMAT_VERSION"),
    Bits("route", 9, 8, 3, "Route"),
    Bits("layout", 9, 11, 2, "0 BSND, 1 BNSD, 2 TND"),
    Bits("mask_mode", 9, 13, 3, "MaskMode"),
    Bits("split", 9, 16, 1, "Split"),
    Bits("is_grad", 9, 17, 1, "1 if the FAG block is there"),
    Bits("has_cu_seqlens_q", 9, 18, 1, "1 if cu_seqlens_q was given"),
    Bits("has_cu_seqlens_kv", 9, 19, 1, "1 if cu_seqlens_kv was given"),
    Bits("has_seqused_q", 9, 20, 1, "1 if seqused_q was given"),
    Bits("has_seqused_kv", 9, 21, 1, "1 if seqused_kv was given"),
    Bits("n1", 10, 0, 16, "query heads, folded"),
    Bits("n2", 10, 16, 16, "key-value heads, folded"),
    Bits("b", 11, 0, 16, "batch size"),
    Bits("cube_slots", 11, 16, 16, "cube slots of the FAG block"),
    Bits("d_minus_1", 12, 0, 8, "head dim - 1"),
    Bits("dv_minus_1", 12, 8, 8, "head dim of v - 1"),
    Bits("target_id", 12, 16, 16, "low 16 bits of crc32 of the target's name; for information"),
    Bits("s1", 13, 0, 16, "query length, folded; 0 with explicit query lengths"),
    Bits("s2", 13, 16, 16, "key length, folded; 0 with explicit key lengths"),
    Bits("win_left", 14, 0, 16, "left window, folded; 0xffff = unbounded"),
    Bits("win_right", 14, 16, 16, "right window, folded; 0xffff = unbounded"),
)

FA_ROW = (
    Field("start_bn", 0, "first batch-head b*n2 + kv head"),
    Field("start_row", 0, "first row block"),
    Field("start_col", 0, "first column block"),
    Field("end_bn", 0, "end (exclusive): batch-head"),
    Field("end_row", 0, "end: row block"),
    Field("end_col", 0, "end: column block"),
    Field("first_slot", 0, "workspace slot of the first partial result"),
)

FD_ROW = (
    Field("bn", 0, "batch-head of the row block whose partial results are merged"),
    Field("row", 0, "that row block"),
    Field("first_slot", 0, "first workspace slot of the row block"),
    Field("num_partials", 0, "number of partial results, in consecutive slots"),
    Field("row_start", 0, "first row inside the row block that this vector core merges"),
    Field("row_count", 0, "number of rows that this vector core merges, 0 = idle"),
)

GRAD = (
    Field("split_axis", 0, "0: all axes; 1: whole heads (BN2)"),
    Field("used_cubes", 0, "cube cores with a range, U"),
    Field("tiles_per_core", 0, "block factor"),
    Field("o1", 0, "tiles along q for the longest sequence"),
    Field("o2", 0, "tiles along kv for the longest sequence"),
    Field("layout", 0, "LayoutWord; TND with equal lengths is written as BSND"),
    Field("is_sparse", 0, "1 if the mask hides tiles"),
    Field("sparse_mode", 0, "0, 3 or 4"),
    Field("start", 1, "first tile of each cube core"),
    Field("end", 1, "end tile (exclusive) of each cube core"),
    Field("batch", 1, "batch entry in which each cube core starts, with variable lengths"),
    Field("mask_mode", 0, "MaskMode as given"),
    Field("win_left", 0, "left window as given"),
    Field("win_right", 0, "right window as given"),
    Field("s1", 0, "query length or bound that the tiles were counted with"),
    Field("s2", 0, "key length or bound that the tiles were counted with"),
    Field("used_vectors", 0, "vector cores of the clear and convert passes"),
    Field("dq_rows", 0, "rows of dQ"),
    Field("dkv_rows", 0, "rows of dK and dV"),
    Field("dq_start", 2, "first dQ row of each vector core"),
    Field("dq_end", 2, "end dQ row of each vector core"),
    Field("dkv_start", 2, "first dK/dV row of each vector core"),
    Field("dkv_end", 2, "end dK/dV row of each vector core"),
)


@lru_cache(maxsize=64)
def grad_slices(cube_slots: int) -> dict[str, slice]:
    """Returns the words of each field of the FAG block, relative to its start."""
    slices, offset = {}, 0
    for field in GRAD:
        size = field.cubes * cube_slots if field.cubes else 1
        slices[field.name] = slice(offset, offset + size)
        offset += size
    return slices


@lru_cache(maxsize=64)
def grad_words(cube_slots: int) -> int:
    """Returns the length of a FAG block: 412 with CANN's 36 slots."""
    return sum(field.cubes * cube_slots if field.cubes else 1 for field in GRAD)


def cube_slots(cube_cores: int) -> int:
    """Returns the cube slots of the FAG block for a target: CANN's 36, or more if it has more cores."""
    return max(CANN_CUBE_SLOTS, cube_cores)


def grad_offset(section_num: int, aic: int, aiv: int) -> int:
    """Returns the word at which the rows end and the FAG block starts."""
    return HEAD_WORDS + section_num * (aic + aiv) * ROW_WORDS


@lru_cache(maxsize=64)
def total_words(section_num: int, aic: int, aiv: int, slots: int, is_grad: bool) -> int:
    """Returns the length of the whole tensor: the written words rounded up to 4096, at least 8192."""
    words = grad_offset(section_num, aic, aiv) + (grad_words(slots) if is_grad else 0)
    return max(MIN_WORDS, -(-words // ALIGN_WORDS) * ALIGN_WORDS)


def get_include() -> str:
    """Returns the directory to pass to a C or C++ compiler so that `fag_metadata/layout.h` is found."""
    return path.join(path.dirname(path.abspath(__file__)), "include")


@dataclass(frozen=True, eq=False)
class ForwardSplit:
    """Who computes which forward blocks, and who merges which partial results.

    Attributes:
        section_num: Sections, processed one after the other so that a section's keys stay in L2; at least 1.
        has_fd: Whether any section has merge work.
        m: Rows of a base block (query position x query head of a kv head).
        k: Columns (keys) of a base block.
        fa: int32 (section_num, aic, 16), words as in FA_ROW: one row per cube core.
        fd: int32 (section_num, aiv, 16), words as in FD_ROW: one row per vector core.
        tensor: The tensor that fa and fd lie in, or None; see new_tensor.
    """

    section_num: int
    has_fd: bool
    m: int
    k: int
    fa: Int32Array
    fd: Int32Array
    tensor: Int32Array | None = None


class GradSplit:
    """Who computes which backward tiles: a FAG block, read by the names of the table GRAD, which describes
    them.

    A tile is 128 queries x 128 keys of one query head; numbers count all tiles, also masked ones, in the
    order batch, kv head, query head of it, key tile, query tile (fastest). With is_variable each batch entry
    has its own rectangle of ceil(len_q/128) x ceil(len_kv/128) tiles per head, otherwise all have o1 x o2.
    Words per core are int32 (C,), words per vector core int32 (2*C,), C = `slots`: views of `words`, that are
    (grad_words(C),); None = zeros, to be filled.
    """

    split_axis: int
    used_cubes: int
    tiles_per_core: int
    o1: int
    o2: int
    layout: int
    is_sparse: int
    sparse_mode: int
    start: Int32Array
    end: Int32Array
    batch: Int32Array
    mask_mode: int
    win_left: int
    win_right: int
    s1: int
    s2: int
    used_vectors: int
    dq_rows: int
    dkv_rows: int
    dq_start: Int32Array
    dq_end: Int32Array
    dkv_start: Int32Array
    dkv_end: Int32Array

    def __init__(self, slots: int, words: Int32Array | None = None) -> None:
        if words is None:
            words = np.zeros(grad_words(slots), np.int32)
        self.words = words
        self.slots = slots

    def __getattr__(self, name: str) -> Any:
        where = None if name == "slots" else grad_slices(self.slots).get(name)
        if where is None:
            raise AttributeError(f"GradSplit has no attribute {name!r}")
        return self.words[where] if name in _grad_arrays else int(self.words[where.start])


_grad_arrays = frozenset(field.name for field in GRAD if field.cubes)


def new_tensor(section_num: int, aic: int, aiv: int, slots: int) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Returns a tensor of zeros with room for a FAG block of that many cube slots, and its FA and FD rows as
    views, int32 (section_num, aic, 16) and (section_num, aiv, 16).
    """
    tensor = np.zeros(total_words(section_num, aic, aiv, slots, True), np.int32)
    return tensor, *row_views(tensor, section_num, aic, aiv)


def row_views(tensor: Int32Array, section_num: int, aic: int, aiv: int) -> tuple[Int32Array, Int32Array]:
    """Returns the FA and FD rows of a tensor."""
    fd_offset = HEAD_WORDS + section_num * aic * ROW_WORDS
    fa = tensor[HEAD_WORDS:fd_offset].reshape(section_num, aic, ROW_WORDS)
    fd = tensor[fd_offset : grad_offset(section_num, aic, aiv)].reshape(section_num, aiv, ROW_WORDS)
    return fa, fd


put_8_words = Struct("8i").pack_into  # takes a fifth of the time of an assignment to a slice


def pack(forward: ForwardSplit, grad: GradSplit | None, identity: Int32Array | None = None) -> Int32Array:
    """Writes the splits as one int32 tensor, padded with zeros; without `identity` words 8..15 are zero as in
    CANN's. Where the forward split lies in a tensor already, that one is completed and returned.
    """
    aic, aiv = forward.fa.shape[1], forward.fd.shape[1]
    words = forward.tensor
    if words is None:
        slots = cube_slots(aic) if grad is None else grad.slots
        words, fa, fd = new_tensor(forward.section_num, aic, aiv, slots)
        fa[:], fd[:] = forward.fa, forward.fd
    offset = grad_offset(forward.section_num, aic, aiv)
    put_8_words(
        words.data, 0, forward.section_num, forward.has_fd, forward.m, forward.k, aic, aiv, 0,
        0 if grad is None else offset,
    )  # fmt: skip
    if identity is not None:
        words[8:HEAD_WORDS] = identity
    if grad is None:
        return words[: total_words(forward.section_num, aic, aiv, cube_slots(aic), False)]
    words[offset : offset + len(grad.words)] = grad.words
    return words
