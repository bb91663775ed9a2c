"""GEMV-up: the first GEMM of `direct` on CUDA cores, every assignment by itself, and SwiGLU.

x        bf16 [T, H]   static, not quantised     w13      e4m3 or bf16 [E, 2I, H]
topk_ids int32 [T, K]  static                    w_scales f32 [E, 2I/128, H/128]
act      bf16 [A, I]   arena, row t * K + k      rows of sentinels are not written

A program streams a few gate rows and the same up rows into registers, all columns in flight.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.formats import BLOCK as GROUP
from graphmoe.kernels.pdl import pdl_flags, wait_and_signal


@triton.jit
def _gemv_up_kernel(
    x, topk_ids, w, w_scales, act,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, QUANTISED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_signal(PDL)
    assignment = tl.program_id(1)
    expert = tl.load(topk_ids + assignment).to(tl.int64)
    if (expert < 0) | (expert >= EXPERTS):
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, GROUP)
    x_row = x + (assignment // TOP_K).to(tl.int64) * COLUMNS
    gate_row = w + (expert * (2 * WIDTH) + row) * COLUMNS
    all_groups: tl.constexpr = COLUMNS // GROUP
    gate_scales = w_scales + (expert * (2 * WIDTH // GROUP) + tl.program_id(0) * ROWS // GROUP) * all_groups
    up_scales = gate_scales + WIDTH // GROUP * all_groups
    gate = tl.zeros([ROWS, GROUPS, GROUP], dtype=tl.float32)
    up = tl.zeros([ROWS, GROUPS, GROUP], dtype=tl.float32)
    for first in tl.range(0, (COLUMNS + GROUP - 1) // GROUP, GROUPS, num_stages=STAGES):
        group = first + tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + lane[None, :]
        inside = column < COLUMNS
        at = gate_row[:, None, None] + column[None, :, :]
        gate_tile = tl.load(at, mask=inside[None, :, :], other=0.0)
        up_tile = tl.load(at + WIDTH * COLUMNS, mask=inside[None, :, :], other=0.0)
        values = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
        if QUANTISED:
            gate_values = values * tl.load(gate_scales + group, mask=group < all_groups, other=0.0)[:, None]
            up_values = values * tl.load(up_scales + group, mask=group < all_groups, other=0.0)[:, None]
        else:
            gate_values = values
            up_values = values
        gate += gate_tile.to(tl.float32) * gate_values[None, :, :]
        up += up_tile.to(tl.float32) * up_values[None, :, :]
    gate_sum = tl.sum(tl.sum(gate, axis=2), axis=1)
    up_sum = tl.sum(tl.sum(up, axis=2), axis=1)
    result = gate_sum / (1.0 + tl.exp(-gate_sum)) * up_sum
    tl.store(act + assignment.to(tl.int64) * WIDTH + row, result.to(tl.bfloat16))


def gemv_up(
    x: Tensor, topk_ids: Tensor, w13: Tensor, w13_scales: Tensor | None, *, block_rows: int, step: int, stages: int, warps: int, act: Tensor
) -> None:
    """`act[t * K + k] = silu(x[t] @ gate.T) * (x[t] @ up.T)` of the expert `topk_ids[t, k]`. One launch, no allocation.

    Args:
        x: bf16 `[T, H]`.
        topk_ids: int32 `[T, K]`; ids outside `[0, E)` are skipped, their rows of `act` left as they are.
        w13: e4m3 `[E, 2I, H]` with float32 `[E, 2I/128, H/128]`, or bf16 and None.
        block_rows: gate rows (and up rows) a program.
        step: columns a program reads at a time, a multiple of 128.
        stages: depth of the load pipeline; 1 for none.
        warps: 4 or 8.
        act: bf16 `[T * K, I]`, out.
    """
    experts, columns = w13.shape[0], w13.shape[2]
    width = act.shape[1]
    groups = min(step // GROUP, triton.next_power_of_2(triton.cdiv(columns, GROUP)))
    _gemv_up_kernel[(width // block_rows, topk_ids.numel())](
        x, topk_ids, w13, w13 if w13_scales is None else w13_scales, act,
        COLUMNS=columns, WIDTH=width, EXPERTS=experts, TOP_K=topk_ids.shape[1],
        ROWS=block_rows, GROUPS=groups, GROUP=GROUP, STAGES=stages, QUANTISED=w13_scales is not None, num_warps=warps, **pdl_flags(),
    )  # fmt: skip
