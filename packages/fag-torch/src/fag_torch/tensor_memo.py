"""What is known about the contents of a tensor, for as long as nobody changes it.

Looking into a tensor costs a pass over it, or a copy from a device and a wait for it; the same tensor comes
back in every layer of a model. So the answer is kept with the tensor object and its version counter, and goes
with either.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Value = TypeVar("Value")


class Version(NamedTuple):
    """What a tensor was when its contents were read.

    Attributes:
        counter: In-place edits so far, through this tensor or any that shares its memory.
        address: Of its first element; `x.data = y` changes it, and no counter.
        shape: Likewise.
    """

    counter: int
    address: int
    shape: torch.Size


class TensorMemo(Generic[Value]):
    """Values by tensor; forgotten when the tensor is changed in place, or gone.

    A tensor made under torch.inference_mode has no version counter, so an edit would go unnoticed: nothing is
    remembered about it. Writes that bypass the counter (into `x.data`, or by address) go unnoticed too; of
    those of Inductor's generated code see `inductor.py`. Threads may share a memo: each step is one operation
    on a dict.

    Example:
        >>> import torch
        >>> memo: TensorMemo[str] = TensorMemo()
        >>> x = torch.zeros(3)
        >>> memo.put(x, "zeros", version_of(x))
        >>> memo.get(x), memo.get(x.add_(1))
        ('zeros', None)
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Version, Value]] = {}

    def get(self, tensor: Tensor) -> Value | None:
        """The value that was put for this tensor; None if there is none, or the tensor was changed since."""
        known = self._known.get(id(tensor))
        if _is_distrusted or known is None or known[0]() is not tensor or known[1] != version_of(tensor):
            return None
        return known[2]

    def put(self, tensor: Tensor, value: Value, version: Version | None) -> None:
        """Remembers a value.

        Args:
            tensor: Whose contents it is about.
            value: What is known about them; not None.
            version: `version_of(tensor)` from before the contents were read.
        """
        if version is not None:
            name, known = id(tensor), self._known
            known[name] = (weakref.ref(tensor, lambda _: known.pop(name, None)), version, value)

    def __len__(self) -> int:
        return len(self._known)


_is_distrusted = False


def distrust() -> None:
    """Ends all memories of this process: something writes into tensors and no version counter shows it."""
    global _is_distrusted
    _is_distrusted = True


def version_of(tensor: Tensor) -> Version | None:
    """The version of a tensor; None if nothing counts its edits: then nothing may be remembered about it."""
    if tensor.is_inference():
        return None
    return Version(tensor._version, tensor.data_ptr(), tensor.shape)
