"""Which kernels exist, and which of them a tiling key needs: the one table behind build, manifest, launch
and tests.

A tiling key names a variant of the gradient; running it takes one to three launches (clear, main, cast), and
one more for the gradient of the sinks. Each launch names a kernel: a Triton function with its compile-time
constants and 16-bit type. Several keys share the passes.

Needs neither Triton nor the compiler: the sources are named, not imported.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

from fag_kernel.ascend950.tile_table import PASS_CHUNK, SINK_ROWS, tile_sizes
from fag_kernel.tiling_key import TilingKey, valid_keys
from fag_metadata import MaskMode

if TYPE_CHECKING:
    from fag_kernel.plan import TilingPlan

DType = Literal["bf16", "fp16"]
Form = Literal["accumulate", "deterministic"]
CoreType = Literal["mix", "vector"]

DTYPES: Final[tuple[DType, ...]] = ("bf16", "fp16")
FORMS: Final[tuple[Form, ...]] = ("accumulate", "deterministic")
MASK_NAMES: Final = {MaskMode.NO_MASK: "full", MaskMode.CAUSAL: "causal", MaskMode.SLIDING_WINDOW: "window"}

#: The name that the operator gives a kernel parameter, and what it points to. "16bit" is the type of the
#: entry.
PARAMETERS: Final[dict[str, tuple[str, str]]] = {
    "q": ("q", "16bit"),
    "k": ("k", "16bit"),
    "v": ("v", "16bit"),
    "dout": ("dout", "16bit"),
    "attn_out": ("attn_out", "16bit"),
    "lse": ("softmax_lse", "float32"),
    "dlse": ("dlse", "float32"),
    "cu_q": ("cu_seqlens_q", "int32"),
    "cu_kv": ("cu_seqlens_kv", "int32"),
    "used_q": ("seqused_q", "int32"),
    "used_kv": ("seqused_kv", "int32"),
    "sinks": ("sinks", "float32"),
    "metadata": ("metadata", "int32"),
    "workspace": ("workspace", "float32"),
    "dq": ("dq", "16bit"),
    "dk": ("dk", "16bit"),
    "dv": ("dv", "16bit"),
    "dsinks": ("dsinks", "float32"),
    "out": ("attn_out", "16bit"),
    "tiling": ("tiling_data", "int64"),
}

#: Rules for the number of blocks of a launch.
GRID_RULES: Final = {
    "used_cube_cores": "TilingPlan.block_dim; a launch with 0 blocks is skipped",
    "cube_cores": "all cube cores of the device",
    "vector_cores": "all vector cores of the device",
}

#: What the kernels' `tiling_data` points to: launch_tiling() makes it.
TILING_RULE: Final = (
    "TilingPlan.tiling_data (192 bytes), then launch flags (int64): bit 0 = dlse is given and is read"
)
_HAS_DLSE: Final = 1

_INPUTS: Final = ("q", "k", "v", "dout", "attn_out", "lse", "dlse")
_OUTPUTS: Final = ("dq", "dk", "dv")
_LENGTHS: Final = ("cu_q", "cu_kv", "used_q", "used_kv")


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel.

    Attributes:
        name: Symbol; at most 49 characters, the limit of CANN's runtime.
        source: Module and function in fag_kernel.ascend950.kernels.
        dtype: The 16-bit type compiled in; None if the kernel touches none.
        core_type: "mix" runs on cube cores with their vector cores, "vector" on vector cores alone.
        grid: Key of GRID_RULES.
        parameters: Parameter names of the function, in order, without the compile-time ones.
        constants: Compile-time parameters.
    """

    name: str
    source: str
    dtype: DType | None
    core_type: CoreType
    grid: str
    parameters: tuple[str, ...]
    constants: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Launch:
    """One step of a gradient: what it is for, and the kernel."""

    stage: str
    kernel: Kernel

    @property
    def record(self) -> dict[str, str]:
        """The step as a manifest has it."""
        return {"stage": self.stage, "kernel": self.kernel.name}


def _kernel(
    family: str,
    source: str,
    parameters: tuple[str, ...],
    constants: dict[str, int],
    labels: list[str],
    dtype: DType | None,
    *,
    core_type: CoreType = "mix",
    grid: str = "used_cube_cores",
) -> Kernel:
    name = "_".join(["fag", family, *labels, *([dtype] if dtype else [])])
    return Kernel(name, source, dtype, core_type, grid, parameters, tuple(constants.items()))


def kernel_dims(d_align: int, dv_align: int) -> tuple[int, int]:
    """Columns of q/k and of v in a kernel. At d_align 64 v has 64 too: dv <= d, and the key's 128 is formal.

    Example:
        >>> kernel_dims(64, 128), kernel_dims(192, 128)
        ((64, 64), (192, 128))
    """
    return d_align, min(d_align, dv_align) if d_align == 64 else dv_align


def _layout(is_tnd: bool) -> str:
    return "tnd" if is_tnd else "dense"


def _pass(family: str, tensors: tuple[str, ...], is_tnd: bool, dtype: DType | None) -> Kernel:
    """A kernel of passes.py."""
    return _kernel(
        family, f"passes.{family}_kernel", ("cu_q", "cu_kv", *tensors, "tiling"),
        {"IS_TND": int(is_tnd), "CHUNK": PASS_CHUNK}, [_layout(is_tnd)], dtype,
        core_type="vector", grid="vector_cores",
    )  # fmt: skip


def _sink_gradients(key: TilingKey, dtype: DType) -> Kernel:
    """The kernel that sums the gradient of the sinks; one for every mask."""
    _, dva = kernel_dims(key.d_align, key.dv_align)
    return _kernel(
        "sink_gradients", "sink_gradients.sink_gradients_kernel",
        ("dout", "attn_out", "lse", "dlse", *_LENGTHS, "sinks", "metadata", "dsinks", "tiling"),
        {"IS_TND": int(key.is_tnd), "DVA": dva, "BM": SINK_ROWS}, [_layout(key.is_tnd), f"dv{dva}"], dtype,
        core_type="vector", grid="vector_cores",
    )  # fmt: skip


def _general(family: str, outputs: tuple[str, ...], key: TilingKey, dtype: DType) -> Kernel:
    """A main kernel of template BN2GS1S2."""
    da, dva = kernel_dims(key.d_align, key.dv_align)
    bm, bn = tile_sizes(family, da, dva)
    labels = [_layout(key.is_tnd), MASK_NAMES[key.mask_mode]] + ["swz"] * key.is_swizzle
    return _kernel(
        family, f"bn2gs1s2.{family}_kernel", (*_INPUTS, *_LENGTHS, "metadata", *outputs, "tiling"),
        {
            "IS_TND": int(key.is_tnd), "MASK": int(key.mask_mode), "SWIZZLE": int(key.is_swizzle),
            "DA": da, "DVA": dva, "BM": bm, "BN": bn,
        },
        [*labels, f"d{da}", f"dv{dva}"], dtype,
    )  # fmt: skip


def _whole_heads(family: str, outputs: tuple[str, ...], key: TilingKey, dtype: DType) -> Kernel:
    """A kernel of template BN2."""
    da, dva = kernel_dims(key.d_align, key.dv_align)
    bm, bn = tile_sizes(family, da, dva)
    constants = {"MASK": int(key.mask_mode)}
    if key.is_multiblk:
        constants["NEED_ZERO"] = int(key.needs_zero)
    labels = [MASK_NAMES[key.mask_mode]] + ["zero"] * key.needs_zero + [f"d{da}", f"dv{dva}"]
    return _kernel(
        family, f"bn2.{family}_kernel", (*_INPUTS, "used_q", "used_kv", "metadata", *outputs, "tiling"),
        {**constants, "DA": da, "DVA": dva, "BM": bm, "BN": bn}, labels, dtype,
    )  # fmt: skip


def launches(tiling_key: int, dtype: DType, form: Form, *, has_sinks: bool = False) -> tuple[Launch, ...]:
    """The launches, in order, that run the gradient of a tiling key.

    Args:
        tiling_key: A valid key.
        dtype: "bf16" or "fp16".
        form: "accumulate" (float32 atomics) or "deterministic" (none). Template BN2 needs no atomics: both
            are equal.
        has_sinks: Whether the gradient of the sinks is wanted too: one more launch, "sinks".

    Raises:
        ValueError: A key that no kernel exists for, or another dtype or form.

    Example:
        >>> [(step.stage, step.kernel.name) for step in launches(72, "bf16", "accumulate")][1]
        ('main', 'fag_accumulate_dense_causal_d128_dv128_bf16')
    """
    key = _checked_key(tiling_key)
    if dtype not in DTYPES:
        raise ValueError(f"ascend950: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    if form not in FORMS:
        raise ValueError(f"ascend950: form must be one of {', '.join(FORMS)}, got {form!r}.")
    steps = _whole_head_launches(key, dtype) if key.template == "BN2" else _general_launches(key, dtype, form)
    return (*steps, Launch("sinks", _sink_gradients(key, dtype))) if has_sinks else steps


def _whole_head_launches(key: TilingKey, dtype: DType) -> tuple[Launch, ...]:
    if not key.is_multiblk:
        return (Launch("main", _whole_heads("bn2", _OUTPUTS, key, dtype)),)
    zero = (Launch("zero", _pass("zero_outputs", _OUTPUTS, False, dtype)),) if key.needs_zero else ()
    return (
        *zero,
        Launch("columns", _whole_heads("bn2_columns", ("dk", "dv"), key, dtype)),
        Launch("rows", _whole_heads("bn2_rows", ("dq",), key, dtype)),
    )


def _general_launches(key: TilingKey, dtype: DType, form: Form) -> tuple[Launch, ...]:
    if form == "accumulate":
        return (
            Launch("zero", _pass("zero_accumulators", ("workspace",), key.is_tnd, None)),
            Launch("main", _general("accumulate", ("workspace",), key, dtype)),
            Launch("cast", _pass("cast_outputs", ("workspace", *_OUTPUTS), key.is_tnd, dtype)),
        )
    return (
        Launch("zero", _pass("zero_outputs", _OUTPUTS, key.is_tnd, dtype)),
        Launch("columns", _general("columns", ("dk", "dv"), key, dtype)),
        Launch("rows", _general("rows", ("dq",), key, dtype)),
    )


def launch_tiling(plan: TilingPlan, has_dlse: bool) -> bytes:
    """The buffer behind the kernels' parameter `tiling`: 200 bytes, 25 words of 8.

    Args:
        plan: Plan of the problem; its 192 bytes come first.
        has_dlse: Whether `dlse` points to a gradient; if not, no kernel reads through it.
    """
    return plan.tiling_data + struct.pack("<q", _HAS_DLSE if has_dlse else 0)


def _checked_key(tiling_key: int) -> TilingKey:
    if tiling_key not in valid_keys():
        raise ValueError(
            f"ascend950: tiling_key must be one of the {len(valid_keys())} valid keys, got {tiling_key}. "
            "`fag-kernel info` lists them."
        )
    return TilingKey.decode(tiling_key)


def forward_kernel(
    dtype: DType, *, is_tnd: bool, mask_mode: MaskMode, d: int, dv: int, has_sinks: bool
) -> Kernel:
    """The kernel that runs a forward; d and dv up to 192.

    Example:
        >>> forward_kernel("fp16", is_tnd=True, mask_mode=MaskMode.CAUSAL, d=72, dv=64, has_sinks=False).name
        'fag_forward_tnd_causal_d128_dv128_fp16'
    """
    if not 0 < dv <= d <= 192:
        raise ValueError(f"ascend950: head dims must hold 0 < dv <= d <= 192, got d={d}, dv={dv}.")
    da = 64 if d <= 64 else 128 if d <= 128 else 192
    da, dva = kernel_dims(da, 128 if dv <= 128 else 192)
    bm, bn = tile_sizes("forward", da, dva)
    labels = [_layout(is_tnd), MASK_NAMES[mask_mode]] + ["sinks"] * has_sinks + [f"d{da}", f"dv{dva}"]
    return _kernel(
        "forward", "forward.forward_kernel",
        ("q", "k", "v", *_LENGTHS, "sinks", "metadata", "out", "lse", "tiling"),
        {
            "IS_TND": int(is_tnd), "MASK": int(mask_mode), "HAS_SINKS": int(has_sinks),
            "DA": da, "DVA": dva, "BM": bm, "BN": bn,
        },
        labels, dtype, grid="cube_cores",
    )  # fmt: skip


@lru_cache(maxsize=1)
def forward_kernels() -> tuple[Kernel, ...]:
    """All forward kernels: layout x mask x sinks x head dims x dtype."""
    return tuple(
        forward_kernel(dtype, is_tnd=is_tnd, mask_mode=mask, d=d, dv=dv, has_sinks=has_sinks)
        for dtype in DTYPES
        for is_tnd in (False, True)
        for mask in MASK_NAMES
        for d, dv in ((64, 64), (128, 128), (192, 128), (192, 192))
        for has_sinks in (False, True)
    )


@lru_cache(maxsize=1)
def all_kernels() -> dict[str, Kernel]:
    """Every kernel to compile, by name, in a fixed order."""
    kernels: dict[str, Kernel] = {}
    for dtype in DTYPES:
        for key in valid_keys():
            for form in FORMS:
                for step in launches(key, dtype, form, has_sinks=True):
                    kernels[step.kernel.name] = step.kernel
    kernels.update((kernel.name, kernel) for kernel in forward_kernels())
    return kernels


def sample_kernels() -> tuple[Kernel, ...]:
    """One kernel per source function, mask and padded head dims: what a quick check compiles."""
    chosen: dict[tuple[str, object, object, object], Kernel] = {}
    for kernel in all_kernels().values():
        constants = dict(kernel.constants)
        group = (kernel.source, constants.get("MASK"), constants.get("DA"), constants.get("DVA"))
        chosen.setdefault(group, kernel)
    return tuple(chosen.values())
