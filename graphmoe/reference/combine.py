"""Twin of `kernels/combine.py`."""

from __future__ import annotations

import torch
from torch import Tensor


def combine(rows: Tensor, row_of: Tensor, topk_weights: Tensor, *, scale: float, out: Tensor) -> None:
    """Weighted sum of each token's expert rows, in slot order. See `graphmoe.kernels.combine`."""
    flat = rows.flatten(0, 1)
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for k in range(row_of.shape[1]):
        row = row_of[:, k].long()
        term = topk_weights[:, k, None] * flat[row.clamp(min=0)].float()
        total += torch.where((row >= 0)[:, None], term, 0.0)
        total[row == -2] = torch.nan
    out.copy_(total * scale)
