"""Attention of a decode step: our kernel on a GPU, its twin on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe import reference


def attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Softmax attention of one query token a row over that row's positions `0..positions[b]`, the same bits whatever shares the batch.

    Args:
        query: `[B, Hq, Dk]`.
        keys: `[B, Hkv, L, Dk]`, Hkv dividing Hq.
        values: `[B, Hkv, L, Dv]`.
        positions: int64 `[B]`.
        scale: of the scores.

    Returns:
        `[B, Hq, Dv]`.
    """
    batch, heads, _ = query.shape
    value_dim = values.shape[3]
    out = query.new_empty(batch, heads, value_dim)
    if not query.is_cuda:
        reference.attend(query, keys, values, positions, scale=scale, out=out)
        return out
    from graphmoe.kernels.attend import attend as kernel
    from graphmoe.kernels.attend import splits

    pieces = splits(keys.shape[2])
    partial = torch.empty(batch, heads, pieces, value_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(batch, heads, pieces, dtype=torch.float32, device=query.device)
    kernel(query, keys, values, positions, scale=scale, partial=partial, lse=lse, out=out)
    return out
