"""Gather-up for int4 weights: the first GEMM of `gathered_w4`, SwiGLU and the quantisation of its result in one launch.

x        e4m3 [T, H]          tokens, read through `members`    w        uint8 [E, 2I, H/2]     as `formats/w4afp8.prepare` packs them
x_scales f32 [T, H/128]       or []: one for all of them        w_scales bf16 [E, H/128, 2I]
tiles    int32 [N, 3]         members int32 [N, TILE]           see `kernels/route_tiles.py`
act      e4m3 [A, I]          arena, by position                act_scales f32 [A, I/ROWS]    or []: given, not computed

As `gather_up`, with two products a group of 128 columns: one for the low nibbles, one for the high ones.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from graphmoe.formats import BLOCK as GROUP
from graphmoe.kernels.pdl import pdl_flags, wait_and_signal
from graphmoe.kernels.quantise import quantise_groups
from graphmoe.kernels.w4 import high_codes, low_codes, quantise_to, sums_of, values_of


@triton.jit
def _gather_up_w4_kernel(
    x, x_scales, tiles, members, w, w_scales, act, act_scales,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, PER_TENSOR: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_signal(PDL)
    block, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.arange(0, TILE)
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    first = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    member = tl.load(members + tile * TILE + slot)
    if count == 0:
        return
    HALF: tl.constexpr = GROUP // 2
    groups: tl.constexpr = COLUMNS // GROUP
    row = block * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, HALF)
    first_row = expert.to(tl.int32) * (2 * WIDTH) + block * ROWS
    scale_at = w_scales + expert * (groups * 2 * WIDTH) + row
    token = tl.where(slot < count, member, 0).to(tl.int64)
    x_at = x + token[:, None] * COLUMNS + half[None, :]
    x_scale_at = x_scales + (0 if PER_TENSOR else token * groups)
    gate = tl.zeros([ROWS, TILE], dtype=tl.float32)
    up = tl.zeros([ROWS, TILE], dtype=tl.float32)
    for k in tl.range(0, groups, num_stages=STAGES):
        gate_tile = w.load([first_row, k * HALF])
        up_tile = w.load([first_row + WIDTH, k * HALF])
        low = tl.load(x_at + k * GROUP)
        high = tl.load(x_at + k * GROUP + HALF)
        scale = tl.load(x_scale_at + (slot * 0 if PER_TENSOR else k))
        gate_scale = tl.load(scale_at + k * (2 * WIDTH)).to(tl.float32)
        up_scale = tl.load(scale_at + k * (2 * WIDTH) + WIDTH).to(tl.float32)
        sums = sums_of(low) + sums_of(high)
        low, high = tl.trans(low), tl.trans(high)
        gate_product = tl.dot(high_codes(gate_tile), high, tl.dot(low_codes(gate_tile), low))
        gate += values_of(gate_product, sums) * (gate_scale[:, None] * scale[None, :])
        up_product = tl.dot(high_codes(up_tile), high, tl.dot(low_codes(up_tile), low))
        up += values_of(up_product, sums) * (up_scale[:, None] * scale[None, :])
    values = tl.trans(gate / (1.0 + tl.exp(-gate)) * up)
    position = first + slot
    live = slot < count
    act_at = act + position.to(tl.int64)[:, None] * WIDTH + row[None, :]
    if PER_TENSOR:
        tl.store(act_at, quantise_to(values, tl.load(act_scales)), mask=live[:, None])
    else:
        payload, act_scale = quantise_groups(values, False)
        tl.store(act_at, payload, mask=live[:, None])
        tl.store(act_scales + position * (WIDTH // ROWS) + block, act_scale, mask=live)


def gather_up_w4(
    x: Tensor,
    x_scales: Tensor,
    tiles: Tensor,
    members: Tensor,
    w13: Tensor,
    w13_scales: Tensor,
    *,
    block_rows: int,
    stages: int,
    warps: int,
    act: Tensor,
    act_scales: Tensor,
) -> None:
    """`act[p] = silu(x[token of p] @ gate.T) * (x[token of p] @ up.T)` of every live position. One launch, no allocation.

    Args:
        x: e4m3 `[T, H]`.
        x_scales: float32 `[T, H/128]`, or `[]`: one scale for all tokens, and `act_scales` is one, too.
        tiles: int32 `[N, 3]`.
        members: int32 `[N, tile]`; tile is 16, 32 or 64.
        w13: uint8 `[E, 2I, H/2]`, prepared.
        w13_scales: bf16 `[E, H/128, 2I]`.
        block_rows: gate rows (and up rows) a program, 128 or 64.
        stages: depth of the load pipeline.
        warps: 4 or 8.
        act: e4m3 `[A, I]`, out.
        act_scales: float32 `[A, I/block_rows]`, out; or `[]`, which is read: `act` is rounded with it.
    """
    width, columns = act.shape[1], x.shape[1]
    weights = TensorDescriptor.from_tensor(w13.view(-1, columns // 2), [block_rows, GROUP // 2])
    _gather_up_w4_kernel[(width // block_rows, tiles.shape[0])](
        x, x_scales, tiles, members, weights, w13_scales, act, act_scales,
        COLUMNS=columns, WIDTH=width, TILE=members.shape[1], ROWS=block_rows, GROUP=GROUP,
        PER_TENSOR=x_scales.dim() == 0, STAGES=stages, num_warps=warps, **pdl_flags(),
    )  # fmt: skip
