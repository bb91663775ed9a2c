"""Twin of `kernels/gemv_down.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.reference.expert import weight_of


def gemv_down(
    act: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w2: Tensor,
    w2_scales: Tensor | None,
    *,
    scale: float,
    distinct: bool,
    block_rows: int,
    step: int,
    slots: int,
    warps: int,
    out: Tensor,
    flags: Tensor,
) -> None:
    """The second GEMM and the combine; the launch's sizes mean nothing here. See `graphmoe.kernels.gemv_down`."""
    experts, top_k = w2.shape[0], topk_ids.shape[1]
    for token, ids in enumerate(topk_ids.tolist()):
        total = torch.zeros(out.shape[1], dtype=torch.float32, device=out.device)
        for slot, expert in enumerate(ids):
            if 0 <= expert < experts:
                total += topk_weights[token, slot] * (weight_of(w2, w2_scales, expert) @ act[token * top_k + slot].float())
        here = [expert for expert in ids if 0 <= expert < experts]
        if distinct and len(set(here)) < len(here):
            total.fill_(torch.nan)
            flags[0] = 1
        out[token] = (total * scale).to(out.dtype)
