"""A validated call on an NPU becomes a launch: which route runs it, with what, and the launch itself.

What depends only on the problem is worked out once and kept with the validated call (`Prepared.routed`), so
that a repeated call costs a dictionary lookup, the allocation of its outputs, and one launch.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, cast

import numpy as np
import torch

from fag_kernel import cann, plan
from fag_kernel.ascend950 import launch as ascend950
from fag_metadata import MaskMode, metadata_for
from fag_metadata.arguments import ATTN_MASK_SIZE
from fag_torch import npu_host, npu_routes
from fag_torch.npu_memory import backend, constants
from fag_torch.prepare import dtype_name

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from typing import TypeAlias

    from numpy.typing import NDArray
    from torch import Tensor

    from fag_metadata import AttentionProblem, Target
    from fag_torch.npu_memory import Words
    from fag_torch.npu_routes import Direction
    from fag_torch.prepare import Prepared

    #: Inputs and outputs, contiguous, by their names in fag_kernel.ascend950.catalog.PARAMETERS; None is
    #: absent. Metadata that is absent is made here.
    Tensors: TypeAlias = Mapping[str, Tensor | None]

#: Ways through one validated call: scales, determinism, metadata. Ordinary programs have one or two.
_MOST_ROUTED: Final = 64

_16BIT: Final = {"float16": "fp16", "bfloat16": "bf16"}

_OPTIONAL_INPUTS: Final = ("cu_q", "cu_kv", "used_q", "used_kv", "sinks", "dlse")
_GRADIENTS: Final = ("dq", "dk", "dv", "dsinks")

#: Names of CANN's operators where they differ from ours.
_ACLNN_NAMES: Final = {
    "lse": "softmax_lse",
    "cu_q": "cu_seqlens_q",
    "cu_kv": "cu_seqlens_kv",
    "used_q": "seqused_q",
    "used_kv": "seqused_kv",
    "out": "attn_out",
}


class Routed(Protocol):
    """A call with its route."""

    route: str

    def run(self, device: torch.device, tensors: Tensors) -> None:
        """Puts the work on the current stream of `device`, which is the current device.

        Args:
            device: With its index.
            tensors: See Tensors; all of the outputs are written.

        Raises:
            CannError: CANN refuses.
        """


def raw_stream(index: int) -> int:
    """The handle of the current stream of a device, for a launch past torch_npu.

    torch_npu does not launch at once: operators go into a queue on the host, and a thread takes them from
    there to their streams (TASK_QUEUE_ENABLE, on by default). `Stream.npu_stream`, its `_as_parameter_` and
    this call all end in NPUStream::stream(), which first waits until that queue is empty: the host waits for
    the launches of the other thread, not for the device. So what we launch afterwards lies behind everything
    that was called before, and what is called later lies behind it. tests/npu/test_streams.py shows both. The
    sibling with NoWait in its name gives the same handle without waiting; see `_stream_name`.
    """
    handle: int = sys.modules["torch_npu"]._C._npu_getCurrentRawStream(index)
    return handle


def _stream_name(index: int) -> int:
    """The same handle, only to compare: what was called before may still be in the queue."""
    handle: int = sys.modules["torch_npu"]._C._npu_getCurrentRawStreamNoWait(index)
    return handle


def route(
    op: str,
    call: Prepared,
    device: torch.device,
    direction: Direction,
    scale: float,
    *,
    has_sinks: bool,
    has_dlse: bool,
    has_dsinks: bool,
    is_grad: bool,
    words: Words | None,
) -> Routed:
    """The way to run a validated call, found again where the same was asked before.

    Args:
        op: Operator the user called, for the messages.
        call: The validated call.
        device: Where it runs; it is the current device.
        direction: What is computed.
        scale: Factor of the scores.
        has_sinks: Whether sinks are given.
        has_dlse: Whether a gradient of the lse is given.
        has_dsinks: Whether a gradient of the sinks is wanted.
        is_grad: Whether metadata of our own is made with the backward split.
        words: Of the caller's metadata, checked against the call; or None.

    Raises:
        UnsupportedError: No route takes the call, or the one of FAG_NPU_ROUTE does not.
        CannError: The kernels of the route cannot be loaded.
    """
    forced = os.environ.get(npu_routes.VARIABLE)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    metadata = None if words is None else words.route_key
    key: Hashable = (device.index, scale, has_dlse, has_dsinks, is_deterministic, is_grad, metadata, forced)
    found: Routed | None = call.routed.get(key)
    if found is not None:
        return found
    forced = npu_routes.parse_forced(op, forced)
    target = npu_host.target_of(op, device)
    origin = None if words is None else words.origin
    wanted = npu_routes.Call(
        call.problem, call.dtype, direction, has_sinks, has_dlse, is_deterministic, origin
    )
    choice = npu_routes.choose(wanted, target, npu_host.missing(direction), forced)
    name = npu_routes.require(op, choice, forced)
    if name == npu_routes.ACLNN:
        found = _Aclnn(wanted, target, scale, is_grad, words)
    else:
        found = own = _Ascend950(wanted, target, scale, is_grad, words, has_dsinks=has_dsinks)
        # In a thread that has touched no device, torch_npu counts device 0 as current before CANN does.
        backend().set_device(device.index)
        own.launch.load(device.index)
    if len(call.routed) >= _MOST_ROUTED:
        call.routed.clear()
    call.routed[key] = found
    return found


def refuse(op: str) -> NoReturn:
    """Raises the error of a call that gets here on a host without torch_npu.

    Raises:
        UnsupportedError: Always; it says what every route lacks.
    """
    refusals = [
        npu_routes.Refusal(name, "missing", reason)
        for name, reasons in npu_host.missing("forward").items()
        for reason in reasons
    ]
    npu_routes.require(op, npu_routes.Choice(None, tuple(refusals)), None)
    raise AssertionError  # require has raised


class _OwnMetadata:
    """Metadata of a problem for a target, made on the host and kept on each device."""

    def __init__(self, problem: AttentionProblem, target: Target, is_grad: bool) -> None:
        self.key = ("metadata", problem, target.name, is_grad)
        self._problem, self._target, self._is_grad = problem, target.name, is_grad

    def make(self) -> NDArray[np.int32]:
        return metadata_for(self._problem, self._target, is_grad_enabled=self._is_grad)


class _Ascend950:
    """The kernels that fag-kernel ships."""

    route = npu_routes.ASCEND950

    def __init__(
        self,
        call: npu_routes.Call,
        target: Target,
        scale: float,
        is_grad: bool,
        words: Words | None,
        *,
        has_dsinks: bool,
    ) -> None:
        has_template = words is not None and words.origin.used_cores > 0
        metadata = words.array if words is not None and has_template else None
        planned = plan(call.problem, target, softmax_scale=scale, metadata=metadata)
        dtype = _16BIT[call.dtype]
        if call.direction == "backward":
            self.launch = ascend950.gradient_launch(
                planned,
                dtype,
                is_deterministic=call.is_deterministic,
                has_sinks=has_dsinks,  # they change no other gradient: the lse holds them
                has_dlse=call.has_dlse,
            )
        else:
            self.launch = ascend950.forward_launch(planned, dtype, has_sinks=call.has_sinks)
        self._has_queries = call.problem.t1 > 0
        self._metadata = _OwnMetadata(call.problem, target, is_grad)
        self._tiling_key = ("tiling", self.launch.tiling)

    def _tiling(self) -> NDArray[np.int64]:
        return np.frombuffer(self.launch.tiling, np.int64)

    def run(self, device: torch.device, tensors: Tensors) -> None:
        """See Routed. Without a query there is nothing to launch: every output is empty or zero."""
        index: int = device.index
        if not self._has_queries:
            for name in _GRADIENTS:
                tensor = tensors.get(name)
                if tensor is not None:
                    cann.memset_async(tensor.data_ptr(), tensor.nbytes, raw_stream(index))
            return
        launch, kept, stream = self.launch, constants(device), _stream_name(index)
        tiling = kept.get(self._tiling_key, self._tiling, stream)
        addresses = dict.fromkeys(_OPTIONAL_INPUTS, tiling.address)  # what is absent is never read
        addresses["tiling"] = tiling.address
        for name, tensor in tensors.items():
            if tensor is not None:
                addresses[name] = tensor.data_ptr() or tiling.address  # an empty one has no address
        own = None
        if tensors["metadata"] is None:
            own = kept.get(self._metadata.key, self._metadata.make, stream)
            addresses["metadata"] = own.address
        if launch.workspace_bytes:
            workspace = torch.empty(launch.workspace_bytes, dtype=torch.uint8, device=device)
            addresses["workspace"] = workspace.data_ptr()
        launch.run(index, raw_stream(index), addresses)


class _Aclnn:
    """CANN's own kernels, by the two-phase protocol of aclnn."""

    route = npu_routes.ACLNN

    def __init__(
        self, call: npu_routes.Call, target: Target, scale: float, is_grad: bool, words: Words | None
    ) -> None:
        problem = call.problem
        self._is_backward = call.direction == "backward"
        self._metadata = _OwnMetadata(problem, target, is_grad)
        bounds = npu_routes.Origin.of(self._metadata.make()).bounds if words is None else words.origin.bounds
        # CANN asks for the very bounds that the tiles of the metadata were counted with
        s1, s2 = bounds if bounds[0] >= 0 else (problem.s1, problem.s2)
        self._scalars: dict[str, Any] = {
            "softmax_scale": scale,
            "mask_mode": int(problem.mask_mode),
            "win_left": problem.win_left,
            "win_right": problem.win_right,
            "max_seqlen_q": s1,
            "max_seqlen_kv": s2,
            "layout": problem.layout.value,
            **({} if self._is_backward else {"return_softmax_lse": True}),
        }
        self._needs_mask = problem.mask_mode is not MaskMode.NO_MASK
        self._tails: dict[str, tuple[Any, ...]] = {}

    def run(self, device: torch.device, tensors: Tensors) -> None:
        """See Routed."""
        index: int = device.index
        kept, stream = constants(device), _stream_name(index)
        arguments = {
            _ACLNN_NAMES.get(name, name): self._ref(name, tensor)
            for name, tensor in tensors.items()
            if tensor is not None
        }
        own = mask = None
        if tensors["metadata"] is None:
            own = kept.get(self._metadata.key, self._metadata.make, stream)
            arguments["metadata"] = self._ref("metadata", own.tensor)
        if self._needs_mask:
            mask = kept.get("attn_mask", _attn_mask, stream)
            arguments["attn_mask"] = self._ref("attn_mask", mask.tensor)
        prepare = cann.prepare_grad if self._is_backward else cann.prepare_forward
        call = prepare(arguments, **self._scalars)
        workspace = torch.empty(call.workspace_bytes, dtype=torch.uint8, device=device)
        call.run(workspace.data_ptr(), raw_stream(index))

    def _ref(self, name: str, tensor: Tensor) -> cann.TensorRef:
        """A contiguous tensor as fag_kernel.cann wants it; all but the address is the same at every call."""
        tail = self._tails.get(name)
        if tail is None:
            tail = self._tails[name] = _ref(tensor)[1:]
        return cast("cann.TensorRef", (tensor.data_ptr(), *tail))  # making a named one takes a microsecond


def _ref(tensor: Tensor) -> cann.TensorRef:
    shape = tuple(tensor.shape)
    return cann.TensorRef(
        tensor.data_ptr(), dtype_name(tensor.dtype), shape, tensor.stride(), 0, (tensor.numel(),)
    )


def _attn_mask() -> NDArray[np.int8]:
    """CANN's constant for masks: 0 on and below the diagonal, 1 above."""
    return np.triu(np.ones((ATTN_MASK_SIZE, ATTN_MASK_SIZE), np.int8), 1)
