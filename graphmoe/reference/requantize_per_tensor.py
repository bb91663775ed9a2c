"""Twin of `kernels/requantize_per_tensor.py`."""

from __future__ import annotations

from torch import Tensor

from graphmoe.formats import per_tensor


def requantize_per_tensor(
    x: Tensor,
    scales: Tensor,
    out_scale: Tensor,
    *,
    masked_m: Tensor | None,
    row_map: Tensor | None,
    block_rows: int,
    block_groups: int,
    warps: int,
    out: Tensor,
) -> None:
    """Write live rows with one scale in place of theirs; launch sizes change nothing. See `graphmoe.kernels.requantize_per_tensor`."""
    per_tensor.requantize_per_tensor(x, scales, out_scale, masked_m=masked_m, row_map=row_map, out=out)
