"""MMA-down: the second GEMM of `direct` on tensor cores and the combine, in one launch; here the promises about ids are checked.

act      bf16 [A, I]   arena, row t * K + k     w2       e4m3 or bf16 [E, H, I]
topk_ids int32 [T, K]  static                   w_scales f32 [E, H/128, I/128]
weights  f32 [T, K]    static                   out      bf16 [T, H]   static      flags int32 [1]   arena, sticky

A program computes a few columns of one token over all its experts: several slots, or several groups of columns of one slot, are a batch of the dot.
Operands are widened as in `mma_up`. The first weights are asked for before the wait for it: ids and weights were complete before that kernel began.
What was young then is read past the L1 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.formats import BLOCK as GROUP
from graphmoe.kernels.gemv_down import MOST_SLOTS, names_twice
from graphmoe.kernels.mma_up import LANES, in_lanes, parts_that_fit
from graphmoe.kernels.pdl import pdl_flags, wait_and_signal


@triton.jit
def _mma_down_kernel(
    act, topk_ids, topk_weights, w, w_scales, scale, out, flags,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, ALL_SLOTS: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
    QUANTISED: tl.constexpr, DISTINCT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    safe_row = tl.minimum(row, COLUMNS - 1)
    part = tl.arange(0, PARTS)
    lane = tl.arange(0, GROUP)
    groups: tl.constexpr = PARTS // SLOTS
    all_groups: tl.constexpr = WIDTH // GROUP
    total = tl.zeros([PARTS, ROWS, LANES], dtype=tl.float32)
    if SLOTS < ALL_SLOTS:  # slots that are not on this rank cost nothing
        wait_and_signal(PDL)
    for first_slot in tl.static_range(0, TOP_K, SLOTS):
        slot = first_slot + part // groups
        ids = tl.load(topk_ids + token * TOP_K + slot, mask=slot < TOP_K, other=-1, cache_modifier=".cg")
        live = (ids >= 0) & (ids < EXPERTS)
        if SLOTS == ALL_SLOTS or tl.max(live.to(tl.int32), axis=0) > 0:
            expert = tl.where(live, ids, 0).to(tl.int64)
            factor = tl.load(topk_weights + token * TOP_K + slot, mask=live, other=0.0, cache_modifier=".cg")
            act_row = act + (token * TOP_K + slot).to(tl.int64) * WIDTH
            w_row = w + (expert[:, None] * COLUMNS + safe_row[None, :]) * WIDTH
            w_scale_row = w_scales + (expert * (COLUMNS // GROUP) + tl.program_id(0) * ROWS // GROUP) * all_groups
            first_column = (part % groups)[:, None] * GROUP + lane[None, :]
            first_inside = live[:, None] & (first_column < WIDTH)
            first_tile = tl.load(w_row[:, :, None] + first_column[:, None, :], mask=first_inside[:, None, :], other=0.0)
            if SLOTS == ALL_SLOTS:
                wait_and_signal(PDL)
            values = tl.load(act_row[:, None] + first_column, mask=first_inside, other=0.0)
            if QUANTISED:
                first_scale = tl.load(w_scale_row + part % groups, mask=live & (part % groups < all_groups), other=0.0)
                total += tl.dot(first_tile.to(tl.float32).to(values.dtype), in_lanes(values, LANES)) * (first_scale * factor)[:, None, None]
            else:
                total += tl.dot(first_tile, in_lanes(values, LANES)) * factor[:, None, None]
            for first in tl.range(groups, (WIDTH + GROUP - 1) // GROUP, groups, num_stages=STAGES):
                group = first + part % groups
                column = group[:, None] * GROUP + lane[None, :]
                inside = live[:, None] & (column < WIDTH)
                tile = tl.load(w_row[:, :, None] + column[:, None, :], mask=inside[:, None, :], other=0.0)
                values = tl.load(act_row[:, None] + column, mask=inside, other=0.0)
                if QUANTISED:
                    w_scale = tl.load(w_scale_row + group, mask=live & (group < all_groups), other=0.0) * factor
                    total += tl.dot(tile.to(tl.float32).to(values.dtype), in_lanes(values, LANES)) * w_scale[:, None, None]
                else:
                    total += tl.dot(tile, in_lanes(values, LANES)) * factor[:, None, None]
    result = tl.max(tl.sum(total, axis=0), axis=1) * scale
    if DISTINCT:
        broken = names_twice(topk_ids, token, EXPERTS, TOP_K, ALL_SLOTS)
        result = tl.where(broken == 1, float("nan"), result)
        if broken == 1:
            tl.store(flags, 1)
    tl.store(out + token.to(tl.int64) * COLUMNS + row, result.to(tl.bfloat16), mask=row < COLUMNS)


def mma_down(
    act: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w2: Tensor,
    w2_scales: Tensor | None,
    *,
    scale: float,
    distinct: bool,
    block_rows: int,
    step: int,
    slots: int,
    stages: int,
    warps: int,
    out: Tensor,
    flags: Tensor,
) -> None:
    """`out[t] = scale * sum_k weights[t, k] * (act[t * K + k] @ w2[topk_ids[t, k]].T)` in float32. One launch, no allocation.

    Args:
        act: bf16 `[T * K, I]`; rows of sentinels are not read.
        topk_ids: int32 `[T, K]`; ids outside `[0, E)` are skipped.
        topk_weights: float32 `[T, K]`.
        w2: e4m3 `[E, H, I]` with float32 `[E, H/128, I/128]`, or bf16 and None.
        scale: the routed scaling factor.
        distinct: the promise that a token names an expert once; a token that breaks it becomes NaN and sets the flag.
        block_rows: columns of `out` (rows of w2) a program: 16, 32 or 64.
        step: bytes of rows a program reads at a time, over all the slots it holds; a power of two from 128 on. Fewer where its stages would not fit.
        slots: slots that a program holds at a time: 0 for as many as fit, up to 16; or fewer: those that are all of other ranks are skipped.
        stages: depth of the load pipeline.
        warps: 4 or 8.
        out: bf16 `[T, H]`, out.
        flags: int32 `[1]`, out; sticky.
    """
    experts, columns, width = w2.shape
    tokens, top_k = topk_ids.shape
    all_slots = triton.next_power_of_2(top_k)
    slots = parts_that_fit(slots or min(all_slots, MOST_SLOTS), w2, block_rows, stages)
    parts = parts_that_fit(max(slots, step // (GROUP * w2.element_size())), w2, block_rows, stages)
    _mma_down_kernel[(triton.cdiv(columns, block_rows), tokens)](
        act, topk_ids, topk_weights, w2, w2 if w2_scales is None else w2_scales, scale, out, flags,
        COLUMNS=columns, WIDTH=width, EXPERTS=experts, TOP_K=top_k, ALL_SLOTS=all_slots, SLOTS=slots,
        ROWS=block_rows, PARTS=parts, GROUP=GROUP, LANES=LANES, STAGES=stages,
        QUANTISED=w2_scales is not None, DISTINCT=distinct, num_warps=warps, **pdl_flags(),
    )  # fmt: skip
