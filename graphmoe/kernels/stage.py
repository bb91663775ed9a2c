"""Stage: a call's inputs into the static buffers that graphs read, one launch before the graph.

x        bf16  [t, H]   caller     x_out        bf16  [T, H]   static
topk_ids int   [t, K]   caller     ids_out      int32 [T, K]   static, -1 on the tail
weights  f32   [t, K]   caller     weights_out  f32   [T, K]   static

The tail (tokens t..T) is neutralised through its ids alone: routed nowhere, its x and weights are never read.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024
_compiled: dict[tuple[Any, ...], Any] = {}


# t and the caller's strides change from call to call: specialising on them would compile in the middle of a decode loop.
@triton.jit(
    do_not_specialize=["tokens", "x_stride", "ids_row", "ids_column", "weights_row", "weights_column"],
    do_not_specialize_on_alignment=["x", "topk_ids", "topk_weights", "x_out", "ids_out", "weights_out"],
)
def _stage_kernel(
    x, x_stride, topk_ids, ids_row, ids_column, topk_weights, weights_row, weights_column, tokens,
    x_out, ids_out, weights_out, WIDTH: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PADDED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    live = token < tokens
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < WIDTH) & live
    tl.store(x_out + token * WIDTH + column, tl.load(x + token * x_stride + column, mask=inside), mask=inside)
    if tl.program_id(1) == 0:
        k = tl.arange(0, TOP_K_PADDED)
        mask = k < TOP_K
        ids = tl.load(topk_ids + token * ids_row + k * ids_column, mask=mask & live, other=-1)
        # Whatever int32 cannot hold is a sentinel already; narrowing could wrap it into a live expert.
        ids = tl.where((ids < 0) | (ids > 2147483647), -1, ids)
        tl.store(ids_out + token * TOP_K + k, ids.to(tl.int32), mask=mask)
        weights = tl.load(topk_weights + token * weights_row + k * weights_column, mask=mask & live, other=0.0)
        tl.store(weights_out + token * TOP_K + k, weights, mask=mask & live)


def stage(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, x_out: Tensor, ids_out: Tensor, weights_out: Tensor) -> None:
    """Copy `t` tokens into static buffers of `T >= t` and route the tail nowhere. One launch, no allocation.

    Ids that int32 cannot hold become -1. `x` needs a unit column stride; rows, ids and weights may have any strides.
    """
    # bf16 columns are moved four at a time where the caller's addresses allow it.
    wide = x.shape[1] % 4 == 0 and x.data_ptr() % 8 == 0 and x.stride(0) % 4 == 0 and x.storage_offset() % 4 == 0 and x.shape[0] > 0
    dtype = torch.int64 if wide else torch.int16
    source, target = x.view(dtype), x_out.view(dtype)
    width, top_k = source.shape[1], ids_out.shape[1]
    columns, column_blocks, top_k_padded = _sizes(width, top_k)
    grid = (ids_out.shape[0], column_blocks, 1)
    arguments = (
        source, source.stride(0), topk_ids, topk_ids.stride(0), topk_ids.stride(1), topk_weights, topk_weights.stride(0), topk_weights.stride(1),
        x.shape[0], target, ids_out, weights_out, width, top_k, top_k_padded, columns,
    )  # fmt: skip
    # This launch is on every call's path, and Triton's own look-up of the compiled kernel reads the environment and costs more than the launch.
    # Nothing else is specialised on, so these decide which kernel it is.
    key = (x.device, dtype, topk_ids.dtype, width, top_k)
    if key in _compiled:
        _compiled[key][grid](*arguments)
    else:
        kernel = _stage_kernel[grid](*arguments)
        if kernel is not None:  # the interpreter has none
            _compiled[key] = kernel


@cache
def _sizes(width: int, top_k: int) -> tuple[int, int, int]:
    """Columns a program, programs a token, and K padded."""
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    return columns, triton.cdiv(width, columns), triton.next_power_of_2(top_k)
