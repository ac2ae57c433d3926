# Types of the extension module (csrc/bindings.cpp).
import numpy as np
from numpy.typing import NDArray

_ArrayRef = tuple[int, tuple[int, int, int]]

class Problem:
    def __init__(
        self,
        *,
        layout: int,
        b: int,
        n1: int,
        n2: int,
        d: int,
        dv: int,
        s1: int,
        s2: int,
        t1: int,
        t2: int,
        mask_mode: int,
        win_left: int,
        win_right: int,
        has_cu_seqlens_q: bool,
        has_cu_seqlens_kv: bool,
        has_seqused_q: bool,
        has_seqused_kv: bool,
        is_variable: bool,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        lengths_q: NDArray[np.int64],
        lengths_kv: NDArray[np.int64],
        starts_q: NDArray[np.int64],
        starts_kv: NDArray[np.int64],
    ) -> None: ...

def cpu_forward(
    problem: Problem,
    metadata: NDArray[np.int32],
    dtype: str,
    q: _ArrayRef,
    k: _ArrayRef,
    v: _ArrayRef,
    sinks_ptr: int,
    out: _ArrayRef,
    lse_ptr: int,
    softmax_scale: float,
    num_threads: int,
    /,
) -> None: ...
def cpu_backward(
    problem: Problem,
    metadata: NDArray[np.int32],
    dtype: str,
    q: _ArrayRef,
    k: _ArrayRef,
    v: _ArrayRef,
    dout: _ArrayRef,
    attn_out: _ArrayRef,
    lse_ptr: int,
    dlse_ptr: int,
    sinks_ptr: int,
    dq: _ArrayRef,
    dk: _ArrayRef,
    dv: _ArrayRef,
    dsinks_ptr: int,
    softmax_scale: float,
    num_threads: int,
    /,
) -> None: ...
def cpu_level() -> str: ...
def cpu_levels() -> list[str]: ...
def set_cpu_level(name: str | None, /) -> None: ...
