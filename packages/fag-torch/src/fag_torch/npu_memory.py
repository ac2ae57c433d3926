"""What the NPU operators keep on each device, and what they know about tensors that lie there.

- Constants: arrays made on the host (metadata, tiling data, CANN's attn_mask), copied to a device once. The
  copy is asynchronous, from pinned memory; other streams wait for it by an event, on the device.
- Contents: lengths and foreign metadata that live on a device have to be read once to check a call. That is a
  small copy which waits for the current stream; the answer is kept until the tensor changes. Metadata that
  flash_attn_metadata made is known without a copy.

torch_npu is never imported: whoever gets here has tensors that it made.
"""

from __future__ import annotations

from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from fag_metadata import check as check_in_full
from fag_metadata import check_metadata
from fag_metadata.errors import MetadataError, message, type_error
from fag_torch.npu_routes import Origin
from fag_torch.prepare import LENGTH_NAMES, dtype_name
from fag_torch.tensor_memo import TensorMemo, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from numpy.typing import NDArray
    from torch import Tensor

    from fag_metadata import AttentionProblem
    from fag_torch.prepare import LengthTensors
    from fag_torch.tensor_memo import Version

#: Bytes of constants kept per device. Metadata is mostly 32 KiB; a ragged training loop has a new one at
#: every step, and old ones make way.
_DEVICE_BYTES: Final = 64 << 20


def backend() -> Any:
    """torch.npu, which is there once torch_npu is imported."""
    return torch.npu  # type: ignore[attr-defined]


_REMEDY: Final = "Make it with flash_attn_metadata from the arguments of this call"


# ---- constants -------------------------------------------------------------------------------------------


class Constant:
    """An array on a device, ready on some streams.

    Attributes:
        tensor: int8, int32 or int64, 1-D or as the array was.
        address: Of its first element.
    """

    __slots__ = ("_event", "_ready", "address", "tensor")

    def __init__(self, array: NDArray[Any], device: torch.device, stream: int) -> None:
        self.tensor = upload(array, device)
        self.address: int = self.tensor.data_ptr()
        self._event = backend().Event()
        self._event.record()
        self._ready = {stream}

    def is_ready(self, stream: int) -> bool:
        """Whether work on that raw stream is ordered behind the copy, and the memory ahead of its reuse."""
        return stream in self._ready

    def prepare(self, stream: int) -> None:
        """Makes it so for the current stream, whose raw handle is given; nothing waits on the host.

        Once per stream is enough: what the allocator has recorded stays until the memory is freed. Two
        threads may do it at once, which does no harm.
        """
        current = backend().current_stream(self.tensor.device)
        self._event.wait(current)
        self.tensor.record_stream(current)
        self._ready.add(stream)


class Constants:
    """The constants of one device, by key; all dropped when they grow over a bound.

    A call that still uses a dropped one holds it until its launch is in the stream; memory behind that is the
    caching allocator's business.
    """

    def __init__(self, device: torch.device, limit_bytes: int = _DEVICE_BYTES) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._found: dict[Hashable, Constant] = {}
        self._bytes = 0
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], NDArray[Any]], stream: int) -> Constant:
        """The constant of that key, ready for the current stream.

        Args:
            key: What it is.
            make: Gives the array, where there is none yet.
            stream: Raw handle of the current stream. The copy may go through torch_npu's task queue: ask for
                the handle again before a launch, see `npu.raw_stream`.
        """
        found = self._found.get(key)
        if found is None:
            array = make()
            with self._lock:
                found = self._found.get(key)
                if found is None:
                    if self._bytes + array.nbytes > self._limit_bytes:
                        self._found.clear()
                        self._bytes = 0
                    found = self._found[key] = Constant(array, self._device, stream)
                    self._bytes += array.nbytes
        if not found.is_ready(stream):
            found.prepare(stream)
        return found

    def __len__(self) -> int:
        return len(self._found)


_constants: dict[int, Constants] = {}


def constants(device: torch.device) -> Constants:
    """Those of a device, which has an index."""
    found = _constants.get(device.index)
    # setdefault: of two threads that come first, one wins and the other one's is still empty
    return found or _constants.setdefault(device.index, Constants(device))


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """A new tensor on a device with the contents of an array, on the current stream, without waiting for it.

    Pinned memory goes back to torch_npu's host allocator, which keeps it until the copy is done. Where there
    is none left, the copy waits.
    """
    source, is_pinned = _staging(array.shape, _TORCH_TYPES[array.dtype.str])
    source.numpy()[...] = array
    return source.to(device, non_blocking=is_pinned)


def download(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of int32 tensors of one device on the host, contiguous; one wait for the current stream."""
    copies = []
    for tensor in tensors:
        copy, is_pinned = _staging(tensor.shape, torch.int32)
        copies.append(copy.copy_(tensor, non_blocking=is_pinned))
    backend().current_stream(tensors[0].device).synchronize()
    return [copy.clone() for copy in copies]  # out of pinned memory, which is scarce


def _staging(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, bool]:
    """Memory on the host to copy from or to, and whether it is pinned.

    Where torch_npu gets no pinned memory it gives a tensor without any, and says nothing.
    """
    pinned = torch.empty(shape, dtype=dtype, pin_memory=True)
    if pinned.data_ptr() or not pinned.numel():
        return pinned, True
    return torch.empty(shape, dtype=dtype), False


_TORCH_TYPES: Final = {
    np.dtype(np.int8).str: torch.int8,
    np.dtype(np.int32).str: torch.int32,
    np.dtype(np.int64).str: torch.int64,
}


# ---- contents --------------------------------------------------------------------------------------------


class Words:
    """The words of a metadata tensor on a device.

    Attributes:
        array: int32 (n,); read only by intent.
        is_own: Whether flash_attn_metadata made it, so that its ranges need no check.
    """

    def __init__(self, array: NDArray[np.int32], is_own: bool) -> None:
        self.array = array
        self.is_own = is_own
        self._checked: set[tuple[AttentionProblem, bool]] = set()

    @cached_property
    def origin(self) -> Origin:
        """What it was made for. It has passed a check."""
        return Origin.of(self.array)

    @cached_property
    def route_key(self) -> tuple[int, ...]:
        """The origin as plain numbers, which hash in no time."""
        *numbers, bounds = self.origin
        return (*map(int, numbers), *bounds)

    def check(self, op: str, problem: AttentionProblem, *, is_grad: bool) -> None:
        """Refuses metadata of another problem; a foreign one is checked in full, once per problem.

        A device follows its ranges without a check of its own, so that a wrong one is a wild write there.

        Raises:
            ValueError: It does not fit; the message names the first field that differs.
        """
        if (problem, is_grad) in self._checked:
            return
        check_metadata(op, self.array, problem, is_grad)
        if not self.is_own:
            report = check_in_full(self.array, problem)
            if not report.is_ok:
                part, field, text = report.findings[0]
                rule, got = "must hold ranges that cover every tile once", f"{part} {field}: {text}"
                raise MetadataError(message(op, "metadata", rule, got, remedy=_REMEDY))
        self._checked.add((problem, is_grad))


_words: TensorMemo[Words] = TensorMemo()
_lengths: TensorMemo[Tensor] = TensorMemo()


def remember_own(metadata: Tensor, array: NDArray[np.int32]) -> None:
    """Notes what flash_attn_metadata has just put into a new tensor."""
    _words.put(metadata, Words(array, is_own=True), version_of(metadata))


def words_of(op: str, metadata: Tensor) -> Words:
    """What stands in a metadata tensor on a device; one that is not known yet is copied, which waits.

    Raises:
        TypeError: It is not int32.
    """
    found = _words.get(metadata)
    if found is None:
        if metadata.dtype is not torch.int32:
            raise type_error(op, "metadata", "must be int32", dtype_name(metadata.dtype))
        version = version_of(metadata)
        found = Words(download([metadata])[0].numpy(), is_own=False)
        _words.put(metadata, found, version)
    return found


def host_lengths(op: str, lengths: LengthTensors) -> LengthTensors:
    """The length tensors of a call on the host; those that are not known yet are copied, which waits.

    All copies of a call share one wait.

    Raises:
        TypeError: One is not int32.
    """
    if lengths[0] is lengths[1] is lengths[2] is lengths[3] is None:
        return lengths
    found = [None if tensor is None else _lengths.get(tensor) for tensor in lengths]
    unknown: dict[int, tuple[Tensor, Version | None]] = {}
    for i, tensor in enumerate(lengths):
        if tensor is not None and found[i] is None:
            if tensor.dtype is not torch.int32:
                raise type_error(op, LENGTH_NAMES[i], "must be int32", dtype_name(tensor.dtype))
            unknown[i] = tensor, version_of(tensor)
    if unknown:
        copies = download([tensor for tensor, _ in unknown.values()])
        for (i, (tensor, version)), copy in zip(unknown.items(), copies, strict=True):
            found[i] = copy
            _lengths.put(tensor, copy, version)
    return tuple(found)  # type: ignore[return-value]
