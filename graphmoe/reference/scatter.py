"""Twin of `kernels/scatter.py`."""

from __future__ import annotations

from torch import Tensor

from graphmoe.formats.fp8_block import quantize_rows


def scatter(x: Tensor, row_of: Tensor, *, rows: Tensor, scales: Tensor | None) -> None:
    """Write each token into the rows of its assignments. See `graphmoe.kernels.scatter`."""
    write_rows(x[:, None].expand(-1, row_of.shape[1], -1).flatten(0, 1), row_of.flatten(), rows=rows, scales=scales)


def write_rows(values: Tensor, row: Tensor, *, rows: Tensor, scales: Tensor | None) -> None:
    """Store `values` float `[A, C]` at row indices `row` int `[A]` (negative: nowhere), quantised where there are scales."""
    live = row >= 0
    index = row[live].long()
    segment, slot = index // rows.shape[1], index % rows.shape[1]
    if scales is None:
        rows[segment, slot] = values[live].to(rows.dtype)
        return
    payload, scale = quantize_rows(values[live])
    rows[segment, slot] = payload
    scales[segment, :, slot] = scale
