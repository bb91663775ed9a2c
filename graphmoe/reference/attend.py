"""Twin of `kernels/attend.py`."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *, scale: float, out: Tensor) -> None:
    """Softmax attention in float32 of each row's query over its positions `0..positions[b]`. See `graphmoe.kernels.attend`."""
    batch, q_heads, _ = q.shape
    _, kv_heads, length, value_dim = values.shape
    unseen = torch.arange(length, device=q.device) > positions[:, None]
    query = q.float().view(batch, kv_heads, q_heads // kv_heads, -1)
    scores = (query @ keys.float().mT * scale).masked_fill(unseen[:, None, None], float("-inf"))
    seen = values.float().masked_fill(unseen[:, None, :, None], 0.0)  # 0 * NaN is NaN
    out.copy_((scores.softmax(-1) @ seen).view(batch, q_heads, value_dim))
