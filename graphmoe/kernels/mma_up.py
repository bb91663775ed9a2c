"""MMA-up: the first GEMM of `direct` on tensor cores, every assignment by itself, and SwiGLU.

x        bf16 [T, H]   static, not quantised     w13      e4m3 or bf16 [E, 2I, H]
topk_ids int32 [T, K]  static                    w_scales f32 [E, 2I/128, H/128]
act      bf16 [A, I]   arena, row t * K + k      rows of sentinels are not written

A program multiplies a few gate rows and the same up rows with one token. Quantised weights are widened to bf16, which holds them exactly. The columns
of a step are cut into parts, a batch of the dot, so that warps share the columns and not the few rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.formats import BLOCK as GROUP
from graphmoe.kernels.pdl import pdl_flags, wait_and_signal

LANES = 8
"""Columns of the narrowest tensor core product: a token fills them all."""
_SHARED_BYTES = (227 << 10) - 8192
"""What an SM of Hopper can give to the weights of all stages of a program."""


def parts_that_fit(wanted: int, weight: Tensor, rows: int, stages: int) -> int:
    """`wanted` parts of 128 columns, a power of two, or as many of `rows` rows as `stages` stages can hold."""
    most = _SHARED_BYTES // (stages * rows * GROUP * weight.element_size())
    return max(1, min(wanted, 1 << most.bit_length() - 1))


@triton.jit
def in_lanes(values, LANES: tl.constexpr):
    """Values `[PARTS, GROUP]` as the right operand `[PARTS, GROUP, LANES]` of a batch of dots, the same in every lane."""
    return tl.broadcast_to(values[:, :, None], [values.shape[0], values.shape[1], LANES])


@triton.jit
def _mma_up_kernel(
    x, topk_ids, w, w_scales, act,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr, QUANTISED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_signal(PDL)
    block, assignment = tl.program_id(0), tl.program_id(1)
    expert = tl.load(topk_ids + assignment).to(tl.int64)
    if (expert < 0) | (expert >= EXPERTS):
        return
    x_row = x + (assignment // TOP_K).to(tl.int64) * COLUMNS
    row = block * ROWS + tl.arange(0, ROWS)
    part = tl.arange(0, PARTS)
    lane = tl.arange(0, GROUP)
    # The last block of rows may be ragged: it reads its last row again, and stores nothing for it.
    gate_row = w + (expert * (2 * WIDTH) + tl.minimum(row, WIDTH - 1)) * COLUMNS
    all_groups: tl.constexpr = COLUMNS // GROUP
    gate_scales = w_scales + (expert * (2 * WIDTH // GROUP) + block * ROWS // GROUP) * all_groups
    up_scales = gate_scales + WIDTH // GROUP * all_groups
    gate = tl.zeros([PARTS, ROWS, LANES], dtype=tl.float32)
    up = tl.zeros([PARTS, ROWS, LANES], dtype=tl.float32)
    for first in tl.range(0, (COLUMNS + GROUP - 1) // GROUP, PARTS, num_stages=STAGES):
        group = first + part
        column = group[:, None] * GROUP + lane[None, :]
        at = column[:, None, :] + gate_row[None, :, None]
        if COLUMNS % (GROUP * PARTS) == 0:
            gate_tile = tl.load(at)
            up_tile = tl.load(at + WIDTH * COLUMNS)
            values = tl.load(x_row + column)
        else:
            inside = column < COLUMNS
            gate_tile = tl.load(at, mask=inside[:, None, :], other=0.0)
            up_tile = tl.load(at + WIDTH * COLUMNS, mask=inside[:, None, :], other=0.0)
            values = tl.load(x_row + column, mask=inside, other=0.0)
        token = in_lanes(values, LANES)
        if QUANTISED:
            gate_scale = tl.load(gate_scales + group, mask=group < all_groups, other=0.0)
            up_scale = tl.load(up_scales + group, mask=group < all_groups, other=0.0)
            gate += tl.dot(gate_tile.to(tl.float32).to(values.dtype), token) * gate_scale[:, None, None]
            up += tl.dot(up_tile.to(tl.float32).to(values.dtype), token) * up_scale[:, None, None]
        else:
            gate = tl.dot(gate_tile, token, gate)
            up = tl.dot(up_tile, token, up)
    gate_sum = tl.max(tl.sum(gate, axis=0), axis=1)
    up_sum = tl.max(tl.sum(up, axis=0), axis=1)
    result = gate_sum / (1.0 + tl.exp(-gate_sum)) * up_sum
    tl.store(act + assignment.to(tl.int64) * WIDTH + row, result.to(act.dtype.element_ty), mask=row < WIDTH)


def mma_up(
    x: Tensor, topk_ids: Tensor, w13: Tensor, w13_scales: Tensor | None, *, block_rows: int, step: int, stages: int, warps: int, act: Tensor
) -> None:
    """`act[t * K + k] = silu(x[t] @ gate.T) * (x[t] @ up.T)` of the expert `topk_ids[t, k]`. One launch, no allocation.

    Args:
        x: bf16 `[T, H]`.
        topk_ids: int32 `[T, K]`; ids outside `[0, E)` are skipped, their rows of `act` left as they are.
        w13: e4m3 `[E, 2I, H]` with float32 `[E, 2I/128, H/128]`, or bf16 and None.
        block_rows: gate rows (and up rows) a program: 16, 32 or 64.
        step: bytes of a row a program reads at a time, a power of two from 128 on; fewer where its stages would not fit.
        stages: depth of the load pipeline.
        warps: 4 or 8.
        act: bf16 `[T * K, I]`, out.
    """
    experts, columns = w13.shape[0], w13.shape[2]
    width = act.shape[1]
    parts = parts_that_fit(step // (GROUP * w13.element_size()), w13, 2 * block_rows, stages)
    _mma_up_kernel[(triton.cdiv(width, block_rows), topk_ids.numel())](
        x, topk_ids, w13, w13 if w13_scales is None else w13_scales, act,
        COLUMNS=columns, WIDTH=width, EXPERTS=experts, TOP_K=topk_ids.shape[1], ROWS=block_rows, PARTS=parts, GROUP=GROUP,
        LANES=LANES, STAGES=stages, QUANTISED=w13_scales is not None, num_warps=warps, **pdl_flags(),
    )  # fmt: skip
