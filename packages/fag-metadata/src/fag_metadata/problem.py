"""AttentionProblem: the one frozen description of a call that every later stage reads.

`from_metadata_args` and `from_tensors` apply the rules of `arguments.py`; nothing needs checking again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import Any

from . import arguments as rules
from .arguments import batch_of_lists, effective, longest_of, parse_lists, starts, steps
from .errors import problem_error
from .identity import problem_identity
from .ranges import Int64Array
from .terms import INT32_MAX, Layout, Lengths, MaskMode, TensorSpec


@dataclass(frozen=True, eq=False)
class AttentionProblem:
    """What is computed: shapes, lengths, mask and layout of one attention call, valid by construction.

    Make one with `from_metadata_args` or `from_tensors`; calling the class itself checks nothing.

    Attributes:
        layout: Layout of q, k and v.
        b: Batch size; with TND the number of packed sequences.
        n1: Query heads.
        n2: Key-value heads.
        d: Head dim of q and k.
        dv: Head dim of v and of the output.
        s1: Dense layouts: length of the query axis. TND: longest query sequence.
        s2: The same for keys.
        t1: Query tokens: b * s1, or the last of cu_seqlens_q.
        t2: Key tokens.
        mask_mode: See MaskMode.
        win_left: Keys visible to the left of the diagonal, -1 = unbounded.
        win_right: Keys visible to the right of the diagonal, -1 = unbounded.
        cu_seqlens_q: First token of each packed query sequence and the end, (b + 1,), or None.
        cu_seqlens_kv: The same for keys.
        seqused_q: Used length of each query slot, (b,), or None.
        seqused_kv: The same for keys.
        max_seqlen_q: The bound that was given, or -1. It never changes a result.
        max_seqlen_kv: The same for keys.

    Example:
        >>> problem = AttentionProblem.from_metadata_args(
        ...     8, 2, 128, batch_size=2, max_seqlen_q=100, max_seqlen_kv=300
        ... )
        >>> problem.g, problem.t2, problem.lengths_q.tolist()
        (4, 600, [100, 100])
    """

    layout: Layout
    b: int
    n1: int
    n2: int
    d: int
    dv: int
    s1: int
    s2: int
    t1: int
    t2: int
    mask_mode: MaskMode
    win_left: int
    win_right: int
    cu_seqlens_q: Lengths | None = None
    cu_seqlens_kv: Lengths | None = None
    seqused_q: Lengths | None = None
    seqused_kv: Lengths | None = None
    max_seqlen_q: int = -1
    max_seqlen_kv: int = -1

    @cached_property
    def _hash(self) -> int:
        return hash(_values(self))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, AttentionProblem) or self._hash != other._hash:
            return False
        return bool(_values(self) == _values(other))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the fields alone: a kept hash of names is another number in another process."""
        return self._of, _values(self)

    @property
    def g(self) -> int:
        """Query heads per key-value head."""
        return self.n1 // self.n2

    @cached_property
    def lengths_q(self) -> Int64Array:
        """Real query length of each batch entry, shape (b,)."""
        return effective(self.seqused_q, self.cu_seqlens_q, self.b, self.s1)

    @cached_property
    def lengths_kv(self) -> Int64Array:
        """Real key length of each batch entry, shape (b,)."""
        return effective(self.seqused_kv, self.cu_seqlens_kv, self.b, self.s2)

    @cached_property
    def starts_q(self) -> Int64Array:
        """First query token of each batch entry, counting the tokens of all slots, shape (b,)."""
        return starts(self.cu_seqlens_q, self.b, self.s1)

    @cached_property
    def starts_kv(self) -> Int64Array:
        """First key token of each batch entry, counting the tokens of all slots, shape (b,)."""
        return starts(self.cu_seqlens_kv, self.b, self.s2)

    @property
    def has_lengths_q(self) -> bool:
        """Whether query lengths were given, as cu_seqlens_q or seqused_q."""
        return self.cu_seqlens_q is not None or self.seqused_q is not None

    @property
    def has_lengths_kv(self) -> bool:
        """Whether key lengths were given, as cu_seqlens_kv or seqused_kv."""
        return self.cu_seqlens_kv is not None or self.seqused_kv is not None

    @cached_property
    def is_uniform_tnd(self) -> bool:
        """Whether this is a packed batch whose sequences all have the same two lengths."""
        if self.layout is not Layout.TND or self.b == 0:
            return False
        lq, lk = self.lengths_q, self.lengths_kv
        return bool((lq == lq[0]).all() and (lk == lk[0]).all())

    @property
    def is_variable(self) -> bool:
        """Whether entries are split by their own lengths: TND or seqused, but not uniform TND (rule G4)."""
        if self.layout is Layout.TND:
            return not self.is_uniform_tnd
        return self.seqused_q is not None or self.seqused_kv is not None

    @cached_property
    def has_empty_sequence(self) -> bool:
        """Whether some batch entry has no query or no key."""
        if not self.has_lengths_q and not self.has_lengths_kv:
            return self.s1 == 0 or self.s2 == 0
        return bool((self.lengths_q == 0).any() or (self.lengths_kv == 0).any())

    @cached_property
    def identity(self) -> int:
        """Head words 8..15 as one little-endian number, with what the problem does not determine zero."""
        return problem_identity(self)

    @property
    def given_s1(self) -> int:
        """CANN's attribute max_seqlen_q: s1, or the bound (-1 = none) where lengths are given."""
        return self.max_seqlen_q if self.has_lengths_q else self.s1

    @property
    def given_s2(self) -> int:
        """CANN's attribute max_seqlen_kv: s2, or the bound (-1 = none) where lengths are given."""
        return self.max_seqlen_kv if self.has_lengths_kv else self.s2

    @classmethod
    def from_metadata_args(
        cls,
        num_heads_q: int,
        num_heads_kv: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None,
        seqused_q: Any = None,
        seqused_kv: Any = None,
        batch_size: int | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        mask_mode: MaskMode | int | str | None = None,
        win_left: int | None = None,
        win_right: int | None = None,
        layout_q: str | None = None,
        layout_kv: str | None = None,
        layout_out: str | None = None,
        is_grad_enabled: bool = False,
        op: str = "flash_attn_metadata",
    ) -> AttentionProblem:
        """Describes a call by its sizes: the arguments of flash_attn_metadata.

        They are described there; None and -1 mean not given. CANN's paged layouts of keys (PA_...) describe
        their storage only and are accepted for a forward split.

        Returns:
            The validated problem.

        Raises:
            InvalidProblemError: If a value breaks a rule; the message names argument, rule and value.
            InvalidTypeError: If an argument has the wrong type.
        """
        layout = rules.parse_layout(op, "layout_q", "BSND" if layout_q is None else layout_q)
        is_paged = isinstance(layout_kv, str) and layout_kv.startswith("PA_") and layout is not Layout.TND
        if is_paged and is_grad_enabled:
            raise problem_error(
                op, "layout_kv", "must equal layout_q when is_grad_enabled", layout_kv, layout_q=layout
            )
        if layout_kv is not None or layout_out is not None:
            rules.check_layouts(
                op,
                layout,
                layout if layout_kv is None or is_paged else layout_kv,
                layout if layout_out is None else layout_out,
                is_grad=False,
            )
        n1 = rules.parse_int(op, "num_heads_q", num_heads_q, 1, INT32_MAX)
        n2 = rules.parse_int(op, "num_heads_kv", num_heads_kv, 1, INT32_MAX)
        rules.check_heads(op, ("num_heads_q", "num_heads_kv"), n1, n2)
        d = rules.parse_int(op, "head_dim", head_dim, -INT32_MAX, INT32_MAX)
        dv = d if head_dim_v is None else rules.parse_int(op, "head_dim_v", head_dim_v, -INT32_MAX, INT32_MAX)
        dv = d if dv == -1 else dv
        rules.check_head_dims(op, ("head_dim", "head_dim_v"), d, dv)
        mode = MaskMode.parse(op, 0 if mask_mode is None else mask_mode)
        left, right = rules.check_windows(
            op, mode, -1 if win_left is None else win_left, -1 if win_right is None else win_right
        )

        b_given = (
            -1 if batch_size is None else rules.parse_int(op, "batch_size", batch_size, -1, rules.MAX_BATCH)
        )
        lists = parse_lists(op, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)
        b = batch_of_lists(op, layout, lists, b_given)
        bounds = (
            -1 if max_seqlen_q is None else max_seqlen_q,
            -1 if max_seqlen_kv is None else max_seqlen_kv,
        )
        sides = []
        for side, cu, used, bound in zip(("q", "kv"), lists[:2], lists[2:], bounds, strict=True):
            name = f"max_seqlen_{side}"
            if cu is None and used is None:
                s = rules.parse_int(op, name, bound, -1, INT32_MAX)
                if s == -1:
                    remedy = f"Pass the sequence length of {'q' if side == 'q' else 'k'}"
                    raise problem_error(
                        op, name, f"must be given with layout {layout} without lengths", s, remedy=remedy
                    )
                sides.append((s, b * s, s))
                continue
            if used is not None:
                rules.check_seqused(op, f"seqused_{side}", used, b, None if cu is None else steps(cu))
            longest = longest_of(used, cu)
            s_given = rules.check_max_seqlen(op, name, bound, longest)
            slot = longest if s_given == -1 or layout is Layout.TND else s_given
            sides.append((slot, b * slot if cu is None else int(cu.values[-1]), s_given))
        (s1, t1, max_q), (s2, t2, max_kv) = sides
        return cls._of(layout, b, n1, n2, d, dv, s1, s2, t1, t2, mode, left, right, *lists, max_q, max_kv)

    @classmethod
    def _of(cls, *values: object) -> AttentionProblem:
        """The same as calling the class, which assigns field by field and takes twice the time."""
        problem = cls.__new__(cls)
        vars(problem).update(zip(_FIELDS, values, strict=True))
        return problem

    @classmethod
    def from_tensors(
        cls,
        op: str,
        *,
        q: TensorSpec,
        k: TensorSpec,
        v: TensorSpec,
        dout: TensorSpec | None = None,
        attn_out: TensorSpec | None = None,
        softmax_lse: TensorSpec | None = None,
        sinks: TensorSpec | None = None,
        attn_mask: TensorSpec | None = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None,
        seqused_q: Any = None,
        seqused_kv: Any = None,
        mask_mode: MaskMode | int | str = 0,
        win_left: int = -1,
        win_right: int = -1,
        max_seqlen_q: int = -1,
        max_seqlen_kv: int = -1,
        layout_q: str = "BSND",
        layout_kv: str = "BSND",
        layout_out: str = "BSND",
    ) -> AttentionProblem:
        """Describes a call by the shapes and dtypes of its tensors; every rule of the operator contract is
        checked.

        A `dout` makes it a gradient call. Lists are int32 on the host; attn_mask is checked by its shape and
        dtype, its content by arguments.check_attn_mask_content.

        Raises:
            InvalidProblemError: If a value breaks a rule; the message names argument, rule and value.
            InvalidTypeError: If a dtype or the type of an argument is wrong; the message names both dtypes.
        """
        layout = rules.parse_layout(op, "layout_q", layout_q)
        out_layout = rules.check_layouts(op, layout, layout_kv, layout_out, is_grad=dout is not None)
        rules.check_input_dtype(op, "q", q)
        for name, spec in (("k", k), ("v", v), ("dout", dout), ("attn_out", attn_out)):
            if spec is not None:
                rules.check_dtype(op, name, spec, q.dtype, "q")
        for name, spec in (("q", q), ("k", k), ("v", v)):
            rules.check_rank(op, name, spec, layout)
        b, s1, n1, d = _axes(layout, q)
        b_k, s2, n2, d_k = _axes(layout, k)
        dv = v.shape[-1]
        if n1 == 0 or n2 == 0:
            raise problem_error(
                op, "q" if n1 == 0 else "k", "must have at least one head", f"N1={n1}, N2={n2}"
            )
        if b_k != b:
            raise problem_error(op, "k", "must have the batch of q", f"B={b_k}", q=f"B={b}")
        if d_k != d:
            raise problem_error(op, "k", "must have the head dim D of q", f"D={d_k}", q=f"D={d}")
        rules.check_head_dims(op, ("q", "v"), d, dv)
        rules.check_shape(op, "v", v, (*k.shape[:-1], dv), f"({', '.join(layout.value[:-1])}, Dv)")
        rules.check_heads(op, ("N1", "N2"), n1, n2)
        mode = MaskMode.parse(op, mask_mode)
        left, right = rules.check_windows(op, mode, win_left, win_right)
        if attn_mask is not None:
            rules.check_attn_mask(op, attn_mask, mode)

        lists = parse_lists(op, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)
        b = batch_of_lists(op, layout, lists, b, "q")
        slots: list[Int64Array | int]
        if layout is Layout.TND:
            t1, t2 = s1, s2
            assert lists[0] is not None  # batch_of_lists has refused that
            assert lists[1] is not None
            rules.check_cu_seqlens(op, "cu_seqlens_q", lists[0], t1)
            rules.check_cu_seqlens(op, "cu_seqlens_kv", lists[1], t2)
            slots = [steps(lists[0]), steps(lists[1])]
        else:
            t1, t2 = b * s1, b * s2
            slots = [s1, s2]
        bounds = []
        given = (max_seqlen_q, max_seqlen_kv)
        for side, slot, used, bound in zip(("q", "kv"), slots, lists[2:], given, strict=True):
            if used is not None:
                rules.check_seqused(op, f"seqused_{side}", used, b, slot)
                longest = longest_of(used, None)
            else:
                longest = slot if isinstance(slot, int) else int(slot.max(initial=0))
            bounds.append((rules.check_max_seqlen(op, f"max_seqlen_{side}", bound, longest), longest))
        if layout is Layout.TND:
            s1, s2 = bounds[0][1], bounds[1][1]

        if dout is not None or attn_out is not None:
            shape = {Layout.BSND: (b, s1, n1, dv), Layout.BNSD: (b, n1, s1, dv), Layout.TND: (t1, n1, dv)}[
                out_layout
            ]
            axes = f"({', '.join(out_layout.value[:-1])}, Dv)"
            for name, spec in (("dout", dout), ("attn_out", attn_out)):
                if spec is not None:
                    rules.check_shape(op, name, spec, shape, axes)
        if softmax_lse is not None:
            rules.check_dtype(op, "softmax_lse", softmax_lse, "float32")
            packed = layout is Layout.TND
            rules.check_shape(
                op,
                "softmax_lse",
                softmax_lse,
                (n1, t1) if packed else (b, n1, s1),
                "(N1, T1)" if packed else "(B, N1, S1)",
            )
        if sinks is not None:
            rules.check_dtype(op, "sinks", sinks, "float32")
            rules.check_shape(op, "sinks", sinks, (n1,), "(N1,)")
        return cls._of(
            layout, b, n1, n2, d, dv, s1, s2, t1, t2, mode, left, right, *lists, bounds[0][0], bounds[1][0]
        )


_FIELDS = tuple(field.name for field in fields(AttentionProblem))
_values = attrgetter(*_FIELDS)


def _axes(layout: Layout, spec: TensorSpec) -> tuple[int, int, int, int]:
    """Returns (b, s, n, d) of a q or k; for TND b = 0 stands for unknown and s is T."""
    shape = spec.shape
    if layout is Layout.BSND:
        return shape[0], shape[1], shape[2], shape[3]
    if layout is Layout.BNSD:
        return shape[0], shape[2], shape[1], shape[3]
    return 0, shape[0], shape[1], shape[2]
