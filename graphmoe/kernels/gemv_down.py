"""GEMV-down: the second GEMM of `direct` on CUDA cores and the combine, in one launch; here the promises about ids are checked.

act      bf16 [A, I]   arena, row t * K + k     w2       e4m3 or bf16 [E, H, I]
topk_ids int32 [T, K]  static                   w_scales f32 [E, H/128, I/128]
weights  f32 [T, K]    static                   out      bf16 [T, H]   static      flags int32 [1]   arena, sticky

A program computes a few columns of one token over all its experts. Its weights are asked for before it waits for `gemv_up`: ids and weights were
complete before that kernel began. What was young then is read past the L1 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.formats import BLOCK as GROUP
from graphmoe.kernels.pdl import pdl_flags, wait_and_signal

_REGISTERS = 4096
"""Sums that a warp may hold in float32: 128 registers a thread."""
_UNROLLED = 4
"""Steps whose weights may all be in registers at once; a longer row goes through a pipelined loop."""


@triton.jit
def _add_groups(
    total, act_row, w_row, w_scale_row, router, live, first, WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    QUANTISED: tl.constexpr, WAITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the products of `GROUPS` groups of columns; with `WAITS`, the weights are asked for before the wait."""
    group = first + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = live[:, None, None] & (column < WIDTH)[None, :, :]
    w_tile = tl.load(w_row[:, :, None, None] + column[None, None, :, :], mask=inside[:, None, :, :], other=0.0)
    factor = tl.broadcast_to(router[:, None], [router.shape[0], GROUPS])
    if QUANTISED:
        factor = factor * tl.load(w_scale_row[:, None] + group[None, :], mask=live[:, None] & (group < WIDTH // GROUP)[None, :], other=0.0)
    if WAITS:
        wait_and_signal(PDL)
    values = tl.load(act_row[:, None, None] + column[None, :, :], mask=inside, other=0.0).to(tl.float32) * factor[:, :, None]
    return total + w_tile.to(tl.float32) * values[:, None, :, :]


@triton.jit
def _gemv_down_kernel(
    act, topk_ids, topk_weights, w, w_scales, scale, out, flags,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, ALL_SLOTS: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, UNROLLED: tl.constexpr,
    QUANTISED: tl.constexpr, DISTINCT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([SLOTS, ROWS, GROUPS, GROUP], dtype=tl.float32)
    # All slots at once: weights are on their way before the wait. Else slots that are not on this rank cost nothing.
    if SLOTS < ALL_SLOTS:
        wait_and_signal(PDL)
    for first_slot in tl.static_range(0, ALL_SLOTS, SLOTS):
        slot = first_slot + tl.arange(0, SLOTS)
        ids = tl.load(topk_ids + token * TOP_K + slot, mask=slot < TOP_K, other=-1, cache_modifier=".cg")
        live = (ids >= 0) & (ids < EXPERTS)
        if SLOTS == ALL_SLOTS or tl.max(live.to(tl.int32), axis=0) > 0:
            expert = tl.where(live, ids, 0).to(tl.int64)
            router = tl.load(topk_weights + token * TOP_K + slot, mask=live, other=0.0, cache_modifier=".cg")
            act_row = act + (token * TOP_K + slot).to(tl.int64) * WIDTH
            w_row = w + (expert[:, None] * COLUMNS + row[None, :]) * WIDTH
            w_scale_row = w_scales + (expert * (COLUMNS // GROUP) + tl.program_id(0) * ROWS // GROUP) * (WIDTH // GROUP)
            total = _add_groups(total, act_row, w_row, w_scale_row, router, live, 0, WIDTH, GROUPS, GROUP, QUANTISED, SLOTS == ALL_SLOTS, PDL)
            if STEPS <= UNROLLED:
                for step in tl.static_range(1, STEPS):
                    total = _add_groups(total, act_row, w_row, w_scale_row, router, live, step * GROUPS, WIDTH, GROUPS, GROUP, QUANTISED, False, PDL)
            else:
                for step in tl.range(1, STEPS, num_stages=3):
                    total = _add_groups(total, act_row, w_row, w_scale_row, router, live, step * GROUPS, WIDTH, GROUPS, GROUP, QUANTISED, False, PDL)
    result = tl.sum(tl.sum(tl.sum(total, axis=3), axis=2), axis=0) * scale
    if DISTINCT:
        every = tl.arange(0, ALL_SLOTS)
        named = tl.load(topk_ids + token * TOP_K + every, mask=every < TOP_K, other=-1)
        same = (named[:, None] == named[None, :]) & ((named >= 0) & (named < EXPERTS))[:, None] & (every[:, None] != every[None, :])
        broken = tl.max(tl.max(same.to(tl.int32), axis=1), axis=0)
        result = tl.where(broken == 1, float("nan"), result)
        if broken == 1:
            tl.store(flags, 1)
    tl.store(out + token.to(tl.int64) * COLUMNS + row, result.to(tl.bfloat16))


def gemv_down(
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
        block_rows: columns of `out` (rows of w2) a program.
        step: columns of w2 that a program holds at a time, a multiple of 128.
        slots: slots that a program holds at a time: 0 for all, or 1, which skips those of other ranks.
        warps: 4 or 8.
        out: bf16 `[T, H]`, out.
        flags: int32 `[1]`, out; sticky.
    """
    experts, columns, width = w2.shape
    tokens, top_k = topk_ids.shape
    all_slots = triton.next_power_of_2(top_k)
    slots = slots or all_slots
    most = max(1, _REGISTERS * warps // (slots * block_rows * GROUP))
    groups = min(step // GROUP, most, triton.next_power_of_2(triton.cdiv(width, GROUP)))
    _gemv_down_kernel[(columns // block_rows, tokens)](
        act, topk_ids, topk_weights, w2, w2 if w2_scales is None else w2_scales, scale, out, flags,
        COLUMNS=columns, WIDTH=width, EXPERTS=experts, TOP_K=top_k, ALL_SLOTS=all_slots, SLOTS=slots,
        ROWS=block_rows, GROUPS=groups, GROUP=GROUP, STEPS=triton.cdiv(width, groups * GROUP), UNROLLED=_UNROLLED,
        QUANTISED=w2_scales is not None, DISTINCT=distinct, num_warps=warps, **pdl_flags(),
    )  # fmt: skip
