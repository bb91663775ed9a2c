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

from graphmoe.layout import RowLayout

_BLOCK = 1024


@triton.jit
def _load_ids(topk_ids, index, ASSIGNMENTS: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, DISTINCT: tl.constexpr):
    """Clean ids of assignments `index`: the expert, or EXPERTS for a sentinel; and whether the token names it twice."""
    inside = index < ASSIGNMENTS
    raw = tl.load(topk_ids + index, mask=inside, other=-1)
    ids = tl.where((raw >= 0) & (raw < EXPERTS), raw, EXPERTS)
    twice = tl.zeros_like(ids)
    if DISTINCT and TOP_K > 1:
        first_slot = index // TOP_K * TOP_K
        for k in range(TOP_K):
            other = tl.load(topk_ids + first_slot + k, mask=inside, other=-1)
            twice += ((other == raw) & (ids < EXPERTS)).to(tl.int32)
    return ids, twice > 1


@triton.jit
def _route_kernel(
    topk_ids, row_of, groups, flags,
    ASSIGNMENTS: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr,
    KIND: tl.constexpr, ALIGN: tl.constexpr, SEGMENT_ROWS: tl.constexpr, DISTINCT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], dtype=tl.int32)
    broken = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, ASSIGNMENTS, BLOCK):
        ids, twice = _load_ids(topk_ids, first + tl.arange(0, BLOCK), ASSIGNMENTS, TOP_K, EXPERTS, DISTINCT)
        live = (ids < EXPERTS) & (twice == 0)
        counts += tl.histogram(ids, BINS, mask=live)
        broken = broken | twice.to(tl.int32)

    own = tl.sum(tl.where(bins == expert, counts, 0))
    padded = (counts + ALIGN - 1) // ALIGN * ALIGN
    start = expert * SEGMENT_ROWS if KIND == "masked" else tl.sum(tl.where(bins < expert, padded, 0))

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
            for chunk in range(start, SEGMENT_ROWS, BLOCK):
                offset = chunk + tl.arange(0, BLOCK)
                tl.store(groups + offset, tl.full([BLOCK], -1, tl.int32), mask=offset < SEGMENT_ROWS)
        if DISTINCT:
            if tl.max(broken) > 0:
                tl.store(flags, 1)

    before = 0
    for first in range(0, ASSIGNMENTS, BLOCK):
        index = first + tl.arange(0, BLOCK)
        ids, twice = _load_ids(topk_ids, index, ASSIGNMENTS, TOP_K, EXPERTS, DISTINCT)
        mine = (ids == expert) & (index < ASSIGNMENTS)
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
    assignments = topk_ids.numel()
    block = min(_BLOCK, max(16, triton.next_power_of_2(assignments)))
    _route_kernel[(layout.num_experts + 1,)](
        topk_ids, row_of, groups, flags,
        ASSIGNMENTS=assignments, TOP_K=topk_ids.shape[1], EXPERTS=layout.num_experts, BINS=max(16, triton.next_power_of_2(layout.num_experts)),
        KIND=layout.kind, ALIGN=layout.align, SEGMENT_ROWS=layout.segment_rows, DISTINCT=distinct, BLOCK=block,
    )  # fmt: skip
