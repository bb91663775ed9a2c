"""Gather-down for int4 weights: the second GEMM of `gathered_w4`: one bf16 row a position.

act  e4m3 [A, I]          arena, by position     w2       uint8 [E, H, I/2]      as `formats/w4afp8.prepare` packs them
act_scales f32 [A, I/128], [A, I/64] or []       w_scales bf16 [E, I/128, H]
tiles int32 [N, 3]        arena                  rows     bf16 [A, H]   arena, by position
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from graphmoe.formats import BLOCK as GROUP
from graphmoe.kernels.pdl import pdl_flags, wait_and_signal
from graphmoe.kernels.w4 import high_codes, low_codes, sums_of, values_of


@triton.jit
def _gather_down_w4_kernel(
    act, act_scales, tiles, w, w_scales, rows,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, HALVES: tl.constexpr,
    PER_TENSOR: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0), tl.program_id(1)
    # `tiles` is from before the kernel that this one waits for; past the L1 cache, which may hold an earlier replay's.
    expert = tl.load(tiles + tile * 3, cache_modifier=".cg").to(tl.int64)
    first = tl.load(tiles + tile * 3 + 1, cache_modifier=".cg").to(tl.int64)
    count = tl.load(tiles + tile * 3 + 2, cache_modifier=".cg")
    wait_and_signal(PDL)
    if count == 0:
        return
    HALF: tl.constexpr = GROUP // 2
    groups: tl.constexpr = WIDTH // GROUP
    slot = tl.arange(0, TILE)
    live = slot < count
    position = first + tl.where(live, slot, 0)
    row = block * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, HALF)
    first_row = expert.to(tl.int32) * COLUMNS + block * ROWS
    scale_at = w_scales + expert * (groups * COLUMNS) + row
    act_at = act + position[:, None] * WIDTH + half[None, :]
    act_scale_at = act_scales + (0 if PER_TENSOR else position * (groups * HALVES))
    total = tl.zeros([ROWS, TILE], dtype=tl.float32)
    for k in tl.range(0, groups, num_stages=STAGES):
        w_tile = w.load([first_row, k * HALF])
        low = tl.load(act_at + k * GROUP)
        high = tl.load(act_at + k * GROUP + HALF)
        scale = tl.load(act_scale_at + (slot * 0 if PER_TENSOR else k * HALVES))
        w_scale = tl.load(scale_at + k * COLUMNS).to(tl.float32)
        low_sums, high_sums = sums_of(low), sums_of(high)
        if HALVES == 2:  # the halves of a group have scales of their own
            high_scale = tl.load(act_scale_at + k * HALVES + 1)
            low_part = values_of(tl.dot(low_codes(w_tile), tl.trans(low)), low_sums) * scale[None, :]
            high_part = values_of(tl.dot(high_codes(w_tile), tl.trans(high)), high_sums) * high_scale[None, :]
            total += (low_part + high_part) * w_scale[:, None]
        else:
            product = tl.dot(high_codes(w_tile), tl.trans(high), tl.dot(low_codes(w_tile), tl.trans(low)))
            total += values_of(product, low_sums + high_sums) * (w_scale[:, None] * scale[None, :])
    tl.store(rows + position[:, None] * COLUMNS + row[None, :], tl.trans(total).to(tl.bfloat16), mask=live[:, None])


def gather_down_w4(
    act: Tensor,
    act_scales: Tensor,
    tiles: Tensor,
    w2: Tensor,
    w2_scales: Tensor,
    *,
    tile: int,
    block_rows: int,
    stages: int,
    warps: int,
    rows: Tensor,
) -> None:
    """`rows[p] = act[p] @ w2[expert of p].T` of every live position. One launch, no allocation.

    Args:
        act: e4m3 `[A, I]`.
        act_scales: float32 `[A, I/128]` or `[A, I/64]`, or `[]`: one scale for all rows.
        tiles: int32 `[N, 3]`.
        w2: uint8 `[E, H, I/2]`, prepared.
        w2_scales: bf16 `[E, I/128, H]`.
        tile: positions of a tile: 16, 32 or 64.
        block_rows: rows of w2 a program: 64 or 128.
        stages: depth of the load pipeline.
        warps: 4 or 8.
        rows: bf16 `[A, H]`, out.
    """
    columns, width = rows.shape[1], act.shape[1]
    per_tensor = act_scales.dim() == 0
    weights = TensorDescriptor.from_tensor(w2.view(-1, width // 2), [block_rows, GROUP // 2])
    _gather_down_w4_kernel[(columns // block_rows, tiles.shape[0])](
        act, act_scales, tiles, weights, w2_scales, rows,
        COLUMNS=columns, WIDTH=width, TILE=tile, ROWS=block_rows, GROUP=GROUP,
        HALVES=1 if per_tensor else act_scales.shape[1] * GROUP // width, PER_TENSOR=per_tensor, STAGES=stages, num_warps=warps, **pdl_flags(),
    )  # fmt: skip
