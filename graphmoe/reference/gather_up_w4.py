"""Twin of `kernels/gather_up_w4.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.formats import fp8_block
from graphmoe.formats.w4afp8 import dequantize_prepared
from graphmoe.reference.expert import rows_of


def gather_up_w4(
    x: Tensor,
    x_scales: Tensor,
    tiles: Tensor,
    members: Tensor,
    w13: Tensor,
    w13_scales: Tensor,
    *,
    block_rows: int,
    stages: int,
    warps: int,
    act: Tensor,
    act_scales: Tensor,
) -> None:
    """SwiGLU of every live position; `stages` and `warps` mean nothing here. See `graphmoe.kernels.gather_up_w4`."""
    for number, (expert, first, count) in enumerate(tiles.tolist()):
        if count == 0:
            continue
        token, live = members[number, :count].long(), slice(first, first + count)
        gate, up = (rows_of(x, x_scales, token) @ dequantize_prepared(w13[expert], w13_scales[expert]).T).chunk(2, dim=-1)
        values = torch.nn.functional.silu(gate) * up
        if act_scales.dim() == 0:
            payload = fp8_block.to_e4m3(torch.where(values.isfinite(), values / act_scales, torch.nan))
        else:
            payload, act_scales[live] = fp8_block.quantize_rows(values, group=block_rows)
        act.view(torch.uint8)[live] = payload.view(torch.uint8)
