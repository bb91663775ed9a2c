"""Twin of `kernels/route.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.layout import RowLayout


def route(topk_ids: Tensor, layout: RowLayout, *, distinct: bool, row_of: Tensor, groups: Tensor, flags: Tensor) -> None:
    """Give every assignment its row. See `graphmoe.kernels.route`."""
    experts = layout.num_experts
    ids = topk_ids.long()
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    broken = torch.zeros_like(ids, dtype=torch.bool)
    if distinct:
        same = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] < experts)
        broken = same.sum(-1) > 1
    live = (ids < experts) & ~broken
    flat = torch.where(live, ids, experts).flatten()
    hot = torch.nn.functional.one_hot(flat, experts + 1)
    counts = hot.sum(0)[:experts]
    rank = (hot.cumsum(0) - hot).gather(1, flat[:, None])[:, 0]

    if layout.kind == "masked":
        starts = torch.arange(experts, device=ids.device) * layout.segment_rows
        groups.copy_(counts)
    else:
        aligned = (counts + layout.align - 1) // layout.align * layout.align
        starts = aligned.cumsum(0) - aligned
        if layout.kind == "psum":
            groups.copy_(starts + counts)

    rows = torch.nn.functional.pad(starts, (0, 1))[flat] + rank
    dead = torch.where(broken.flatten(), -2, -1)
    row_of.copy_(torch.where(live.flatten(), rows, dead).view_as(row_of))
    if layout.kind == "compact":
        groups.fill_(-1)
        groups[rows[live.flatten()]] = flat[live.flatten()].to(torch.int32)
    flags[0] |= broken.any().to(torch.int32)
