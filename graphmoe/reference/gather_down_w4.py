"""Twin of `kernels/gather_down_w4.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.formats.w4afp8 import dequantize_prepared
from graphmoe.reference.expert import rows_of


def gather_down_w4(
    act: Tensor,
    act_scales: Tensor,
    tiles: Tensor,
    w2: Tensor,
    w2_scales: Tensor,
    *,
    tile: int,
    block_rows: int,
    stages: int,
    warps: int,
    rows: Tensor,
) -> None:
    """One row a live position; the launch's sizes mean nothing here. See `graphmoe.kernels.gather_down_w4`."""
    for expert, first, count in tiles.tolist():
        if count:
            position = torch.arange(first, first + count, device=act.device)
            rows[position] = (rows_of(act, act_scales, position) @ dequantize_prepared(w2[expert], w2_scales[expert]).T).to(rows.dtype)
