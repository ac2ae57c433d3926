"""Executes a launch of one of our device kernels: its source by Triton's interpreter, on device memory.

The arguments are unpacked as the manifest orders them, and every buffer that the kernel may touch is checked:
it must lie in one live allocation of the device, with room for what the tiling data says it holds.

The interpreter's matrix product is wrong for bfloat16. So 16-bit buffers of a bfloat16 kernel are widened to
float32 copies, and what the kernel changed in them is rounded back: all arithmetic is that of the source.

`Executor(shortcut=True)` is for larger problems: the main kernels of a gradient and of a forward are replaced
by fag-kernel's CPU kernels, with the same checks of the arguments.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any

import numpy as np
from device_memory import Array, view

from fag_kernel import abi
from fag_kernel.ascend950.catalog import PARAMETERS, Kernel, all_kernels
from fag_kernel.tiling_data import TilingData
from fag_metadata import AttentionProblem, check_metadata, metadata_for
from fag_metadata.layout import HEAD, HEAD_WORDS, IDENTITY, MAGIC, total_words

TILING_BYTES = 200
PLAN_BYTES = 192
_HAS_DLSE = 1
_HEAD_FIELDS = tuple(field.name for field in HEAD)
_OUTPUTS = ("dq", "dk", "dv", "dsinks", "out", "workspace")


@lru_cache(maxsize=1)
def _kernels() -> dict[str, Kernel]:
    return all_kernels()


@dataclass(frozen=True)
class Launch:
    """A launch, unpacked.

    Attributes:
        kernel: The kernel, from the catalogue.
        addresses: Where each of its parameters points to.
        device: Device of the stream.
        num_blocks: Programs of the grid.
        bytes_from: (address, device) -> bytes to the end of the live allocation; 0 if there is none.
    """

    kernel: Kernel
    addresses: dict[str, int]
    device: int
    num_blocks: int
    bytes_from: Callable[[int, int], int]

    @classmethod
    def parse(cls, request: dict[str, Any], bytes_from: Callable[[int, int], int]) -> Launch:
        """Unpacks and checks what launch.cpp hands over."""
        kernel = _kernels().get(request["kernel"])
        if kernel is None:
            raise ValueError(f"kernel must be in the catalogue, got {request['kernel']}.")
        packed = bytes.fromhex(request["arguments"])
        layout = struct.Struct(f"<3Q{len(kernel.parameters)}Q3i")
        # Alignment may pad the end.
        if len(packed) not in (layout.size, math.ceil(layout.size / 8) * 8):
            raise ValueError(f"{kernel.name}: arguments must have {layout.size} bytes, got {len(packed)}.")
        values = layout.unpack(packed[: layout.size])
        core_sync, lock, compiler_workspace = values[:3]
        grid = values[-3:]
        if core_sync != request["core_sync_address"]:
            raise ValueError(f"{kernel.name}: ffts_address must be rtGetC2cCtrlAddr's, got {core_sync:#x}.")
        if lock or compiler_workspace:
            raise ValueError(f"{kernel.name}: sync_block_lock and compiler_workspace must be null.")
        if grid[1:] != (1, 1) or grid[0] != request["num_blocks"]:
            raise ValueError(f"{kernel.name}: grid must be {(request['num_blocks'], 1, 1)}, got {grid}.")
        addresses = dict(zip(kernel.parameters, values[3:-3], strict=True))
        launch = cls(kernel, addresses, request["device"], grid[0], bytes_from)
        launch.check()
        return launch

    def check(self) -> None:
        """Every pointer must lead to live memory of the device, with room for what it holds."""
        for name in self.kernel.parameters:
            needed = self.count(name) * self.array_dtype(name).itemsize
            found = self.bytes_from(self.addresses[name], self.device)
            if found < max(needed, 1):
                raise ValueError(
                    f"{self.kernel.name}: {name} must point to {needed} bytes of live memory of device "
                    f"{self.device}, got {found} bytes at {self.addresses[name]:#x}."
                )

    def array_dtype(self, name: str) -> np.dtype[Any]:
        """Element type of a parameter's buffer."""
        return self.view(name, 0).dtype

    def view(self, name: str, count: int | None = None) -> Array:
        """A parameter's buffer, flat; `count` elements, else as many as it must have."""
        kind = PARAMETERS[name][1]
        if kind == "16bit":
            kind = "bfloat16" if self.kernel.dtype == "bf16" else "float16"
        return view(self.addresses[name], kind, (self.count(name) if count is None else count,))

    @cached_property
    def is_tnd(self) -> bool:
        """Whether the kernel was compiled for packed sequences."""
        return bool(dict(self.kernel.constants).get("IS_TND", 0))

    @cached_property
    def _tiling(self) -> bytes:
        address = self.addresses["tiling"]
        if self.bytes_from(address, self.device) < TILING_BYTES:
            raise ValueError(f"{self.kernel.name}: tiling must point to {TILING_BYTES} bytes of live memory.")
        return view(address, "uint8", (TILING_BYTES,)).tobytes()

    @cached_property
    def fields(self) -> TilingData:
        """The plan's tiling data."""
        return TilingData.from_bytes(self._tiling[:PLAN_BYTES])

    @property
    def has_dlse(self) -> bool:
        """Whether the launch words say that dlse is there."""
        return bool(struct.unpack("<q", self._tiling[PLAN_BYTES:])[0] & _HAS_DLSE)

    @cached_property
    def identity(self) -> dict[str, int]:
        """The named bits of the metadata's head; none where the kernel takes no metadata."""
        if "metadata" not in self.addresses:
            return {}
        words = self._head.view(np.uint32)
        return {bits.name: int(words[bits.word]) >> bits.shift & (1 << bits.width) - 1 for bits in IDENTITY}

    @cached_property
    def _head(self) -> Array:
        found = self.bytes_from(self.addresses["metadata"], self.device)
        head = self.view("metadata", HEAD_WORDS) if found >= 4 * HEAD_WORDS else None
        if head is None or head[_HEAD_FIELDS.index("magic")] != MAGIC:
            raise ValueError(f"{self.kernel.name}: metadata must point to metadata of flash_attn_metadata.")
        return head

    @property
    def _metadata_words(self) -> int:
        """Length of the metadata, as its head has it: allocators cut tensors out of larger pieces."""
        section_num, aic, aiv = (
            int(self._head[_HEAD_FIELDS.index(x)]) for x in ("section_num", "aic", "aiv")
        )
        return total_words(section_num, aic, aiv, self.identity["cube_slots"], bool(self.identity["is_grad"]))

    @cached_property
    def tokens(self) -> tuple[int, int]:
        """Query and key tokens of all batch entries."""
        if not self.is_tnd:
            return self.fields.b * self.fields.s1, self.fields.b * self.fields.s2
        last = [view(self.addresses[name], "int32", (self.fields.b + 1,))[-1] for name in ("cu_q", "cu_kv")]
        return int(last[0]), int(last[1])

    def count(self, name: str) -> int:
        """Elements that a parameter's buffer must have; 0 for one that this launch does not read."""
        f = self.fields
        if name == "tiling":
            return TILING_BYTES // 8
        if name == "metadata":
            return self._metadata_words
        if name in ("cu_q", "cu_kv"):
            return f.b + 1 if self.is_tnd else 0
        if name in ("used_q", "used_kv"):
            return f.b if self.identity.get(f"has_seqused_{name[5:]}") else 0
        if name in ("sinks", "dsinks"):
            is_read = "dsinks" in self.addresses or dict(self.kernel.constants).get("HAS_SINKS")
            return f.n1 if is_read else 0
        if name == "dlse" and not self.has_dlse:
            return 0
        t1, t2 = self.tokens
        q, k, v, out = t1 * f.n1 * f.d, t2 * f.n2 * f.d, t2 * f.n2 * f.dv, t1 * f.n1 * f.dv
        sizes = {
            "q": q, "dq": q, "k": k, "dk": k, "v": v, "dv": v, "dout": out, "attn_out": out, "out": out,
            "lse": t1 * f.n1, "dlse": t1 * f.n1, "workspace": q + k + v,
        }  # fmt: skip
        return sizes[name]


class Executor:
    """Runs launches, one at a time: the interpreter keeps its state in module variables."""

    def __init__(self, bytes_from: Callable[[int, int], int], *, shortcut: bool = False) -> None:
        self._bytes_from = bytes_from
        self._shortcut = shortcut
        self._lock = Lock()
        #: Workspace address -> the main launch whose gradient the cast will write.
        self._pending: dict[int, Launch] = {}

    def run(self, request: dict[str, Any]) -> None:
        """One launch.

        Raises:
            Exception: An argument is not what the kernel takes; says which.
        """
        launch = Launch.parse(request, self._bytes_from)
        with self._lock:
            if not (self._shortcut and self._run_shortcut(launch)):
                interpret(launch)

    def _run_shortcut(self, launch: Launch) -> bool:
        """The launch by CPU kernels, if there is a way."""
        family = launch.kernel.source.split(".")[1].removesuffix("_kernel")
        if family in ("zero_accumulators", "zero_outputs"):
            return True  # what follows writes every element
        if family == "forward":
            _forward(launch)
        elif family == "accumulate":
            self._pending[launch.addresses["workspace"]] = launch
        elif family == "cast_outputs":
            _gradient(self._pending.pop(launch.addresses["workspace"]), launch)
        elif family == "sink_gradients":
            return False
        else:
            _gradient(launch, launch)
        return True


def interpret(launch: Launch) -> None:
    """Runs the kernel's source on the buffers, for every program of the grid."""
    import torch

    from fag_kernel.ascend950.interpret import _function

    is_wide = launch.kernel.dtype == "bf16"
    arguments, wide = [], {}
    for name in launch.kernel.parameters:
        # The interpreter reads through the address alone: one element stands for a buffer of any size.
        buffer = launch.view(name) if is_wide and PARAMETERS[name][1] == "16bit" else launch.view(name, 1)
        if buffer.dtype.name == "bfloat16":
            with np.errstate(invalid="ignore"):
                wide[name] = (buffer, buffer.astype(np.float32))
            buffer = wide[name][1].copy()
            if buffer.size == 0:
                buffer = np.empty(1, np.float32)
        arguments.append(torch.from_numpy(buffer))
    _function(launch.kernel)[(launch.num_blocks,)](*arguments, **dict(launch.kernel.constants))
    for name, (narrow, before) in wide.items():
        after = arguments[launch.kernel.parameters.index(name)].numpy()[: before.size]
        changed = after.view(np.uint32) != before.view(np.uint32)
        if not changed.any():
            continue
        if name not in _OUTPUTS:
            raise ValueError(f"{launch.kernel.name}: {name} must not be written, it is an input.")
        with np.errstate(over="ignore", invalid="ignore"):
            narrow[changed] = after[changed].astype(narrow.dtype)


def _problem(launch: Launch, *, is_grad: bool) -> AttentionProblem:
    """What the launch computes, from its tiling data, lengths and the metadata's head; they must agree."""
    f = launch.fields
    layout = "TND" if launch.is_tnd else "BNSD" if f.coef_n0 else "BSND"
    lengths = {
        f"{word}_{side}": launch.view(f"{short}_{side}") if launch.count(f"{short}_{side}") else None
        for word, short in (("cu_seqlens", "cu"), ("seqused", "used"))
        for side in ("q", "kv")
        if f"{short}_{side}" in launch.addresses
    }
    problem = AttentionProblem.from_metadata_args(
        f.n1, f.n2, f.d,
        head_dim_v=f.dv, batch_size=f.b, max_seqlen_q=-1 if launch.is_tnd else f.s1,
        max_seqlen_kv=-1 if launch.is_tnd else f.s2, mask_mode=f.mask_mode, win_left=f.win_left,
        win_right=f.win_right, layout_q=layout, layout_kv=layout, layout_out=layout, is_grad_enabled=is_grad,
        **lengths,
    )  # fmt: skip
    check_metadata(launch.kernel.name, launch.view("metadata"), problem, is_grad)
    return problem


def _ref(problem: AttentionProblem, array: Array, heads: int, width: int) -> abi.ArrayRef:
    """Address and element strides of a contiguous tensor in the problem's layout."""
    rows = array.size // max(problem.b * heads * width, 1)
    strides = {
        "BSND": (rows * heads * width, heads * width, width),
        "BNSD": (rows * heads * width, width, rows * width),
        "TND": (0, heads * width, width),
    }
    return array.ctypes.data, strides[problem.layout.value]


def _gradient(main: Launch, last: Launch) -> None:
    """The gradient of the main launch into those of dq, dk, dv that the last one has."""
    problem, f = _problem(main, is_grad=True), main.fields
    widths = {"q": (f.n1, f.d), "k": (f.n2, f.d), "v": (f.n2, f.dv), "out": (f.n1, f.dv)}
    results = {name: np.empty_like(main.view(name)) for name in ("q", "k", "v")}
    inputs = [
        _ref(problem, main.view(name), *widths[kind])
        for name, kind in (("q", "q"), ("k", "k"), ("v", "v"), ("dout", "out"), ("attn_out", "out"))
    ]
    outputs = [_ref(problem, array, *widths[name]) for name, array in results.items()]
    dlse = main.addresses["dlse"] if main.has_dlse else 0
    abi.backward(
        problem, metadata_for(problem, "cpu", is_grad_enabled=True), main.array_dtype("q").name, *inputs,
        main.addresses["lse"], dlse, 0, *outputs, 0, softmax_scale=f.scale_value, num_threads=1,
    )  # fmt: skip
    for name, array in results.items():
        if f"d{name}" in last.addresses:
            last.view(f"d{name}")[...] = array


def _forward(launch: Launch) -> None:
    problem, f = _problem(launch, is_grad=False), launch.fields
    sinks = launch.addresses["sinks"] if launch.count("sinks") else 0
    abi.forward(
        problem, metadata_for(problem, "cpu", is_grad_enabled=False), launch.array_dtype("q").name,
        _ref(problem, launch.view("q"), f.n1, f.d), _ref(problem, launch.view("k"), f.n2, f.d),
        _ref(problem, launch.view("v"), f.n2, f.dv), sinks, _ref(problem, launch.view("out"), f.n1, f.dv),
        launch.addresses["lse"], softmax_scale=f.scale_value, num_threads=1,
    )  # fmt: skip
