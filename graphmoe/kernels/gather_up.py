"""Gather-up: the first GEMM of `gathered`, SwiGLU and the quantisation of its result in one launch.

x        e4m3 or bf16 [T, H]        tokens, read through `members`    w        e4m3 or bf16 [E, 2I, H]
x_scales f32 [T, H/128]             None for bf16                     w_scales f32 [E, 2I/128, H/128]
tiles    int32 [N, 3]               members int32 [N, TILE]           see `kernels/route_tiles.py`
act      e4m3 or bf16 [A, I]        arena, by position                act_scales f32 [A, I/ROWS]

Weights come through a TMA descriptor and are the left operand: a program computes 128 (or 64) gate and the same up columns for a tile of 16, 32 or
64 tokens, so that tensor cores are full although an expert has few tokens. Its columns of `act` are one group of the quantisation. What dead slots
of a tile hold is never stored.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from graphmoe.formats import BLOCK as GROUP
from graphmoe.formats import ScaleFormat
from graphmoe.kernels.pdl import pdl_flags, wait_and_signal
from graphmoe.kernels.quantise import quantise_groups


@triton.jit
def _gather_up_kernel(
    x, x_scales, tiles, members, w, w_scales, act, act_scales,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, QUANTISE: tl.constexpr, POWER_OF_TWO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_signal(PDL)
    block, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.arange(0, TILE)
    # All asked for at once: each waits for memory as long as the first tile of weights does.
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    first = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    member = tl.load(members + tile * TILE + slot)
    if count == 0:
        return
    row = block * ROWS + tl.arange(0, ROWS)
    step = tl.arange(0, STEP)
    steps: tl.constexpr = COLUMNS // STEP
    groups: tl.constexpr = COLUMNS // GROUP
    # The last block of rows may be ragged (bf16): it reads the rows that follow, or zeros behind the last, and stores nothing for them.
    first_row = expert.to(tl.int32) * (2 * WIDTH) + block * ROWS
    gate_scale_at = w_scales + (expert * (2 * WIDTH // GROUP) + block * ROWS // GROUP) * groups
    up_scale_at = gate_scale_at + WIDTH // GROUP * groups
    token = tl.where(slot < count, member, 0).to(tl.int64)
    x_at = x + token[:, None] * COLUMNS + step[None, :]
    x_scale_at = x_scales + token * groups
    gate = tl.zeros([ROWS, TILE], dtype=tl.float32)
    up = tl.zeros([ROWS, TILE], dtype=tl.float32)
    for k in tl.range(0, steps, num_stages=STAGES):
        gate_tile = w.load([first_row, k * STEP])
        up_tile = w.load([first_row + WIDTH, k * STEP])
        tokens = tl.trans(tl.load(x_at + k * STEP))
        if QUANTISE:
            scale = tl.load(x_scale_at + k)
            gate += tl.dot(gate_tile, tokens) * (scale * tl.load(gate_scale_at + k))[None, :]
            up += tl.dot(up_tile, tokens) * (scale * tl.load(up_scale_at + k))[None, :]
        else:
            gate = tl.dot(gate_tile, tokens, gate)
            up = tl.dot(up_tile, tokens, up)
    values = tl.trans(gate / (1.0 + tl.exp(-gate)) * up)
    position = first + slot
    at = position.to(tl.int64)[:, None] * WIDTH + row[None, :]
    mask = (slot < count)[:, None] & (row < WIDTH)[None, :]
    if QUANTISE:
        payload, act_scale = quantise_groups(values, POWER_OF_TWO)
        tl.store(act + at, payload, mask=mask)
        tl.store(act_scales + position * (WIDTH // ROWS) + block, act_scale, mask=slot < count)
    else:
        tl.store(act + at, values.to(tl.bfloat16), mask=mask)


def gather_up(
    x: Tensor,
    x_scales: Tensor | None,
    tiles: Tensor,
    members: Tensor,
    w13: Tensor,
    w13_scales: Tensor | None,
    *,
    block_rows: int,
    stages: int,
    warps: int,
    act: Tensor,
    act_scales: Tensor | None,
    scale_format: ScaleFormat | None,
) -> None:
    """`act[p] = silu(x[token of p] @ gate.T) * (x[token of p] @ up.T)` of every live position. One launch, no allocation.

    Args:
        x: e4m3 `[T, H]` with `x_scales` float32 `[T, H/128]`, or bf16 and None.
        tiles: int32 `[N, 3]`.
        members: int32 `[N, tile]`; tile is 16, 32 or 64.
        w13: e4m3 `[E, 2I, H]` with float32 `[E, 2I/128, H/128]`, or bf16 and None.
        block_rows: gate rows (and up rows) a program, 128 or 64.
        stages: depth of the load pipeline.
        warps: 4 or 8.
        act: e4m3 or bf16 `[A, I]`, out.
        act_scales: float32 `[A, I/block_rows]`, out; None for bf16.
        scale_format: `FLOAT32`, `UE8M0`, or None for bf16.
    """
    width, columns = act.shape[1], x.shape[1]
    quantise = scale_format is not None
    step = GROUP if quantise else 64
    weights = TensorDescriptor.from_tensor(w13.view(-1, columns), [block_rows, step])
    _gather_up_kernel[(triton.cdiv(width, block_rows), tiles.shape[0])](
        x, x if x_scales is None else x_scales, tiles, members, weights, w13 if w13_scales is None else w13_scales,
        act, act if act_scales is None else act_scales,
        COLUMNS=columns, WIDTH=width, TILE=members.shape[1], ROWS=block_rows, STEP=step, GROUP=GROUP,
        STAGES=stages, QUANTISE=quantise, POWER_OF_TWO=scale_format is ScaleFormat.UE8M0, num_warps=warps, **pdl_flags(),
    )  # fmt: skip
