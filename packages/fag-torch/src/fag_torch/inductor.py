"""Keeps Inductor off the memory of tensors whose contents are remembered.

Its generated code gives a tensor that is no longer needed another name and writes something else into it, by
address. Neither the object nor the version counter changes, so that `tensor_memo.py` would answer with what
stood there before: the cu_seqlens of another call.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from fag_torch import tensor_memo

if TYPE_CHECKING:
    from collections.abc import Callable

#: What `_register` has put into Inductor's table. torch_npu, when it first compiles, replaces by a fallback
#: whatever it does not know there.
_ours: Final[dict[torch._ops.OpOverload[Any, Any], Any]] = {}


def keep_arguments(namespace: str, op: str) -> None:
    """Has Inductor keep the integer arguments of an operator as they are while its generated code runs.

    Does nothing unless Inductor is loaded, so it is called whenever the operator is traced. Where Inductor
    lacks what that takes, or compiles the operator in somebody else's way, nothing is remembered any more.

    Args:
        namespace: Of torch.ops.
        op: Name of the operator; what is traced is its default overload.
    """
    if "torch._inductor.lowering" not in sys.modules:
        return
    overload = getattr(getattr(torch.ops, namespace), op).default
    try:
        _register(overload)
    except (ImportError, AttributeError, TypeError):  # private names of torch: another release may move them
        tensor_memo.distrust()


def _register(overload: torch._ops.OpOverload[Any, Any]) -> None:
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    found = lowering.lowerings.get(overload)
    if found is not None:
        if found is _ours.get(overload):
            return
        if overload not in lowering.fallbacks:
            tensor_memo.distrust()
            return
    graph_of: Any = importlib.import_module("torch._inductor.virtualized").V
    ir: Any = importlib.import_module("torch._inductor.ir")
    call: Callable[..., Any] = lowering.fallback_handler(overload, add_to_fallback_set=False)

    def kept(argument: Any) -> Any:
        if not isinstance(argument, ir.TensorBox) or argument.get_dtype().is_floating_point:
            return argument
        realized = ir.ExternKernel.realize_input(argument)
        graph_of.graph.never_reuse_buffers.add(realized.get_name())
        return realized

    def lower(*args: Any, **kwargs: Any) -> Any:
        return call(*map(kept, args), **{name: kept(argument) for name, argument in kwargs.items()})

    lowering.add_layout_constraint(overload, lowering.constrain_to_fx_strides)
    _ours[overload] = lowering.register_lowering(overload, type_promotion_kind=None)(lower)
