"""Device functions of the int4 GEMMs: widening prepared weights (`formats/w4afp8.prepare`) and multiplying a group of 128 columns.

A nibble `c = value + 8` is the e4m3 code of `c * 2^-9`. So with `c` as the operand, `sum(value * x) = 2^9 * sum(code * x) - 8 * sum(x)`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_STEP = tl.constexpr(512.0)
_OFFSET = tl.constexpr(8.0)


@triton.jit
def low_codes(packed):
    """e4m3 codes of the first 64 columns of a group, of bytes `[ROWS, 64]`."""
    return (packed & 0xF).to(tl.float8e4nv, bitcast=True)


@triton.jit
def high_codes(packed):
    """Of the last 64 columns."""
    return (packed >> 4).to(tl.float8e4nv, bitcast=True)


@triton.jit
def sums_of(values):
    """float32 `[TILE]`: sums of the rows of e4m3 `[TILE, 64]`."""
    return tl.sum(values.to(tl.float32), axis=1)


@triton.jit
def values_of(product, sums):
    """`[ROWS, TILE]`: products with int4 values, of a product with their codes."""
    return product * _STEP - (sums * _OFFSET)[None, :]


@triton.jit
def quantise_to(values, scale):
    """e4m3 of float32 values with one given scale, saturated; NaN and infinity stay no number: infinity becomes NaN."""
    scaled = tl.clamp(values * (1.0 / scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(tl.abs(values) < float("inf"), scaled, float("nan")).to(tl.float8e4nv)
