"""Route: a row for every assignment, the groups that the GEMM reads, and the check of every promise about ids.

topk_ids int32 [T, K]  static      row_of int32 [T, K]  arena: row, -1 not on this rank, -2 dropped for a broken promise
groups   int32 [...]   arena, see `graphmoe.layout.RowLayout`      flags int32 [1]  arena: set to 1 by a broken promise, never cleared here

One program an expert, and one more for what lands nowhere. Each counts all experts (no atomics), so an expert's first row and the order of its rows
(by token, then slot) are the same in every replay.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.kernels.pdl import pdl_flags, wait_and_signal
from graphmoe.layout import RowLayout

_BLOCK = 4096


@triton.jit
def load_ids(
    topk_ids,
    first,
    tokens,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    DISTINCT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The assignments of `BLOCK / SLOTS` tokens from token `first` on, `[BLOCK]` each: index `t * K + k`, clean id (EXPERTS for a sentinel), whether
    there is such an assignment, and whether its token names its expert twice.
    """
    token = first + tl.arange(0, BLOCK // SLOTS)
    slot = tl.arange(0, SLOTS)
    index = token[:, None] * TOP_K + slot[None, :]
    inside = (token < tokens)[:, None] & (slot < TOP_K)[None, :]
    raw = tl.load(topk_ids + index, mask=inside, other=-1)
    ids = tl.where((raw >= 0) & (raw < EXPERTS), raw, EXPERTS)
    if DISTINCT:
        same = tl.sum((ids[:, :, None] == ids[:, None, :]).to(tl.int32), axis=2)
        twice = (same > 1) & (ids < EXPERTS)
    else:
        twice = ids < 0
    return tl.reshape(index, [BLOCK]), tl.reshape(ids, [BLOCK]), tl.reshape(inside, [BLOCK]), tl.reshape(twice, [BLOCK])


# What changes with the bucket is no constant, so that a ladder of buckets compiles few kernels.
@triton.jit(do_not_specialize=["tokens", "segment_rows"])
def _route_kernel(
    topk_ids, row_of, groups, flags, tokens, segment_rows,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr,
    KIND: tl.constexpr, ALIGN: tl.constexpr, DISTINCT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_signal(PDL)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], dtype=tl.int32)
    broken = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, tokens, BLOCK // SLOTS):
        _, ids, _, twice = load_ids(topk_ids, first, tokens, TOP_K, SLOTS, EXPERTS, DISTINCT, BLOCK)
        live = (ids < EXPERTS) & (twice == 0)
        counts += tl.histogram(ids, BINS, mask=live)
        broken = broken | twice.to(tl.int32)

    own = tl.sum(tl.where(bins == expert, counts, 0))
    padded = (counts + ALIGN - 1) // ALIGN * ALIGN
    start = expert * segment_rows if KIND == "masked" else tl.sum(tl.where(bins < expert, padded, 0))

    if expert < EXPERTS:
        if KIND == "masked":
            tl.store(groups + expert, own)
        if KIND == "psum":
            tl.store(groups + expert, start + own)
        if KIND == "compact":
            padded_own = (own + ALIGN - 1) // ALIGN * ALIGN
            for chunk in range(0, padded_own, BLOCK):
                offset = chunk + tl.arange(0, BLOCK)
                tl.store(groups + start + offset, tl.where(offset < own, expert, -1), mask=offset < padded_own)
    else:
        if KIND == "compact":
            for chunk in range(start, segment_rows, BLOCK):
                offset = chunk + tl.arange(0, BLOCK)
                tl.store(groups + offset, tl.full([BLOCK], -1, tl.int32), mask=offset < segment_rows)
        if DISTINCT:
            if tl.max(broken) > 0:
                tl.store(flags, 1)

    before = 0
    for first in range(0, tokens, BLOCK // SLOTS):
        index, ids, inside, twice = load_ids(topk_ids, first, tokens, TOP_K, SLOTS, EXPERTS, DISTINCT, BLOCK)
        mine = (ids == expert) & inside
        if expert < EXPERTS:
            placed = (mine & (twice == 0)).to(tl.int32)
            row = start + before + tl.cumsum(placed, axis=0) - 1
            tl.store(row_of + index, tl.where(twice, -2, row), mask=mine)
            before += tl.sum(placed)
        else:
            tl.store(row_of + index, tl.full([BLOCK], -1, tl.int32), mask=mine)


def route(topk_ids: Tensor, layout: RowLayout, *, distinct: bool, row_of: Tensor, groups: Tensor, flags: Tensor) -> None:
    """Give every assignment its row. One launch, no allocation.

    Args:
        topk_ids: int32 `[T, K]`; ids outside `[0, E)` land nowhere.
        layout: the row layout; its bound holds every routing.
        distinct: the promise that a token names an expert once. An expert that a token names twice gets no row of that token
            (`row_of` -2, which `combine` turns into NaN) and the flag is set.
        row_of: int32 `[T, K]`, out.
        groups: int32 `[layout.group_entries]`, out; every entry is written.
        flags: int32 `[1]`, out; sticky.
    """
    tokens, top_k = topk_ids.shape
    slots, block = block_of(tokens, top_k, _BLOCK)
    _route_kernel[(layout.num_experts + 1,)](
        topk_ids, row_of, groups, flags, tokens, layout.segment_rows,
        TOP_K=top_k, SLOTS=slots, EXPERTS=layout.num_experts, BINS=max(16, triton.next_power_of_2(layout.num_experts)),
        KIND=layout.kind, ALIGN=layout.align, DISTINCT=distinct, BLOCK=block,
        num_warps=warps_of(block), **pdl_flags(),
    )  # fmt: skip


def block_of(tokens: int, top_k: int, most: int) -> tuple[int, int]:
    """K padded to a power of two, and assignments of that width that a program takes at a time."""
    slots = triton.next_power_of_2(top_k)
    return slots, max(slots, 16, min(most, triton.next_power_of_2(tokens) * slots))


def warps_of(block: int) -> int:
    """Warps for a block of assignments: eight assignments a thread, 4 to 32 warps."""
    return min(32, max(4, block // 256))
