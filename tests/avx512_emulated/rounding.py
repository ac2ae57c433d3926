"""Rounding of float32 in NumPy, as the instructions for bfloat16 do it."""

import numpy as np


def flushed(x):
    """Zeros of the same sign in place of subnormal numbers."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def fused(a, b, c):
    """float32(a * b + c), rounded once.

    The sum of the exact product and c is rounded to odd in float64, so that the second rounding is right.
    """
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    rest = total - product
    error = (product - (total - rest)) + (c - rest)
    is_even = total.view(np.int64) % 2 == 0
    to_odd = (error != 0) & is_even & np.isfinite(total)
    return np.where(to_odd, np.nextafter(total, np.copysign(np.inf, error)), total).astype(np.float32)
