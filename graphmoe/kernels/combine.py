"""Combine: each token's K expert rows, weighted and summed in slot order.

rows    bf16 [S, R, H]   arena     row_of  int32 [T, K]   arena, -1 skips, -2 poisons
weights f32  [T, K]      static    out     bf16  [T, H]   static
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.kernels.pdl import pdl_flags, wait_and_signal


@triton.jit
def _combine_kernel(rows, row_of, topk_weights, scale, out, COLUMNS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_and_signal(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(TOP_K):
        row = tl.load(row_of + token * TOP_K + k).to(tl.int64)
        if row >= 0:
            weight = tl.load(topk_weights + token * TOP_K + k)
            total += weight * tl.load(rows + row * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
        if row == -2:
            total += float("nan")
    tl.store(out + token * COLUMNS + column, (total * scale).to(tl.bfloat16), mask=inside)


def combine(rows: Tensor, row_of: Tensor, topk_weights: Tensor, *, scale: float, out: Tensor) -> None:
    """`out[t] = scale * sum_k weights[t, k] * rows[row_of[t, k]]`, float32, k ascending. One launch, no allocation.

    A token with no row here becomes 0, a token with a -2 becomes NaN.
    """
    tokens, columns = out.shape
    block = min(1024, triton.next_power_of_2(columns))
    _combine_kernel[(tokens, triton.cdiv(columns, block))](
        rows, row_of, topk_weights, scale, out, COLUMNS=columns, TOP_K=row_of.shape[1], BLOCK=block, **pdl_flags()
    )  # fmt: skip
