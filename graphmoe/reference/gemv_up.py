"""Twin of `kernels/gemv_up.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.reference.expert import weight_of


def gemv_up(
    x: Tensor, topk_ids: Tensor, w13: Tensor, w13_scales: Tensor | None, *, block_rows: int, step: int, stages: int, warps: int, act: Tensor
) -> None:
    """SwiGLU of every assignment; the launch's sizes mean nothing here. See `graphmoe.kernels.gemv_up`."""
    for assignment, expert in enumerate(topk_ids.flatten().tolist()):
        if 0 <= expert < w13.shape[0]:
            gate, up = (weight_of(w13, w13_scales, expert) @ x[assignment // topk_ids.shape[1]].float()).chunk(2)
            act[assignment] = (torch.nn.functional.silu(gate) * up).to(act.dtype)
