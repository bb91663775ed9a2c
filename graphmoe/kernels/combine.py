"""Combine: each token's K expert rows, weighted and summed in slot order.

rows    bf16 [S, R, H]   arena     row_of  int32 [T, K]   arena, -1 skips, -2 poisons
weights f32  [T, K]      static    out     bf16  [T, H]   static

The row map and the router weights are older than the kernel that this one waits for: they are asked for before the wait, past the L1 cache. The rows
of all slots are then asked for at once, unless there are many.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.kernels.pdl import pdl_flags, wait_and_signal

_UNROLLED = 16


@triton.jit
def _add_slot(total, k, rows, row_of, topk_weights, slot, column, inside, COLUMNS: tl.constexpr):
    row = tl.sum(tl.where(slot == k, row_of, 0), axis=0).to(tl.int64)
    weight = tl.sum(tl.where(slot == k, topk_weights, 0.0), axis=0)
    value = tl.load(rows + row * COLUMNS + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    return total + tl.where(row >= 0, weight * value, tl.where(row == -2, float("nan"), 0.0))


@triton.jit
def _combine_kernel(
    rows, row_of, topk_weights, scale, out,
    COLUMNS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, UNROLLED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    slot = tl.arange(0, SLOTS)
    own_rows = tl.load(row_of + token * TOP_K + slot, mask=slot < TOP_K, other=-1, cache_modifier=".cg")
    own_weights = tl.load(topk_weights + token * TOP_K + slot, mask=slot < TOP_K, other=0.0, cache_modifier=".cg")
    wait_and_signal(PDL)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if TOP_K <= UNROLLED:
        for k in tl.static_range(TOP_K):
            total = _add_slot(total, k, rows, own_rows, own_weights, slot, column, inside, COLUMNS)
    else:
        for k in range(TOP_K):
            total = _add_slot(total, k, rows, own_rows, own_weights, slot, column, inside, COLUMNS)
    tl.store(out + token * COLUMNS + column, (total * scale).to(tl.bfloat16), mask=inside)


def combine(rows: Tensor, row_of: Tensor, topk_weights: Tensor, *, scale: float, out: Tensor) -> None:
    """`out[t] = scale * sum_k weights[t, k] * rows[row_of[t, k]]`, float32, k ascending. One launch, no allocation.

    A token with no row here becomes 0, a token with a -2 becomes NaN.
    """
    tokens, columns = out.shape
    top_k = row_of.shape[1]
    block = min(1024, triton.next_power_of_2(columns))
    _combine_kernel[(tokens, triton.cdiv(columns, block))](
        rows, row_of, topk_weights, scale, out,
        COLUMNS=columns, TOP_K=top_k, SLOTS=triton.next_power_of_2(top_k), UNROLLED=_UNROLLED, BLOCK=block, **pdl_flags(),
    )  # fmt: skip
