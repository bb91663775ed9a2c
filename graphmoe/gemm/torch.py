"""The grouped GEMM in plain torch: the CPU backend, and an oracle elsewhere.

It reads the groups as deep_gemm does: whole tiles of `align` rows, the expert of a compact tile from the tile's first row, padding rows of a
live tile computed from whatever they hold. Dead compact tiles are stored as NaN, the worst that a library could leave there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from graphmoe.bounds import round_up
from graphmoe.formats import BLOCK
from graphmoe.formats.fp8_block import dequantize_rows, dequantize_weight
from graphmoe.formats.ue8m0 import unpack
from graphmoe.layout import RowLayout


class TorchGemm:
    """See the module. Allocates temporaries: one expert's weights in float32 at a time."""

    name = "torch"

    def __call__(
        self,
        layout: RowLayout,
        a: Tensor,
        a_scales: Tensor | None,
        b: Tensor,
        b_scales: Tensor | None,
        groups: Tensor,
        out: Tensor,
        expected_rows: int,
    ) -> None:
        a_flat, out_flat = a.flatten(0, 1), out.flatten(0, 1)
        scales_flat = None if a_scales is None else _float_scales(a_scales.transpose(1, 2), a.shape[2]).flatten(0, 1)
        loaded, weight = -1, torch.empty(0, device="cpu")
        for expert, first in _tiles(layout, groups.tolist()):
            rows = slice(first, first + layout.align)
            if expert < 0:
                out_flat[rows] = torch.nan
                continue
            if expert != loaded:
                loaded = expert
                weight = b[expert].float() if b_scales is None else _dequantize(b[expert], b_scales[expert])
            tile = a_flat[rows].float() if scales_flat is None else dequantize_rows(a_flat[rows], scales_flat[rows])
            out_flat[rows] = (tile @ weight.T).to(out.dtype)


def _tiles(layout: RowLayout, groups: list[int]) -> Iterator[tuple[int, int]]:
    """`(expert, first row)` of every tile that the GEMM stores; expert -1 where it is dead."""
    if layout.kind == "compact":
        yield from ((groups[first], first) for first in range(0, layout.segment_rows, layout.align))
        return
    end = 0
    for expert, group in enumerate(groups):
        start = expert * layout.segment_rows if layout.kind == "masked" else round_up(end, layout.align)
        end = start + group if layout.kind == "masked" else group
        yield from ((expert, first) for first in range(start, end, layout.align))


def _float_scales(scales: Tensor, columns: int) -> Tensor:
    """Scales `[..., S]` of rows of `columns` values as float32, whatever they are held as."""
    return unpack(scales, columns // BLOCK) if scales.dtype == torch.int32 else scales


def _dequantize(payload: Tensor, scales: Tensor) -> Tensor:
    if scales.dtype == torch.int32:  # packed: one scale a row
        return dequantize_rows(payload, unpack(scales, payload.shape[1] // BLOCK))
    return dequantize_weight(payload, scales)
