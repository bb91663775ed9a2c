"""Twin of `kernels/gather_down.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.reference.expert import rows_of, weight_of


def gather_down(
    act: Tensor,
    act_scales: Tensor | None,
    tiles: Tensor,
    w2: Tensor,
    w2_scales: Tensor | None,
    *,
    tile: int,
    block_rows: int,
    stages: int,
    warps: int,
    rows: Tensor,
) -> None:
    """One row a live position; the launch's sizes mean nothing here. See `graphmoe.kernels.gather_down`."""
    for expert, first, count in tiles.tolist():
        if count:
            position = torch.arange(first, first + count, device=act.device)
            rows[position] = (rows_of(act, act_scales, position) @ weight_of(w2, w2_scales, expert).T).to(rows.dtype)
