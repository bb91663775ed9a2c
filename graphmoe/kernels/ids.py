"""Device functions and sizes that the kernels over assignments share: reading ids, and finding what a token names twice."""

from __future__ import annotations

import triton
import triton.language as tl

_COMPARED = 1 << 15
"""Comparing every slot of a token with every other makes `BLOCK * SLOTS` pairs; so many at a time."""


@triton.jit
def load_ids(topk_ids, first, tokens, TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """The assignments of `BLOCK / SLOTS` tokens from token `first` on, `[BLOCK / SLOTS, SLOTS]` each: index `t * K + k`, clean id (EXPERTS for a
    sentinel), and whether there is such an assignment.
    """
    token = first + tl.arange(0, BLOCK // SLOTS)
    slot = tl.arange(0, SLOTS)
    index = token[:, None] * TOP_K + slot[None, :]
    inside = (token < tokens)[:, None] & (slot < TOP_K)[None, :]
    raw = tl.load(topk_ids + index, mask=inside, other=-1)
    return index, tl.where((raw >= 0) & (raw < EXPERTS), raw, EXPERTS), inside


@triton.jit
def named_twice(ids, EXPERTS: tl.constexpr, DISTINCT: tl.constexpr):
    """Which of a block's assignments name an expert that their token names twice; none where that is allowed."""
    if DISTINCT:
        same = tl.sum((ids[:, :, None] == ids[:, None, :]).to(tl.int32), axis=2)
        twice = (same > 1) & (ids < EXPERTS)
    else:
        twice = ids < 0
    return twice


@triton.jit
def named_twice_of(mine, DISTINCT: tl.constexpr):
    """`named_twice` among the assignments of one expert."""
    return mine & (tl.sum(mine.to(tl.int32), axis=1) > 1)[:, None] & DISTINCT


def block_of(tokens: int, top_k: int, most: int) -> tuple[int, int]:
    """K padded to a power of two, and assignments of that width that a program takes at a time."""
    slots = triton.next_power_of_2(top_k)
    return slots, max(slots, 16, min(most, triton.next_power_of_2(tokens) * slots, _COMPARED // slots))
