"""Twin of `kernels/select_experts.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.router import Router

_TINY = 1e-20  # what DeepSeek's routers add to a sum of weights that may be 0


def select_experts(
    logits: Tensor, correction_bias: Tensor | None, router: Router, *, offset: int, experts: int, topk_ids: Tensor, topk_weights: Tensor
) -> None:
    """Each token's experts and weights, see `graphmoe.router.Router`. See `graphmoe.kernels.select_experts`."""
    values = logits.float()
    scores = values.softmax(-1) if router.scoring == "softmax" else values.sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias.float()
    bad = choice.isnan().any(-1, keepdim=True)
    if router.groups > 1:
        grouped = choice.unflatten(-1, (router.groups, router.group_size))
        best = grouped.topk(2, dim=-1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices[:, : router.top_groups]
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    values, chosen = choice.sort(dim=-1, descending=True, stable=True)
    ids, none = chosen[:, : router.top_k], values[:, : router.top_k] == float("-inf")
    weights = scores.gather(-1, ids).masked_fill(none, 0.0)
    if router.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    local = torch.where(bad, 0, ids) - offset
    topk_ids.copy_(torch.where((local < 0) | (local >= experts) | (none & ~bad), -1, local))
    topk_weights.copy_(torch.where(bad, torch.nan, weights))
