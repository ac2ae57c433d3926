"""CANN's runtime, as far as this package calls it: its attention operators, clearing memory, the SoC's name.

CANN is neither needed to build nor to import this module. Its libraries are loaded by name when something
here is first called (csrc/cann); those that torch_npu has loaded are used as they are. Addresses and streams
are integers. Everything acts on the calling thread's current device: to switch it is the caller's business.

What the operators take is stated once, in the table of csrc/cann/aclnn.cpp; `operator_arguments` shows it.
The order for the gradient is that of CANN's package; the order for the forward is documented nowhere, and is
an assumption by analogy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from fag_kernel import _native

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "FORWARD",
    "GRAD",
    "AclnnCall",
    "CannError",
    "TensorRef",
    "memset_async",
    "missing_launcher",
    "missing_operator",
    "missing_runtime",
    "operator_arguments",
    "prepare_forward",
    "prepare_grad",
    "soc_name",
]

#: Symbols of CANN's custom package; inner ones, which stand in no header.
GRAD: Final = "aclnnInnerFlashAttnGrad"
FORWARD: Final = "aclnnInnerFlashAttn"


class CannError(RuntimeError):
    """A function of CANN failed, or is not there.

    Attributes:
        call: Function that failed; None if it could not be called at all.
        code: What it returned; None if it was not called, or returns no code.
        text: What the runtime says about it, may be empty; or what is missing.
    """

    def __init__(self, call: str | None, code: int | None, text: str) -> None:
        super().__init__(call, code, text)
        self.call = call
        self.code = code
        self.text = text

    def __str__(self) -> str:
        if self.call is None:
            return f"cann: the runtime must be complete, got: {self.text}. Source the set_env.sh of CANN."
        got = "no result" if self.code is None else f"code {self.code}"
        return f"cann: {self.call} must succeed, got {got}: {self.text or 'the runtime gives no reason'}"


class TensorRef(NamedTuple):
    """A view of device memory, for one call.

    Attributes:
        storage_address: Address of the first element of the storage.
        dtype: "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8" or "bool".
        shape: Sizes of the view.
        strides: In elements, one per dimension.
        offset: Elements from the begin of the storage to that of the view.
        storage_shape: Sizes of the storage, (number of elements,) will do.
    """

    storage_address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage_shape: tuple[int, ...]


#: An operator between its two phases: `workspace_bytes`, and `run(workspace_address, stream)`, once. What the
#: call holds is freed by the run, successful or not, or with the object where it is never run.
AclnnCall: TypeAlias = _native.AclnnCall


def missing_runtime() -> str | None:
    """Why CANN's runtime cannot be used, as a phrase, or None.

    Note:
        1 us where the runtime is there, 0.1 ms where it is not: then everything is looked for again, since it
        may have come with torch_npu meanwhile. So it is with `missing_launcher` and `missing_operator`.
    """
    return _native.cann_missing_runtime()


def missing_launcher() -> str | None:
    """Why kernels of our own cannot be launched, as a phrase, or None."""
    return _native.cann_missing_launcher()


def missing_operator(symbol: str) -> str | None:
    """Why an operator of CANN's custom package cannot be called, as a phrase, or None.

    Args:
        symbol: `GRAD` or `FORWARD`. Packages are those of ASCEND_CUSTOM_OPP_PATH, then those under
            ASCEND_OPP_PATH/vendors; without any, the library that the dynamic loader finds.
    """
    return _native.cann_missing_operator(symbol)


def soc_name() -> str:
    """The SoC as the runtime names it, "Ascend950PR_9599" for one.

    Raises:
        CannError: The runtime is missing, or does not know.
    """
    return _native.cann_soc_name()


def memset_async(address: int, nbytes: int, stream: int) -> None:
    """Queue zeros for a part of device memory.

    Args:
        address: First byte.
        nbytes: Number of bytes; 0 queues nothing.
        stream: Stream of the current device.

    Raises:
        CannError: The runtime is missing or refuses.
    """
    _native.cann_memset_async(address, nbytes, stream)


def operator_arguments(symbol: str) -> tuple[tuple[str, str], ...]:
    """Name and kind of the arguments of an operator, in the order of its first phase.

    Args:
        symbol: `GRAD` or `FORWARD`.

    Raises:
        ValueError: Another symbol.

    Example:
        >>> operator_arguments(GRAD)[12:14]
        (('metadata', 'optional tensor'), ('softmax_scale', 'double'))
    """
    return tuple(_native.aclnn_arguments(symbol))


def prepare_grad(
    tensors: Mapping[str, TensorRef | None],
    *,
    softmax_scale: float,
    mask_mode: int,
    win_left: int,
    win_right: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    layout: str,
) -> AclnnCall:
    """First phase of CANN's gradient.

    Args:
        tensors: By name of the argument: q, k, v, dout, attn_out, softmax_lse and the outputs dq, dk, dv;
            cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, sinks, attn_mask, metadata may be None or left
            out.
        softmax_scale: Factor of the scores.
        mask_mode: As in the operator.
        win_left: As in the operator.
        win_right: As in the operator.
        max_seqlen_q: As in the operator.
        max_seqlen_kv: As in the operator.
        layout: "BSND", "BNSD" or "TND", of queries, keys and output.

    Returns:
        The call, to be run with a workspace.

    Raises:
        CannError: The operator is missing, or refuses the call.
        ValueError: A tensor that it needs is missing, or one has a name or dtype that it does not know.
    """
    attributes = (softmax_scale, mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv)
    return _native.aclnn_prepare(GRAD, {**tensors, **_named(layout, *attributes)})


def prepare_forward(
    tensors: Mapping[str, TensorRef | None],
    *,
    softmax_scale: float,
    mask_mode: int,
    win_left: int,
    win_right: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    layout: str,
    return_softmax_lse: bool,
) -> AclnnCall:
    """First phase of CANN's forward; arguments as for `prepare_grad` where they have the same name.

    Args:
        tensors: q, k, v and the output attn_out; block_table, cu_seqlens_q, cu_seqlens_kv, seqused_q,
            seqused_kv, sinks, metadata, attn_mask and the output softmax_lse may be None or left out.
        softmax_scale: Factor of the scores.
        mask_mode: As in the operator.
        win_left: As in the operator.
        win_right: As in the operator.
        max_seqlen_q: As in the operator.
        max_seqlen_kv: As in the operator.
        layout: "BSND", "BNSD" or "TND".
        return_softmax_lse: Whether softmax_lse is written.

    Returns:
        The call, to be run with a workspace.

    Raises:
        CannError: The operator is missing, or refuses the call.
        ValueError: A tensor that it needs is missing, or one has a name or dtype that it does not know.
    """
    attributes = (softmax_scale, mask_mode, win_left, win_right, max_seqlen_q, max_seqlen_kv)
    arguments = {**tensors, **_named(layout, *attributes), "return_softmax_lse": return_softmax_lse}
    return _native.aclnn_prepare(FORWARD, arguments)


def _named(
    layout: str,
    softmax_scale: float,
    mask_mode: int,
    win_left: int,
    win_right: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
) -> dict[str, str | float]:
    """The attributes of both operators by name."""
    return {
        "softmax_scale": float(softmax_scale),
        "mask_mode": mask_mode,
        "win_left": win_left,
        "win_right": win_right,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_kv,
        "layout_q": layout,
        "layout_kv": layout,
        "layout_out": layout,
    }
