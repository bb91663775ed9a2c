"""Twin of `kernels/stage.py`."""

from __future__ import annotations

import torch
from torch import Tensor


def stage(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, x_out: Tensor, ids_out: Tensor, weights_out: Tensor) -> None:
    """Copy `t` tokens into static buffers of `T >= t` and route the tail nowhere. See `graphmoe.kernels.stage`."""
    tokens = x.shape[0]
    x_out[:tokens].copy_(x)
    weights_out[:tokens].copy_(topk_weights)
    # Narrowing an int64 id could wrap into a live expert: whatever int32 cannot hold is a sentinel already.
    ids_out[:tokens].copy_(torch.where((topk_ids < 0) | (topk_ids > torch.iinfo(torch.int32).max), -1, topk_ids))
    ids_out[tokens:] = -1
