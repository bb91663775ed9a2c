"""What twins of fused GEMMs share: one expert's weights, and some activation rows, as float32."""

from __future__ import annotations

from torch import Tensor

from graphmoe.formats.fp8_block import dequantize_weight


def weight_of(weight: Tensor, scales: Tensor | None, expert: int) -> Tensor:
    """float32 `[N, K]` of expert `expert` of `[E, N, K]` with scales per 128x128 block, or without."""
    return weight[expert].float() if scales is None else dequantize_weight(weight[expert], scales[expert])


def rows_of(values: Tensor, scales: Tensor | None, index: Tensor) -> Tensor:
    """float32 `[n, K]`: rows `index` of `[R, K]`, with scales `[R, S]` of K/S columns each, or one `[]`, or without."""
    rows = values[index].float()
    if scales is not None and scales.dim() == 0:
        return rows * scales
    return rows if scales is None else rows * scales[index].repeat_interleave(values.shape[1] // scales.shape[1], -1)
