"""Twin of `kernels/count.py`."""

from __future__ import annotations

import torch
from torch import Tensor


def count(topk_ids: Tensor, *, distinct: bool, block_counts: Tensor, flags: Tensor) -> None:
    """Count each block of tokens by itself. See `graphmoe.kernels.count`."""
    blocks, experts = block_counts.shape
    block_tokens = -(-topk_ids.shape[0] // blocks)
    ids, broken = clean(topk_ids, experts, distinct)
    ids = torch.where(broken, experts, ids)
    for block in range(blocks):
        own = ids[block * block_tokens : (block + 1) * block_tokens].flatten()
        block_counts[block] = torch.bincount(own, minlength=experts + 1)[:experts]
    flags[0] |= broken.any().to(torch.int32)


def clean(topk_ids: Tensor, experts: int, distinct: bool) -> tuple[Tensor, Tensor]:
    """int64 `[T, K]` ids with `experts` for every sentinel, and which of them break the promise that a token names an expert once."""
    ids = topk_ids.long()
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    if not distinct:
        return ids, torch.zeros_like(ids, dtype=torch.bool)
    same = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] < experts)
    return ids, same.sum(-1) > 1
