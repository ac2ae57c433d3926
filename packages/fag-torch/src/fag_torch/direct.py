"""Calls of the CPU's implementation without torch's dispatcher, where it would do nothing but cost time.

For every key whose kernel is written in Python the dispatcher boxes all arguments, 21 of flash_attn: some
7 us for autograd and 7 for the CPU, where the kernel of a short sequence takes 11. Where nothing stands
between the caller and the CPU - no mode, no transform, no tracing, no tensor of an unusual kind, nobody who
records operators - the implementation is called at once. In all other cases the dispatcher has its way.

So an implementation that somebody registers for the CPU over ours (`torch.library.impl`) is passed by. One
that is there before `fag_torch` is imported stays in charge: then ours is not registered, nor called here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, is_autocast_enabled, is_grad_enabled
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_keys,
    _dispatch_tls_local_include_set,
    _is_torch_function_mode_enabled,
)
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

if TYPE_CHECKING:
    from collections.abc import Callable

#: Qualified name of an operator -> what serves it on the CPU, as long as that is ours. The same twice: with
#: the errors of an operator, for who was called by the dispatcher, and with those of a function (errors.py).
OPERATORS: Final[dict[str, Callable[..., Any]]] = {}
FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {}


def _bits(*keys: DispatchKey) -> int:
    together = DispatchKeySet(keys[0])
    for key in keys[1:]:
        together = together | DispatchKeySet(key)
    return together.raw_repr()


_AUTOGRAD_AND_CPU: Final = _bits(DispatchKey.AutogradCPU, DispatchKey.CPU)

#: Keys of a tensor on the CPU that is no view with pending arithmetic, no wrapper and not sparse: one made
#: under torch.inference_mode, and any other.
_PLAIN_TENSOR: Final = frozenset(
    (
        _bits(DispatchKey.CPU, DispatchKey.AutocastCPU),
        _bits(DispatchKey.CPU, DispatchKey.AutocastCPU, DispatchKey.AutogradCPU, DispatchKey.ADInplaceOrView),
    )
)

#: Keys that a thread adds to every call where no mode is active: under torch.inference_mode, and else.
_NO_MODE: Final = frozenset(
    (_bits(DispatchKey.BackendSelect), _bits(DispatchKey.BackendSelect, DispatchKey.ADInplaceOrView))
)


def below_autograd(name: str, keyset: DispatchKeySet) -> Callable[..., Any] | None:
    """What an autograd kernel calls next, if that is the CPU.

    Args:
        name: Qualified name of the operator.
        keyset: The dispatch keys of the call, as the dispatcher hands them to a kernel.

    Returns:
        The implementation, or None where the dispatcher has to go on.
    """
    return OPERATORS.get(name) if keyset.raw_repr() == _AUTOGRAD_AND_CPU else None


def instead_of(name: str, required: tuple[Any, ...], optional: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What a Python function may call instead of an operator.

    Args:
        name: Qualified name of the operator.
        required: Whatever was passed where the operator takes a tensor.
        optional: Whatever was passed where the operator takes a tensor or None.

    Returns:
        The implementation; None if an argument is not a plain tensor on the CPU or would be differentiated,
        under torch.autocast, or if a mode, a transform, a tracer or a profiler is to see the operator.
    """
    if (
        is_compiling()
        or _is_torch_function_mode_enabled()
        or _profiler_enabled()
        or is_autocast_enabled("cpu")
        or forward_ad._current_level >= 0
        or _dispatch_tls_local_include_set().raw_repr() not in _NO_MODE
    ):
        return None
    tensors = required
    for tensor in optional:  # a loop for the usual nothing: a generator takes a microsecond more
        if tensor is not None:
            tensors += (tensor,)
    has_autograd = is_grad_enabled()
    for tensor in tensors:
        if (
            type(tensor) is not Tensor
            or _dispatch_keys(tensor).raw_repr() not in _PLAIN_TENSOR
            or (has_autograd and tensor.requires_grad)
        ):
            return None
    return FUNCTIONS.get(name)
