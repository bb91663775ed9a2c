"""Count: assignments of each expert in each block of tokens, and the check of every promise about ids. The first launch of a grouped route.

topk_ids     int32 [T, K]  static     block_counts int32 [B, E]  arena: of clean assignments, see `count`
flags        int32 [1]     arena: set to 1 by a broken promise, never cleared here
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.kernels.ids import block_of, load_ids, named_twice
from graphmoe.kernels.pdl import pdl_flags, wait_and_signal

_BLOCK = 1024


# What changes with the bucket is no constant, so that a ladder of buckets compiles few kernels.
@triton.jit(do_not_specialize=["tokens", "block_tokens"])
def _count_kernel(
    topk_ids, block_counts, flags, tokens, block_tokens,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr,
    DISTINCT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_signal(PDL)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], dtype=tl.int32)
    broken = tl.zeros([BLOCK // SLOTS, SLOTS], dtype=tl.int32)
    start = tl.program_id(0) * block_tokens
    end = tl.minimum(start + block_tokens, tokens)
    for first in range(start, end, BLOCK // SLOTS):
        _, ids, _ = load_ids(topk_ids, first, end, TOP_K, SLOTS, EXPERTS, BLOCK)
        twice = named_twice(ids, EXPERTS, DISTINCT)
        counts += tl.histogram(tl.reshape(ids, [BLOCK]), BINS, mask=tl.reshape((ids < EXPERTS) & (twice == 0), [BLOCK]))
        broken = broken | twice.to(tl.int32)
    tl.store(block_counts + tl.program_id(0) * EXPERTS + bins, counts, mask=bins < EXPERTS)
    if DISTINCT:
        if tl.max(tl.max(broken, axis=1), axis=0) > 0:
            tl.store(flags, 1)


def count(topk_ids: Tensor, *, distinct: bool, block_counts: Tensor, flags: Tensor) -> None:
    """Count each block of `ceil(T / B)` tokens by itself. One launch, no allocation.

    Args:
        topk_ids: int32 `[T, K]`; ids outside `[0, E)` are not counted.
        distinct: the promise that a token names an expert once. An expert that a token names twice is not counted for it, and the flag is set.
        block_counts: int32 `[B, E]`, out.
        flags: int32 `[1]`, out; sticky.
    """
    tokens, top_k = topk_ids.shape
    blocks, experts = block_counts.shape
    block_tokens = triton.cdiv(tokens, blocks)
    slots, block = block_of(block_tokens, top_k, _BLOCK)
    _count_kernel[(blocks,)](
        topk_ids, block_counts, flags, tokens, block_tokens,
        TOP_K=top_k, SLOTS=slots, EXPERTS=experts, BINS=max(16, triton.next_power_of_2(experts)),
        DISTINCT=distinct, BLOCK=block, **pdl_flags(),
    )  # fmt: skip
