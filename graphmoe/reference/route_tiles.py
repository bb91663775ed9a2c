"""Twin of `kernels/route_tiles.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.formats import ScaleFormat
from graphmoe.layout import RowLayout
from graphmoe.reference.count import count
from graphmoe.reference.route import route
from graphmoe.reference.scatter import write_rows


def route_tiles(
    topk_ids: Tensor,
    x: Tensor,
    *,
    experts: int,
    distinct: bool,
    row_of: Tensor,
    tiles: Tensor,
    members: Tensor,
    x_rows: Tensor | None,
    x_scales: Tensor | None,
    scale_format: ScaleFormat | None,
    flags: Tensor,
) -> None:
    """Positions, tiles and quantised tokens. See `graphmoe.kernels.route_tiles`."""
    tokens, top_k = topk_ids.shape
    tile = members.shape[1]
    ends = torch.empty(experts, dtype=torch.int32, device=topk_ids.device)
    # Positions in expert order are the rows of a contiguous layout whose segments are aligned to one row.
    counts = torch.empty(1, experts, dtype=torch.int32, device=topk_ids.device)
    count(topk_ids, distinct=distinct, block_counts=counts, flags=flags)
    route(topk_ids, RowLayout("psum", experts, 1, 1, tokens * top_k), distinct=distinct, block_counts=counts, row_of=row_of, groups=ends)
    live = row_of.flatten() >= 0
    positions = row_of.flatten()[live].long()
    token_of = torch.zeros(tokens * top_k, dtype=torch.int32, device=ends.device)
    token_of[positions] = (torch.arange(tokens * top_k, device=ends.device) // top_k)[live].int()
    tiles[:, 2] = 0
    number, start = 0, 0
    for expert, end in enumerate(ends.tolist()):
        for first in range(start, end, tile):
            live_here = min(tile, end - first)
            tiles[number] = torch.tensor([expert, first, live_here], dtype=torch.int32, device="cpu")
            members[number, :live_here] = token_of[first : first + live_here]
            number += 1
        start = end
    if x_rows is not None and x_scales is not None:
        every = torch.arange(tokens, device=x.device)
        write_rows(x, every, rows=x_rows[None], scales=x_scales.T[None], scale_format=scale_format)
