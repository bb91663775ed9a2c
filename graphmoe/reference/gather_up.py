"""Twin of `kernels/gather_up.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.formats import ScaleFormat, fp8_block, ue8m0
from graphmoe.reference.expert import rows_of, weight_of


def gather_up(
    x: Tensor,
    x_scales: Tensor | None,
    tiles: Tensor,
    members: Tensor,
    w13: Tensor,
    w13_scales: Tensor | None,
    *,
    block_rows: int,
    stages: int,
    warps: int,
    act: Tensor,
    act_scales: Tensor | None,
    scale_format: ScaleFormat | None,
) -> None:
    """SwiGLU of every live position; `stages` and `warps` mean nothing here. See `graphmoe.kernels.gather_up`."""
    quantise = fp8_block.quantize_rows if scale_format is ScaleFormat.FLOAT32 else ue8m0.quantize_rows
    for number, (expert, first, count) in enumerate(tiles.tolist()):
        if count == 0:
            continue
        token = members[number, :count].long()
        gate, up = (rows_of(x, x_scales, token) @ weight_of(w13, w13_scales, expert).T).chunk(2, dim=-1)
        values, live = torch.nn.functional.silu(gate) * up, slice(first, first + count)
        if act_scales is None:
            act[live] = values.to(act.dtype)
        else:
            payload, scale = quantise(values, group=block_rows)
            act.view(torch.uint8)[live] = payload.view(torch.uint8)
            act_scales[live] = scale
