"""The 192 bytes that a device kernel reads, as named fields.

The layout is that of csrc/tiling/tiling_data.hpp; a test compares the two.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

_FORMAT: Final = Struct("<7qf4x16q")


class TilingData(NamedTuple):
    """Fields in memory order.

    A head's data lies at index0 = b * coef_b0 + n * coef_n0, index2 = n * coef_n2 of the compact view
    [view_d0, rows, view_d2, width].

    Attributes:
        b: Batch size.
        s1: Query length (TND: of the longest sequence).
        s2: Key length, likewise.
        n1: Query heads.
        n2: Key-value heads.
        d: Head dim of q and k.
        dv: Head dim of v.
        scale_value: Softmax scale, rounded to float32.
        g_size: n1 / n2.
        view_d0_q: First extent of the view of q, dout, attn_out, dq.
        view_d2_q: Third extent.
        coef_b0_q: Factor of the batch index.
        view_d0_kv: First extent of the view of k, v, dk, dv.
        view_d2_kv: Third extent.
        coef_b0_kv: Factor of the batch index.
        coef_n0: Factor of the head in index0, both sides.
        coef_n2: Factor of the head in index2, both sides.
        mask_mode: 0, 3 or 4.
        win_left: As given, -1 = unbounded.
        win_right: As given, -1 = unbounded.
        sparse_type: 0 dense, 1 causal, 2 band.
        s1_token: Keys visible to the left, corrected by s1 - s2 unless TND.
        s2_token: Keys visible to the right, likewise.
        total_per_batch_num: Valid 128 x 128 tiles of a head; 0 for TND.
    """

    b: int
    s1: int
    s2: int
    n1: int
    n2: int
    d: int
    dv: int
    scale_value: float
    g_size: int
    view_d0_q: int
    view_d2_q: int
    coef_b0_q: int
    view_d0_kv: int
    view_d2_kv: int
    coef_b0_kv: int
    coef_n0: int
    coef_n2: int
    mask_mode: int
    win_left: int
    win_right: int
    sparse_type: int
    s1_token: int
    s2_token: int
    total_per_batch_num: int

    @classmethod
    def from_bytes(cls, data: bytes) -> TilingData:
        """Read the fields.

        Args:
            data: 192 bytes, little-endian.

        Raises:
            ValueError: Another length.
        """
        if len(data) != _FORMAT.size:
            raise ValueError(f"TilingData: data must have {_FORMAT.size} bytes, got {len(data)}.")
        return cls(*_FORMAT.unpack(data))
