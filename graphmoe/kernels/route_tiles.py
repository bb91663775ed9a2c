"""Route for `gathered`: positions in expert order, tiles of one expert's positions, every promise about ids checked, and every token quantised.

topk_ids int32 [T, K]  static     row_of  int32 [T, K]     arena: position (by expert, then token, then slot), -1 not on this rank, -2 dropped
x        bf16  [T, H]  static     tiles   int32 [N, 3]     arena: expert, first position, positions; 0 positions on the tail
x_rows   e4m3  [T, H]  arena      members int32 [N, TILE]  arena: tokens of a tile's positions; slots beyond them are not written
x_scales f32 [T, H/128] arena     flags   int32 [1]        arena: set to 1 by a broken promise, never cleared here

One program an expert, one for what lands nowhere, and the rest quantise tokens; none waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.formats import BLOCK as GROUP
from graphmoe.formats import ScaleFormat
from graphmoe.kernels.ids import block_of, load_ids, named_twice, named_twice_of
from graphmoe.kernels.pdl import pdl_flags, wait_and_signal
from graphmoe.kernels.quantise import quantise_groups

_BLOCK = 2048
_WARPS, _MANY_WARPS = 8, 16
_GROUPS = 16


@triton.jit
def _place_assignments(
    topk_ids, row_of, members, tiles, flags, expert, tokens, tile_count,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr,
    TILE: tl.constexpr, DISTINCT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], dtype=tl.int32)
    broken = tl.zeros([BLOCK // SLOTS, SLOTS], dtype=tl.int32)
    for first in range(0, tokens, BLOCK // SLOTS):
        _, ids, _ = load_ids(topk_ids, first, tokens, TOP_K, SLOTS, EXPERTS, BLOCK)
        twice = named_twice(ids, EXPERTS, DISTINCT)
        counts += tl.histogram(tl.reshape(ids, [BLOCK]), BINS, mask=tl.reshape((ids < EXPERTS) & (twice == 0), [BLOCK]))
        broken = broken | twice.to(tl.int32)

    own = tl.sum(tl.where(bins == expert, counts, 0))
    start = tl.sum(tl.where(bins < expert, counts, 0))
    first_tile = tl.sum(tl.where(bins < expert, (counts + TILE - 1) // TILE, 0))
    lanes = tl.arange(0, BLOCK)
    if expert < EXPERTS:
        own_tiles = (own + TILE - 1) // TILE
        for chunk in range(0, own_tiles, BLOCK):
            offset = chunk + lanes
            at = tiles + (first_tile + offset) * 3
            mask = offset < own_tiles
            tl.store(at, tl.full([BLOCK], 0, tl.int32) + expert, mask=mask)
            tl.store(at + 1, start + offset * TILE, mask=mask)
            tl.store(at + 2, tl.minimum(own - offset * TILE, TILE), mask=mask)
    else:
        for chunk in range(first_tile, tile_count, BLOCK):
            offset = chunk + lanes
            tl.store(tiles + offset * 3 + 2, tl.full([BLOCK], 0, tl.int32), mask=offset < tile_count)
        if DISTINCT:
            if tl.max(tl.max(broken, axis=1), axis=0) > 0:
                tl.store(flags, 1)

    before = 0
    for first in range(0, tokens, BLOCK // SLOTS):
        index, ids, inside = load_ids(topk_ids, first, tokens, TOP_K, SLOTS, EXPERTS, BLOCK)
        mine = (ids == expert) & inside
        if expert < EXPERTS:
            twice = named_twice_of(mine, DISTINCT)
            placed = tl.reshape((mine & (twice == 0)).to(tl.int32), [BLOCK])
            rank = tl.reshape(before + tl.cumsum(placed, axis=0) - 1, mine.shape)
            tl.store(row_of + index, tl.where(twice, -2, start + rank), mask=mine)
            tl.store(members + first_tile * TILE + rank, index // TOP_K, mask=mine & (twice == 0))
            before += tl.sum(placed)
        else:
            tl.store(row_of + index, tl.full(mine.shape, -1, tl.int32), mask=mine)


@triton.jit
def _quantise_token(
    x, x_rows, x_scales, program, COLUMNS: tl.constexpr, POWER_OF_TWO: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr
):
    token = (program // CHUNKS).to(tl.int64)
    group = program % CHUNKS * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < COLUMNS
    values = tl.load(x + token * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
    payload, scale = quantise_groups(values, POWER_OF_TWO)
    tl.store(x_rows + token * COLUMNS + column, payload, mask=inside)
    tl.store(x_scales + token * (COLUMNS // GROUP) + group, scale, mask=group < COLUMNS // GROUP)


@triton.jit(do_not_specialize=["tokens", "tile_count"])
def _route_tiles_kernel(
    topk_ids, x, row_of, members, tiles, x_rows, x_scales, flags, tokens, tile_count,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr,
    TILE: tl.constexpr, DISTINCT: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, POWER_OF_TWO: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_signal(PDL)
    program = tl.program_id(0)
    if program <= EXPERTS:
        _place_assignments(topk_ids, row_of, members, tiles, flags, program, tokens, tile_count, TOP_K, SLOTS, EXPERTS, BINS, TILE, DISTINCT, BLOCK)
    else:
        _quantise_token(x, x_rows, x_scales, program - EXPERTS - 1, COLUMNS, POWER_OF_TWO, CHUNKS, GROUPS, GROUP)


def route_tiles(
    topk_ids: Tensor,
    x: Tensor,
    *,
    experts: int,
    distinct: bool,
    row_of: Tensor,
    tiles: Tensor,
    members: Tensor,
    x_rows: Tensor | None,
    x_scales: Tensor | None,
    scale_format: ScaleFormat | None,
    flags: Tensor,
) -> None:
    """Give every assignment its position and every expert its tiles; quantise the tokens where the format is FP8. One launch, no allocation.

    Args:
        topk_ids: int32 `[T, K]`; ids outside `[0, experts)` land nowhere.
        x: bf16 `[T, H]`.
        experts: experts on this rank.
        distinct: the promise that a token names an expert once; an expert that a token names twice gets no position of that token
            (`row_of` -2) and the flag is set.
        row_of: int32 `[T, K]`, out.
        tiles: int32 `[N, 3]`, out; `N` holds the tiles of any routing.
        members: int32 `[N, tile]`, out; written where there is a live assignment.
        x_rows: e4m3 `[T, H]`, out; None for bf16, as are the scales and their format.
        x_scales: float32 `[T, H/128]`, out.
        scale_format: `FLOAT32` or `UE8M0`.
        flags: int32 `[1]`, out; sticky.
    """
    tokens, columns = x.shape
    top_k = topk_ids.shape[1]
    slots, block = block_of(tokens, top_k, _BLOCK)
    chunks = triton.cdiv(columns, _GROUPS * GROUP)
    quantisers = 0 if x_rows is None else tokens * chunks
    _route_tiles_kernel[(experts + 1 + quantisers,)](
        topk_ids, x, row_of, members, tiles, x if x_rows is None else x_rows, x if x_scales is None else x_scales, flags, tokens, tiles.shape[0],
        TOP_K=top_k, SLOTS=slots, EXPERTS=experts, BINS=max(16, triton.next_power_of_2(experts)),
        TILE=members.shape[1], DISTINCT=distinct, BLOCK=block,
        COLUMNS=columns, POWER_OF_TWO=scale_format is ScaleFormat.UE8M0, CHUNKS=chunks, GROUPS=_GROUPS, GROUP=GROUP,
        num_warps=_MANY_WARPS if block >= _BLOCK else _WARPS, **pdl_flags(),
    )  # fmt: skip
