"""Gather-down: the second GEMM of `gathered`: one bf16 row a position.

act  e4m3 or bf16 [A, I]   arena, by position     w2       e4m3 or bf16 [E, H, I]
act_scales f32 [A, I/STEP] None for bf16          w_scales f32 [E, H/128, I/128]
tiles int32 [N, 3]         arena                  rows     bf16 [A, H]   arena, by position
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from graphmoe.formats import BLOCK as GROUP
from graphmoe.kernels.pdl import pdl_flags, wait_and_signal


@triton.jit
def _gather_down_kernel(
    act, act_scales, tiles, w, w_scales, rows,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, QUANTISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0), tl.program_id(1)
    # `tiles` is from before the kernel that this one waits for; past the L1 cache, which may hold an earlier replay's.
    expert = tl.load(tiles + tile * 3, cache_modifier=".cg").to(tl.int64)
    first = tl.load(tiles + tile * 3 + 1, cache_modifier=".cg").to(tl.int64)
    count = tl.load(tiles + tile * 3 + 2, cache_modifier=".cg")
    wait_and_signal(PDL)
    if count == 0:
        return
    slot = tl.arange(0, TILE)
    live = slot < count
    position = first + tl.where(live, slot, 0)
    row = block * ROWS + tl.arange(0, ROWS)
    step = tl.arange(0, STEP)
    steps: tl.constexpr = WIDTH // STEP
    groups: tl.constexpr = WIDTH // GROUP
    first_row = expert.to(tl.int32) * COLUMNS + block * ROWS  # a ragged last block: see `gather_up`
    w_scale_at = w_scales + (expert * (COLUMNS // GROUP) + block * ROWS // GROUP) * groups
    act_at = act + position[:, None] * WIDTH + step[None, :]
    act_scale_at = act_scales + position * steps
    total = tl.zeros([ROWS, TILE], dtype=tl.float32)
    for k in tl.range(0, steps, num_stages=STAGES):
        w_tile = w.load([first_row, k * STEP])
        values = tl.trans(tl.load(act_at + k * STEP))
        if QUANTISE:
            scale = tl.load(act_scale_at + k)
            total += tl.dot(w_tile, values) * (scale * tl.load(w_scale_at + k * STEP // GROUP))[None, :]
        else:
            total = tl.dot(w_tile, values, total)
    mask = live[:, None] & (row < COLUMNS)[None, :]
    tl.store(rows + position[:, None] * COLUMNS + row[None, :], tl.trans(total).to(tl.bfloat16), mask=mask)


def gather_down(
    act: Tensor,
    act_scales: Tensor | None,
    tiles: Tensor,
    w2: Tensor,
    w2_scales: Tensor | None,
    *,
    tile: int,
    block_rows: int,
    stages: int,
    warps: int,
    rows: Tensor,
) -> None:
    """`rows[p] = act[p] @ w2[expert of p].T` of every live position. One launch, no allocation.

    Args:
        act: e4m3 `[A, I]` with `act_scales` float32 `[A, I/step]`, step 128 or 64, or bf16 and None.
        tiles: int32 `[N, 3]`.
        w2: e4m3 `[E, H, I]` with float32 `[E, H/128, I/128]`, or bf16 and None.
        tile: positions of a tile: 16, 32 or 64.
        block_rows: rows of w2 a program: 64 or 128.
        stages: depth of the load pipeline.
        warps: 4 or 8.
        rows: bf16 `[A, H]`, out.
    """
    columns, width = rows.shape[1], act.shape[1]
    step = 64 if act_scales is None else width // act_scales.shape[1]
    weights = TensorDescriptor.from_tensor(w2.view(-1, width), [block_rows, step])
    _gather_down_kernel[(triton.cdiv(columns, block_rows), tiles.shape[0])](
        act, act if act_scales is None else act_scales, tiles, weights, w2 if w2_scales is None else w2_scales, rows,
        COLUMNS=columns, WIDTH=width, TILE=tile, ROWS=block_rows, STEP=step, GROUP=GROUP,
        STAGES=stages, QUANTISE=act_scales is not None, num_warps=warps, **pdl_flags(),
    )  # fmt: skip
