"""Twin of `kernels/scatter.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.formats import ScaleFormat, fp8_block, ue8m0


def scatter(x: Tensor, row_of: Tensor, *, rows: Tensor, scales: Tensor | None, scale_format: ScaleFormat | None) -> None:
    """Write each token into the rows of its assignments. See `graphmoe.kernels.scatter`."""
    values = x[:, None].expand(-1, row_of.shape[1], -1).flatten(0, 1)
    write_rows(values, row_of.flatten(), rows=rows, scales=scales, scale_format=scale_format)


def write_rows(values: Tensor, row: Tensor, *, rows: Tensor, scales: Tensor | None, scale_format: ScaleFormat | None) -> None:
    """Store `values` float `[A, C]` at row indices `row` int `[A]` (negative: nowhere), quantised where there are scales."""
    live = row >= 0
    index = row[live].long()
    segment, slot = index // rows.shape[1], index % rows.shape[1]
    if scales is None:
        rows[segment, slot] = values[live].to(rows.dtype)
        return
    quantise = fp8_block.quantize_rows if scale_format is ScaleFormat.FLOAT32 else ue8m0.quantize_rows
    payload, scale = quantise(values[live])
    rows.view(torch.uint8)[segment, slot] = payload.view(torch.uint8)
    scales[segment, :, slot] = ue8m0.pack(scale) if scale_format is ScaleFormat.UE8M0_PACKED else scale
