"""Twin of `kernels/route.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.layout import RowLayout
from graphmoe.reference.count import clean


def route(topk_ids: Tensor, layout: RowLayout, *, distinct: bool, block_counts: Tensor, row_of: Tensor, groups: Tensor) -> None:
    """Give every assignment its row. See `graphmoe.kernels.route`."""
    experts = layout.num_experts
    ids, broken = clean(topk_ids, experts, distinct)
    live = (ids < experts) & ~broken
    flat = torch.where(live, ids, experts).flatten()
    hot = torch.nn.functional.one_hot(flat, experts + 1)
    rank = (hot.cumsum(0) - hot).gather(1, flat[:, None])[:, 0]
    counts = block_counts.long().sum(0)

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
