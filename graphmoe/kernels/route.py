"""Route: a row for every assignment, and the groups that the GEMM reads.

topk_ids int32 [T, K]  static    row_of  int32 [T, K]  arena: row, -1 not on this rank, -2 dropped for a broken promise
block_counts int32 [B, E] arena  groups  int32 [...]   arena, see `graphmoe.layout.RowLayout`

A program a block of tokens, which places them behind what earlier blocks count; and further programs for the groups. No atomics, so an expert's first
row and the order of its rows (by token, then slot) are the same in every replay.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.kernels.ids import block_of, load_ids, named_twice
from graphmoe.kernels.pdl import pdl_flags, wait_and_signal
from graphmoe.layout import RowLayout

_BLOCK = 128
"""Assignments that are ranked at a time, each against every other."""
_COUNTED = 4096
_FILLED = 1024


@triton.jit
def _place_block(
    topk_ids, row_of, next_row, start, end,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr, DISTINCT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    for first in range(start, end, BLOCK // SLOTS):
        index, ids, inside = load_ids(topk_ids, first, end, TOP_K, SLOTS, EXPERTS, BLOCK)
        twice = tl.reshape(named_twice(ids, EXPERTS, DISTINCT), [BLOCK])
        ids = tl.reshape(ids, [BLOCK])
        live = (ids < EXPERTS) & (twice == 0)
        earlier = (ids[:, None] == ids[None, :]) & live[None, :] & (lane[None, :] < lane[:, None])
        row = tl.gather(next_row, tl.minimum(ids, BINS - 1), 0) + tl.sum(earlier.to(tl.int32), axis=1)
        row = tl.where(live, row, tl.where(twice, -2, -1))
        tl.store(row_of + tl.reshape(index, [BLOCK]), row, mask=tl.reshape(inside, [BLOCK]))
        next_row += tl.histogram(ids, BINS, mask=live)


# What changes with the bucket is no constant, so that a ladder of buckets compiles few kernels.
@triton.jit(do_not_specialize=["tokens", "blocks", "block_tokens", "segment_rows"])
def _route_kernel(
    topk_ids, row_of, groups, block_counts, tokens, blocks, block_tokens, segment_rows,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr, COUNTED: tl.constexpr,
    KIND: tl.constexpr, ALIGN: tl.constexpr, DISTINCT: tl.constexpr, BLOCK: tl.constexpr, FILLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_signal(PDL)
    program = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], dtype=tl.int32)
    before = tl.zeros([BINS], dtype=tl.int32)
    for first in range(0, blocks, COUNTED):
        block = first + tl.arange(0, COUNTED)
        mask = (block < blocks)[:, None] & (bins < EXPERTS)[None, :]
        counted = tl.load(block_counts + block[:, None] * EXPERTS + bins[None, :], mask=mask, other=0)
        counts += tl.sum(counted, axis=0)
        before += tl.sum(tl.where((block < program)[:, None], counted, 0), axis=0)
    padded = (counts + ALIGN - 1) // ALIGN * ALIGN
    starts = bins * segment_rows if KIND == "masked" else tl.cumsum(padded, axis=0) - padded

    if program < blocks:
        start = program * block_tokens
        end = tl.minimum(start + block_tokens, tokens)
        _place_block(topk_ids, row_of, starts + before, start, end, TOP_K, SLOTS, EXPERTS, BINS, DISTINCT, BLOCK)
    elif KIND == "masked":
        tl.store(groups + bins, counts, mask=bins < EXPERTS)
    elif KIND == "psum":
        tl.store(groups + bins, starts + counts, mask=bins < EXPERTS)
    else:
        # An expert's rows and the padding behind them; the last program fills the tail of the bound.
        expert = program - blocks
        own = tl.sum(tl.where(bins == expert, counts, 0))
        start = tl.sum(tl.where(bins < expert, padded, 0))
        end = tl.where(expert < EXPERTS, start + (own + ALIGN - 1) // ALIGN * ALIGN, segment_rows)
        for first in range(start, end, FILLED):
            row = first + tl.arange(0, FILLED)
            tl.store(groups + row, tl.where(row < start + own, expert, -1), mask=row < end)


def route(topk_ids: Tensor, layout: RowLayout, *, distinct: bool, block_counts: Tensor, row_of: Tensor, groups: Tensor) -> None:
    """Give every assignment its row. One launch, no allocation.

    Args:
        topk_ids: int32 `[T, K]`; ids outside `[0, E)` land nowhere.
        layout: the row layout; its bound holds every routing.
        distinct: the promise that a token names an expert once. An expert that a token names twice gets no row of that token
            (`row_of` -2, which `combine` turns into NaN).
        block_counts: int32 `[B, E]`, from `count` of the same ids.
        row_of: int32 `[T, K]`, out.
        groups: int32 `[layout.group_entries]`, out; every entry is written.
    """
    tokens, top_k = topk_ids.shape
    blocks = block_counts.shape[0]
    block_tokens = triton.cdiv(tokens, blocks)
    slots, block = block_of(block_tokens, top_k, _BLOCK)
    bins = max(16, triton.next_power_of_2(layout.num_experts))
    fillers = layout.num_experts + 1 if layout.kind == "compact" else 1
    _route_kernel[(blocks + fillers,)](
        topk_ids, row_of, groups, block_counts, tokens, blocks, block_tokens, layout.segment_rows,
        TOP_K=top_k, SLOTS=slots, EXPERTS=layout.num_experts, BINS=bins, COUNTED=max(1, _COUNTED // bins),
        KIND=layout.kind, ALIGN=layout.align, DISTINCT=distinct, BLOCK=block, FILLED=_FILLED, **pdl_flags(),
    )  # fmt: skip
