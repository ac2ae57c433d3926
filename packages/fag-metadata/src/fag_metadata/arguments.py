"""The argument rules of spec sections 3-5, one function per rule, each with its message.

`problem.py` decides which rules apply to a call; nothing else in the three packages checks arguments.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import problem_error, type_error
from .terms import INT32_MAX, Layout, Lengths, MaskMode, TensorSpec

Int64Array = NDArray[np.int64]
Lists = tuple["Lengths | None", "Lengths | None", "Lengths | None", "Lengths | None"]

MAX_BATCH = 65535
MAX_PAIRS = 2**53
MAX_HEAD_DIM = 256
FLOAT32_MAX = 3.4028234663852886e38
INPUT_DTYPES = ("float16", "bfloat16", "float32")
ATTN_MASK_SIZE = 2048
ATTN_MASK_DTYPES = ("int8", "uint8", "bool")
_LAYOUTS = {layout.value: layout for layout in Layout}


def parse_int(op: str, name: str, value: Any, low: int, high: int) -> int:
    """Returns `value` as an int of low..high; a bool, float, array or tensor is a type error."""
    if type(value) is not int:
        if not isinstance(value, (int, np.integer)) or isinstance(value, (bool, np.bool_)):
            raise type_error(op, name, "must be an int", f"{type(value).__name__} {value!r:.60}")
        value = int(value)
    if not low <= value <= high:
        raise problem_error(op, name, f"must be in {low}..{high}", value)
    return value  # type: ignore[no-any-return]


def parse_layout(op: str, name: str, value: Any) -> Layout:
    """Returns the Layout of that exact name."""
    if isinstance(value, Layout):
        return value
    if not isinstance(value, str):
        raise type_error(op, name, "must be a layout name", f"{type(value).__name__} {value!r:.60}")
    found = _LAYOUTS.get(value)
    if found is None:
        raise problem_error(op, name, "must be BSND, BNSD or TND (upper case)", repr(value))
    return found


def check_layouts(op: str, layout_q: Layout, layout_kv: Any, layout_out: Any, *, is_grad: bool) -> Layout:
    """Checks layout_kv and layout_out against layout_q; returns the layout of the output."""
    if parse_layout(op, "layout_kv", layout_kv) is not layout_q:
        raise problem_error(op, "layout_kv", "must equal layout_q", layout_kv, layout_q=layout_q)
    out = parse_layout(op, "layout_out", layout_out)
    if out is layout_q or (not is_grad and layout_q is Layout.BNSD and out is Layout.BSND):
        return out
    rule = "must equal layout_q" if is_grad else "must equal layout_q (or be BSND with layout_q BNSD)"
    raise problem_error(op, "layout_out", rule, out, layout_q=layout_q)


def check_windows(op: str, mode: MaskMode, win_left: Any, win_right: Any) -> tuple[int, int]:
    """Returns both windows; each is -1 (unbounded) or 0..2^31-1, and -1 unless the mode is SLIDING_WINDOW."""
    for name, value in (("win_left", win_left), ("win_right", win_right)):
        if type(value) is int and value == -1:
            continue
        if parse_int(op, name, value, -INT32_MAX - 1, 2**63) < -1 or value > INT32_MAX:
            raise problem_error(op, name, f"must be -1 (unbounded) or in 0..{INT32_MAX}", value)
        if value != -1 and mode is not MaskMode.SLIDING_WINDOW:
            raise problem_error(
                op,
                name,
                f"must be -1 with mask_mode {mode.name}",
                value,
                mask_mode=int(mode),
                remedy="Use mask_mode SLIDING_WINDOW (4) for a window",
            )
    return int(win_left), int(win_right)


def check_heads(op: str, names: tuple[str, str], n1: int, n2: int) -> None:
    """Checks that N1 is a multiple of N2; both are positive already."""
    if n1 % n2:
        raise problem_error(
            op,
            names[0],
            f"must be a multiple of {names[1]}",
            f"{names[0]}={n1}, {names[1]}={n2}",
            remedy="Pad heads, or pass repeated k and v",
        )


def check_head_dims(op: str, names: tuple[str, str], d: int, dv: int) -> None:
    """Checks 0 < D <= 256 and 0 < Dv <= D, of the arguments or tensors of these names."""
    verb = "be" if names[0] == "head_dim" else "have"
    if not 0 < d <= MAX_HEAD_DIM:
        raise problem_error(op, names[0], f"must {verb} a head dim D in 1..{MAX_HEAD_DIM}", f"D={d}", Dv=dv)
    if not 0 < dv <= d:
        raise problem_error(op, names[1], f"must {verb} a head dim Dv in 1..D", f"Dv={dv}", D=d)


def check_cu_seqlens(op: str, name: str, offsets: Lengths, tokens: int | None) -> None:
    """Checks shape (B+1,), first 0, non-decreasing and, if the number of tokens is known, last = T."""
    values = offsets.values
    if len(values) == 0:
        raise problem_error(op, name, "must have B+1 elements", "0 elements")
    if len(values) - 1 > MAX_BATCH:
        raise problem_error(op, name, f"must describe a batch of at most {MAX_BATCH}", f"B={len(values) - 1}")
    if values[0] != 0:
        raise problem_error(op, name, "must start with 0", int(values[0]))
    steps = values[1:] - values[:-1]
    if len(steps) and steps.min() < 0:
        where = int(np.argmax(steps < 0))
        raise problem_error(
            op,
            name,
            "must not decrease",
            f"{int(values[where + 1])} after {int(values[where])}",
            index=where + 1,
        )
    if tokens is not None and values[-1] != tokens:
        raise problem_error(op, name, "must end with the number of tokens T", int(values[-1]), T=tokens)


def check_seqused(op: str, name: str, used: Lengths, b: int, slots: NDArray[np.int64] | int | None) -> None:
    """Checks shape (B,) and 0 <= value <= the slot's length, where that is known."""
    values = used.values
    if len(values) != b:
        raise problem_error(op, name, "must have B elements", f"{len(values)} elements", B=b)
    if b == 0:
        return
    if values.min() < 0:
        where = int(np.argmax(values < 0))
        raise problem_error(op, name, "must not be negative", int(values[where]), index=where)
    if slots is not None and (values > slots).any():
        where = int(np.argmax(values > slots))
        slot = int(slots if isinstance(slots, int) else slots[where])
        raise problem_error(
            op, name, "must not exceed the length of the slot", int(values[where]), index=where, slot=slot
        )


def check_max_seqlen(op: str, name: str, value: Any, longest: int) -> int:
    """Returns the bound: -1 (none), or at least the true maximum."""
    bound = parse_int(op, name, value, -INT32_MAX - 1, INT32_MAX)
    if (bound != -1 and bound < longest) or bound < -1:
        raise problem_error(
            op,
            name,
            "must be -1 or at least the longest sequence",
            bound,
            longest=longest,
            remedy="It is only a bound; leave it out if in doubt",
        )
    return bound


def check_batch(op: str, name: str, b: int) -> None:
    """Checks 0 <= B < 65536."""
    if not 0 <= b <= MAX_BATCH:
        raise problem_error(op, name, f"must have a batch B of at most {MAX_BATCH}", f"B={b}")


def check_int32_count(op: str, name: str, count: int, **related: int) -> None:
    """Checks that a number which the metadata tensor holds as int32 fits."""
    if count > INT32_MAX:
        raise problem_error(op, name, f"must be at most {INT32_MAX}", count, remedy="", **related)


def check_pairs(op: str, n1: int, t1: int, s2: int) -> None:
    """Checks that areas (query-key pairs of all heads) times cores fit int64 and are exact in float64."""
    if n1 * t1 * s2 > MAX_PAIRS:
        need = "must keep N1 * query tokens * longest key sequence at most 2^53"
        raise problem_error(op, "max_seqlen_q", need, n1 * t1 * s2, N1=n1, tokens=t1, longest=s2)


def check_dtype(op: str, name: str, spec: TensorSpec, expected: str, reference: str = "") -> None:
    """Checks that a tensor has the dtype `expected`, which may be that of the tensor `reference`."""
    if spec.dtype != expected:
        if reference:
            raise type_error(
                op, name, f"must have the dtype of {reference}", spec.dtype, **{reference: expected}
            )
        raise type_error(op, name, f"must be {expected}", spec.dtype)


def check_input_dtype(op: str, name: str, spec: TensorSpec) -> None:
    """Checks that a tensor has one of the dtypes that the operators compute in."""
    if spec.dtype not in INPUT_DTYPES:
        raise type_error(op, name, "must be float16, bfloat16 or float32", spec.dtype)


def check_shape(op: str, name: str, spec: TensorSpec, expected: tuple[int, ...], axes: str) -> None:
    """Checks a shape that the other arguments determine."""
    if tuple(spec.shape) != expected:
        raise problem_error(op, name, f"must have shape {axes} = {expected}", f"shape {tuple(spec.shape)}")


def check_rank(op: str, name: str, spec: TensorSpec, layout: Layout) -> None:
    """Checks the number of dimensions of q, k or v for its layout."""
    if len(spec.shape) != len(layout.value):
        axes = ", ".join(layout.value)
        raise problem_error(
            op, name, f"must have shape ({axes}) with layout {layout}", f"shape {tuple(spec.shape)}"
        )


def check_attn_mask(op: str, spec: TensorSpec, mode: MaskMode) -> None:
    """Checks that an attn_mask is described like CANN's constant, and that the mode takes one."""
    form = "must be None or CANN's constant: int8, uint8 or bool (2048, 2048), 0 on and below the diagonal"
    if mode is MaskMode.NO_MASK:
        raise problem_error(
            op, "attn_mask", "must be None with mask_mode NO_MASK", f"shape {tuple(spec.shape)}", mask_mode=0
        )
    if spec.dtype not in ATTN_MASK_DTYPES:
        raise type_error(op, "attn_mask", form, spec.dtype)
    if tuple(spec.shape) != (ATTN_MASK_SIZE, ATTN_MASK_SIZE):
        raise problem_error(op, "attn_mask", form, f"shape {tuple(spec.shape)}")


def check_attn_mask_content(op: str, mask: Any) -> None:
    """Checks that an attn_mask holds CANN's constant: 0 on and below the diagonal, 1 above.

    It has passed check_attn_mask; 4 MiB are read, which takes about a millisecond.
    """
    values = np.asarray(mask)
    differs = values != _attn_mask_constant()
    if differs.any():
        row, column = divmod(int(np.argmax(differs)), ATTN_MASK_SIZE)
        raise problem_error(
            op,
            "attn_mask",
            "must be CANN's constant: 0 (visible) on and below the diagonal, 1 (hidden) above",
            f"{values[row, column]} at [{row}, {column}]",
            remedy="Pass None; mask_mode, win_left and win_right say what is masked",
        )


def _attn_mask_constant() -> NDArray[np.bool_]:
    index = np.arange(ATTN_MASK_SIZE, dtype=np.int32)
    return index[:, None] < index[None, :]


def check_block_table(op: str, block_table: Any) -> None:
    """Refuses paged keys and values, which no route reads."""
    if block_table is not None:
        raise problem_error(
            op,
            "block_table",
            "must be None",
            f"shape {tuple(getattr(block_table, 'shape', ()))}",
            remedy="Paged keys and values are not supported: gather the pages into k and v first",
        )


def check_softmax_scale(op: str, value: Any) -> float:
    """Returns softmax_scale as a float; it must be finite."""
    if type(value) is float and abs(value) <= FLOAT32_MAX:
        return value
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise type_error(op, "softmax_scale", "must be a float", f"{type(value).__name__} {value!r:.60}")
    scale = float(value)
    if not math.isfinite(scale) or abs(scale) > FLOAT32_MAX:
        raise problem_error(op, "softmax_scale", "must be finite in float32", scale)
    return scale


def parse_lists(op: str, cu_q: Any, cu_kv: Any, used_q: Any, used_kv: Any) -> Lists:
    """Reads the four lists, None where not given."""
    return (
        None if cu_q is None else Lengths.parse(op, "cu_seqlens_q", cu_q),
        None if cu_kv is None else Lengths.parse(op, "cu_seqlens_kv", cu_kv),
        None if used_q is None else Lengths.parse(op, "seqused_q", used_q),
        None if used_kv is None else Lengths.parse(op, "seqused_kv", used_kv),
    )


def batch_of_lists(op: str, layout: Layout, lists: Lists, b_given: int, b_name: str = "batch_size") -> int:
    """Returns B: what is given, or the length of the lists, which must agree."""
    cu_q, cu_kv, used_q, used_kv = lists
    if layout is Layout.TND:
        for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
            if cu is None:
                raise problem_error(op, name, "must be given with layout TND", None)
            check_cu_seqlens(op, name, cu, None)
        assert cu_q is not None
        assert cu_kv is not None
        b = len(cu_q) - 1
        if len(cu_kv) - 1 != b:
            raise problem_error(
                op,
                "cu_seqlens_kv",
                "must describe the batch of cu_seqlens_q",
                f"B={len(cu_kv) - 1}",
                cu_seqlens_q=f"B={b}",
            )
        if b_name == "batch_size" and b_given not in (-1, b):
            raise problem_error(
                op,
                "batch_size",
                "must be that of cu_seqlens_q",
                b_given,
                cu_seqlens_q=f"B={b}",
                remedy="Leave it out",
            )
        return b
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
        if cu is not None:
            raise problem_error(
                op,
                name,
                f"must be None with layout {layout}",
                f"{len(cu)} elements",
                remedy="Use layout TND, or seqused",
            )
    if b_given != -1:
        check_batch(op, b_name, b_given)
    elif used_q is None and used_kv is None:
        raise problem_error(op, b_name, f"must be given with layout {layout} without lengths", None)
    for name, used in (("seqused_q", used_q), ("seqused_kv", used_kv)):
        if used is not None and b_given == -1:
            b_given = len(used)
            check_batch(op, name, b_given)
        elif used is not None and len(used) != b_given:
            raise problem_error(op, name, "must have B elements", f"{len(used)} elements", B=b_given)
    return b_given


def steps(offsets: Lengths) -> Int64Array:
    """Returns the differences of cu_seqlens, (b,)."""
    steps: Int64Array = offsets.values[1:] - offsets.values[:-1]
    return steps


def longest_of(used: Lengths | None, cu: Lengths | None) -> int:
    """Returns the longest real length of a side with lists, 0 for an empty batch."""
    if used is not None:
        return int(used.values.max(initial=0))
    assert cu is not None
    return int(steps(cu).max(initial=0))


def effective(used: Lengths | None, cu: Lengths | None, b: int, s: int) -> Int64Array:
    """Returns the real lengths of a side, (b,), read-only."""
    if used is not None:
        lengths = used.values
    elif cu is not None:
        lengths = steps(cu)
    else:
        lengths = np.empty(b, np.int64)
        lengths.fill(s)  # a third of the time of np.full
    lengths.flags.writeable = False
    return lengths


def starts(cu: Lengths | None, b: int, s: int) -> Int64Array:
    """Returns the first token of each batch entry, (b,), read-only."""
    first: Int64Array = cu.values[:-1] if cu is not None else np.arange(b, dtype=np.int64) * s
    first.flags.writeable = False
    return first
