# Types of the extension module (csrc/bindings.cpp).
from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

_Strides = tuple[int, int, int]

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
    @property
    def layout(self) -> int: ...
    @property
    def b(self) -> int: ...
    @property
    def n1(self) -> int: ...
    @property
    def n2(self) -> int: ...
    @property
    def g(self) -> int: ...
    @property
    def d(self) -> int: ...
    @property
    def dv(self) -> int: ...
    @property
    def s1(self) -> int: ...
    @property
    def s2(self) -> int: ...
    @property
    def t1(self) -> int: ...
    @property
    def t2(self) -> int: ...
    @property
    def mask_mode(self) -> int: ...
    @property
    def win_left(self) -> int: ...
    @property
    def win_right(self) -> int: ...
    @property
    def is_variable(self) -> bool: ...

class _KeyFields(TypedDict):
    template_id: int
    is_tnd: int
    mask: int
    is_swizzle: int
    d_align: int
    dv_align: int
    is_multiblk: int
    needs_zero: int

class _Plan(TypedDict):
    tiling_key: int
    key_problem: str
    block_dim: int
    is_linear: bool
    s1_outer: int
    s2_outer: int
    is_swizzle: bool
    swizzle_is_capability: bool
    swizzle_reason: str
    live_heads: int
    live_bytes: int
    workspace_bytes: int
    dq_offset: int
    dk_offset: int
    dv_offset: int
    tiling_data: bytes

DEFAULT_LIBAPI_RESERVE_BYTES: int

def array_from_dlpack(capsule: object, /) -> tuple[NDArray[Any], str]: ...
def make_plan(
    *,
    problem: Problem,
    route: int,
    cube_cores: int,
    vector_cores: int,
    l2_bytes: int,
    libapi_reserve_bytes: int,
    softmax_scale: float,
) -> _Plan: ...
def why_infeasible(problem: Problem, route: int, /) -> str: ...
def encode_key(fields: _KeyFields, /) -> int: ...
def decode_key(key: int, /) -> _KeyFields: ...
def why_invalid_key(key: int, /) -> str: ...
def valid_keys() -> list[int]: ...
def tiling_data_fields() -> list[tuple[str, int, str]]: ...

class PreparedForward:
    def __init__(
        self,
        problem: Problem,
        metadata: NDArray[np.int32],
        dtype: str,
        q: _Strides,
        k: _Strides,
        v: _Strides,
        out: _Strides,
        /,
    ) -> None: ...
    def run(
        self,
        q_ptr: int,
        k_ptr: int,
        v_ptr: int,
        sinks_ptr: int,
        out_ptr: int,
        lse_ptr: int,
        softmax_scale: float,
        num_threads: int,
        /,
    ) -> None: ...

class PreparedBackward:
    def __init__(
        self,
        problem: Problem,
        metadata: NDArray[np.int32],
        dtype: str,
        q: _Strides,
        k: _Strides,
        v: _Strides,
        dout: _Strides,
        attn_out: _Strides,
        dq: _Strides,
        dk: _Strides,
        dv: _Strides,
        /,
    ) -> None: ...
    def run(
        self,
        q_ptr: int,
        k_ptr: int,
        v_ptr: int,
        dout_ptr: int,
        attn_out_ptr: int,
        lse_ptr: int,
        dlse_ptr: int,
        sinks_ptr: int,
        dq_ptr: int,
        dk_ptr: int,
        dv_ptr: int,
        dsinks_ptr: int,
        softmax_scale: float,
        num_threads: int,
        /,
    ) -> None: ...

def cpu_level() -> str: ...
def cpu_levels() -> list[str]: ...
def cpu_levels_only_by_name() -> dict[str, str]: ...
def set_cpu_level(name: str | None, /) -> None: ...

_TensorRef = tuple[int, str, tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]

class AclnnCall:
    @property
    def workspace_bytes(self) -> int: ...
    def run(self, workspace_address: int, stream: int) -> None: ...

class DeviceFunction:
    def __init__(self, *, symbol: str, object: bytes, is_vector: bool) -> None: ...

class LaunchSequence:
    def __init__(self, steps: list[tuple[DeviceFunction, int, list[int]]], offsets: list[int]) -> None: ...
    def run(self, stream: int, addresses: list[int]) -> None: ...

def cann_missing_runtime() -> str | None: ...
def cann_missing_launcher() -> str | None: ...
def cann_missing_operator(symbol: str, /) -> str | None: ...
def cann_soc_name() -> str: ...
def cann_current_device() -> int: ...
def cann_memset_async(address: int, nbytes: int, stream: int, /) -> None: ...
def aclnn_prepare(
    symbol: str, arguments: Mapping[str, _TensorRef | float | bool | str | None]
) -> AclnnCall: ...
def aclnn_arguments(symbol: str, /) -> list[tuple[str, str]]: ...
