"""The schemas: three operators of CANN, word for word, and two internal ones for the autograd front.

A schema is all that is here. CANN's grad has no `*`: everything from cu_seqlens_q on works by position and by
keyword. The internal operators follow the advice of torch.library instead: functional, tensors positional,
scalars after `*`.
"""

from __future__ import annotations

from typing import Final

#: Namespace of CANN's own package; see `coexist.py` for how ours lives beside it.
CANN_NAMESPACE: Final = "cann_ops_transformer"

#: Namespace of the internal operators.
FAG_NAMESPACE: Final = "fag"

#: Operator name -> schema. max_seqlen_* are SymInt, so that a compiled graph may carry them as symbols.
CANN_SCHEMAS: Final = {
    "flash_attn_metadata": (
        "(int num_heads_q, int num_heads_kv, int head_dim, *, "
        "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, "
        "Tensor? seqused_q=None, Tensor? seqused_kv=None, "
        "SymInt? batch_size=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_kv=None, "
        "int? mask_mode=None, int? win_left=None, int? win_right=None, "
        "str? layout_q=None, str? layout_kv=None, str? layout_out=None, "
        "bool is_grad_enabled=False) -> Tensor"
    ),
    "flash_attn": (
        "(Tensor q, Tensor k, Tensor v, Tensor? block_table=None, "
        "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, "
        "Tensor? seqused_q=None, Tensor? seqused_kv=None, "
        "Tensor? sinks=None, Tensor? metadata=None, float softmax_scale=1.0, "
        "int mask_mode=0, Tensor? attn_mask=None, int win_left=-1, int win_right=-1, "
        "SymInt max_seqlen_q=-1, SymInt max_seqlen_kv=-1, "
        'str layout_q="BSND", str layout_kv="BSND", str layout_out="BSND", '
        "bool return_softmax_lse=False) -> (Tensor attn_out, Tensor softmax_lse)"
    ),
    "flash_attn_grad": (
        "(Tensor q, Tensor k, Tensor v, Tensor dout, Tensor attn_out, Tensor softmax_lse, "
        "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, "
        "Tensor? seqused_q=None, Tensor? seqused_kv=None, "
        "Tensor? sinks=None, Tensor? attn_mask=None, Tensor? metadata=None, float softmax_scale=0.0, "
        "int mask_mode=0, int win_left=-1, int win_right=-1, "
        "SymInt max_seqlen_q=-1, SymInt max_seqlen_kv=-1, "
        'str layout_q="BSND", str layout_kv="BSND", str layout_out="BSND") '
        "-> (Tensor dq, Tensor dk, Tensor dv)"
    ),
}

_LENGTHS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? seqused_q, Tensor? seqused_kv"
_SCALARS = (
    "float? softmax_scale, int mask_mode, int win_left, int win_right, "
    "SymInt max_seqlen_q, SymInt max_seqlen_kv, str layout"
)

#: softmax_scale None is 1/sqrt(D). is_grad_enabled asks that given metadata also holds the backward split, so
#: that a forward-only one is refused before the forward runs. dsinks has no elements where sinks is None.
FAG_SCHEMAS: Final = {
    "attention_forward": (
        f"(Tensor q, Tensor k, Tensor v, {_LENGTHS}, Tensor? sinks, Tensor? metadata, "
        f"*, {_SCALARS}, bool is_grad_enabled=False) -> (Tensor out, Tensor lse)"
    ),
    "attention_backward": (
        "(Tensor q, Tensor k, Tensor v, Tensor dout, Tensor out, Tensor lse, Tensor? dlse, "
        f"{_LENGTHS}, Tensor? sinks, Tensor? metadata, "
        f"*, {_SCALARS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
    ),
}
