"""Twin of `kernels/act.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.formats import ScaleFormat
from graphmoe.reference.scatter import write_rows


def act(gate_up: Tensor, row_of: Tensor, *, rows: Tensor, scales: Tensor | None, scale_format: ScaleFormat | None) -> None:
    """`silu(gate) * up` of every live row. See `graphmoe.kernels.act`."""
    row = row_of.flatten()
    row = row[row >= 0]
    gate, up = gate_up.flatten(0, 1)[row.long()].float().chunk(2, dim=-1)
    write_rows(torch.nn.functional.silu(gate) * up, row, rows=rows, scales=scales, scale_format=scale_format)
