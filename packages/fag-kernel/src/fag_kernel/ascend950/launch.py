"""Launching the shipped kernels on a device: which ones, with what, in which order.

A `Launch` is what a plan needs of the device: its kernels with their numbers of blocks, the tiling data, the
size of the workspace. It is made once per plan and run as often as wanted; a run is one native call, which
queues its kernels on a stream of the caller's. Neither waits for the device.

Kernels are finished by CANN's compiler at first use (finalize.py) and registered with the runtime once per
process and device. Nothing here has run on an Ascend processor: docs/ascend950.md says what was verified.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from fag_kernel import _native
from fag_kernel.ascend950.catalog import Kernel, forward_kernel, launch_tiling, launches
from fag_kernel.ascend950.finalize import object_file
from fag_metadata.terms import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fag_kernel.ascend950.catalog import DType, Form
    from fag_kernel.plan import TilingPlan

__all__ = ["Launch", "forward_launch", "gradient_launch"]


class Launch:
    """Kernels of a plan, ready for any device of the plan's target.

    Attributes:
        kernels: Names of the kernels in the order of their launch.
        parameters: Buffers that `run` needs, by their names in `catalog.PARAMETERS`.
        tiling: Contents of the buffer `tiling`.
        workspace_bytes: Size of the buffer `workspace`; 0 where the kernels use none.
    """

    def __init__(
        self, plan: TilingPlan, dtype: DType, kernels: tuple[Kernel, ...], *, has_dlse: bool
    ) -> None:
        """Collect what the kernels need of the plan.

        Args:
            plan: How the problem runs.
            dtype: "bf16" or "fp16": the entry whose manifest has the kernels.
            kernels: In the order of their launch.
            has_dlse: Whether `dlse` is a gradient to be read.
        """
        self.kernels = tuple(kernel.name for kernel in kernels)
        self.parameters = tuple(dict.fromkeys(name for kernel in kernels for name in kernel.parameters))
        self.tiling = launch_tiling(plan, has_dlse)
        self.workspace_bytes = plan.workspace_bytes if "workspace" in self.parameters else 0
        self._dtype = dtype
        self._kernels = kernels
        self._blocks = tuple(blocks_of(kernel, plan) for kernel in kernels)
        self._offsets = [plan.dq_offset if name == "workspace" else 0 for name in self.parameters]
        self._sequences: dict[int, _native.LaunchSequence] = {}

    def load(self, device: int) -> None:
        """Finish the kernels and register them, if that was not done for this process and device.

        Any number of threads may call it at once. After an exception the launch is as it was before.

        Args:
            device: Index of a device; the current one of this thread.

        Raises:
            ValueError: Another device is current, or a kernel is not among the shipped ones.
            ArtefactError: A shipped file is missing or damaged.
            CompilerError: CANN's compiler is missing or fails.
            CannError: The runtime is missing or refuses a kernel.
        """
        if device in self._sequences:
            return
        current = _native.cann_current_device()
        if current != device:
            raise ValueError(
                f"ascend950: device must be the current one to load kernels, got {device} while {current} is."
            )
        place = {name: index for index, name in enumerate(self.parameters)}
        self._sequences[device] = _native.LaunchSequence(
            [
                (_function(kernel, self._dtype, device), blocks, [place[name] for name in kernel.parameters])
                for kernel, blocks in zip(self._kernels, self._blocks, strict=True)
            ],
            self._offsets,
        )

    def run(self, device: int, stream: int, addresses: Mapping[str, int]) -> None:
        """Queue the kernels on a stream.

        Args:
            device: Index of the device that the stream belongs to; the current one of this thread.
            stream: Stream.
            addresses: Device address of each of `parameters`; others are ignored. A tensor that the call
                lacks may be any valid address: it is not read. `workspace` is that of its first byte,
                `tiling` that of a copy of `self.tiling`.

        Raises:
            ValueError: An address is missing.
            CannError: The runtime refuses a launch; those before it are queued.
            ArtefactError, CompilerError: As `load`, which a device not loaded yet comes to first.

        Note:
            2 to 4 us for three kernels, beyond what the runtime takes for them.
        """
        sequence = self._sequences.get(device)
        if sequence is None:
            self.load(device)
            sequence = self._sequences[device]
        try:
            values = [addresses[name] for name in self.parameters]
        except KeyError:
            missing = ", ".join(name for name in self.parameters if name not in addresses)
            raise ValueError(
                f"ascend950: addresses must have every parameter of the launch, got none for {missing}."
            ) from None
        sequence.run(stream, values)


@lru_cache(maxsize=512)
def gradient_launch(
    plan: TilingPlan, dtype: DType, *, is_deterministic: bool, has_sinks: bool, has_dlse: bool
) -> Launch:
    """The launch of a gradient; the same arguments give the same object.

    Args:
        plan: Plan of the problem for an Ascend target.
        dtype: "bf16" or "fp16".
        is_deterministic: Use the kernels without atomics: the same bits in every run.
        has_sinks: Make dsinks too.
        has_dlse: A gradient of lse is given.

    Raises:
        ValueError: A plan without a tiling key, or another dtype.
    """
    if plan.tiling_key is None:
        raise ValueError(f"ascend950: plan must have a tiling key, got none for target {plan.target.name}.")
    form: Form = "deterministic" if is_deterministic else "accumulate"
    steps = launches(plan.tiling_key, dtype, form, has_sinks=has_sinks)
    return Launch(plan, dtype, tuple(step.kernel for step in steps), has_dlse=has_dlse)


@lru_cache(maxsize=512)
def forward_launch(plan: TilingPlan, dtype: DType, *, has_sinks: bool) -> Launch:
    """The launch of a forward; the same arguments give the same object.

    Args:
        plan: Plan of the problem for an Ascend target.
        dtype: "bf16" or "fp16".
        has_sinks: Sinks are given.

    Raises:
        ValueError: Head dims that no forward kernel has, or another dtype.
    """
    problem = plan.problem
    kernel = forward_kernel(
        dtype,
        is_tnd=problem.layout is Layout.TND,
        mask_mode=problem.mask_mode,
        d=problem.d,
        dv=problem.dv,
        has_sinks=has_sinks,
    )
    return Launch(plan, dtype, (kernel,), has_dlse=False)


def blocks_of(kernel: Kernel, plan: TilingPlan) -> int:
    """The number of blocks of a kernel's launch, by its rule in `catalog.GRID_RULES`."""
    return {
        "used_cube_cores": plan.block_dim,
        "cube_cores": plan.target.cube_cores,
        "vector_cores": plan.target.vector_cores,
    }[kernel.grid]


#: What the runtime knows already, by device and content: the path of an object has a hash of it.
_functions: Final[dict[tuple[int, str], _native.DeviceFunction]] = {}
_functions_lock: Final = threading.Lock()


def _function(kernel: Kernel, dtype: DType, device: int) -> _native.DeviceFunction:
    path = object_file(kernel.name, dtype)  # under a lock of its own: threads compile side by side
    key = (device, str(path))
    with _functions_lock:
        if key not in _functions:
            _functions[key] = _native.DeviceFunction(
                symbol=kernel.name, object=path.read_bytes(), is_vector=kernel.core_type == "vector"
            )
        return _functions[key]
