"""Derivatives: the formula of the front, and refusals where there is none.

`fag::attention_forward` is differentiable once, through `fag::attention_backward`, which takes the gradient
of the lse too and returns that of the sinks. Nothing else is differentiable: results of the raw operators,
and gradients themselves, look as if they were, so that a backward through them raises instead of dropping a
term. vmap, jvp and the other torch.func transforms are refused when the operator is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from fag_torch import direct
from fag_torch.schema import CANN_NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_SECOND = (
    "flash_attention: second derivatives are not supported, its gradient cannot be differentiated. "
    "Use softmax(q k^T) v in plain PyTorch where they are needed."
)


def attention_forward(keyset: Any, *args: Any, **scalars: Any) -> Any:
    """`fag::attention_forward` under autograd."""
    _refuse_transforms("flash_attention", args)
    if torch.is_grad_enabled() and _requires_grad(args):
        return _Attention.apply(keyset, scalars, *args)  # type: ignore[no-untyped-call]
    return _below_autograd("fag::attention_forward", keyset, args, scalars)


def attention_backward(keyset: Any, *args: Any, **scalars: Any) -> Any:
    """`fag::attention_backward` under autograd: computes, and refuses to be differentiated."""
    _refuse_transforms("flash_attention", args)
    return _not_differentiable("fag::attention_backward", keyset, args, scalars, _SECOND)


def raw_operator(name: str) -> Callable[..., Any]:
    """An operator of `cann_ops_transformer` under autograd: computes, and refuses to be differentiated.

    Args:
        name: "flash_attn" or "flash_attn_grad".

    Returns:
        Implementation for the key Autograd, registered with_keyset.
    """
    refusal = (
        f"{name}: backward through its outputs is not supported, the raw operators are not differentiable. "
        "Use fag_torch.flash_attention, which is differentiable in q, k, v and sinks, and through the lse."
    )

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_transforms(name, args)
        return _not_differentiable(f"{CANN_NAMESPACE}::{name}", keyset, args, kwargs, refusal)

    return kernel


def refuse_vmap(name: str) -> Callable[..., Any]:
    """Implementation for the key FuncTorchBatched: says that there is no batching rule."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name}: torch.vmap is not supported. Pass the batch as the batch axis, or pack it (TND)."
        )

    return kernel


class _Attention(torch.autograd.Function):
    """out, lse = attention(q, k, v, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, sinks, metadata)."""

    @staticmethod
    def forward(
        ctx: Any, keyset: Any, scalars: dict[str, Any], *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        scalars.pop("is_grad_enabled", None)
        asked = {**scalars, "is_grad_enabled": True}
        out, lse = _below_autograd("fag::attention_forward", keyset, tensors, asked)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.scalars = scalars
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, cu_q, cu_kv, used_q, used_kv, sinks, metadata, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        if dout is None:
            dout = torch.zeros_like(out)
        args = (q, k, v, dout, out, lse, dlse, cu_q, cu_kv, used_q, used_kv, sinks, metadata)
        op = torch.ops.fag.attention_backward.default
        if torch.is_grad_enabled():  # create_graph: the results must refuse to be differentiated
            dq, dk, dv, dsinks = op(*args, **ctx.scalars)
        else:  # a fifth of the overhead of a backward less
            _refuse_transforms("flash_attention", args)
            with torch._C._AutoDispatchBelowAutograd():
                dq, dk, dv, dsinks = op(*args, **ctx.scalars)
        wants = ctx.needs_input_grad[2:]
        grads = (dq, dk, dv, None, None, None, None, dsinks, None)
        return None, None, *(grad if wanted else None for grad, wanted in zip(grads, wants, strict=True))


class _NotDifferentiable(torch.autograd.Function):
    """Runs an operator; a backward through its outputs raises."""

    @staticmethod
    def forward(ctx: Any, name: str, keyset: Any, kwargs: dict[str, Any], refusal: str, *args: Any) -> Any:
        ctx.refusal = refusal
        return _below_autograd(name, keyset, args, kwargs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(ctx.refusal)


def _not_differentiable(
    name: str, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any], refusal: str
) -> Any:
    if torch.is_grad_enabled() and _requires_grad(args):
        return _NotDifferentiable.apply(name, keyset, kwargs, refusal, *args)  # type: ignore[no-untyped-call]
    return _below_autograd(name, keyset, args, kwargs)


def _below_autograd(name: str, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator of that qualified name without autograd, where nothing is differentiated."""
    run = direct.below_autograd(name, keyset)
    if run is not None:
        return run(*args, **kwargs)
    namespace, _, op = name.partition("::")
    with torch._C._AutoDispatchBelowAutograd():
        below = keyset & torch._C._after_autograd_keyset
        return getattr(getattr(torch.ops, namespace), op).default.redispatch(below, *args, **kwargs)


def _requires_grad(args: tuple[Any, ...]) -> bool:
    return any(getattr(arg, "requires_grad", False) for arg in args)  # isinstance takes 3 us more


def _refuse_transforms(name: str, args: tuple[Any, ...]) -> None:
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{name}: the transforms of torch.func (grad, vjp, jvp, vmap, ...) are not supported. "
            "Use torch.autograd with fag_torch.flash_attention."
        )
    if forward_ad._current_level >= 0 and any(map(_has_tangent, args)):
        raise RuntimeError(
            f"{name}: forward-mode AD (jvp) is not supported. Use backward-mode torch.autograd."
        )


def _has_tangent(arg: Any) -> bool:
    if not isinstance(arg, torch.Tensor):
        return False
    return forward_ad.unpack_dual(arg).tangent is not None  # type: ignore[no-untyped-call]
