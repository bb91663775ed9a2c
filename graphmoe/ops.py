"""The five operations around the GEMMs, as one interface with two implementations.

`graphmoe.kernels` implements it in Triton (one launch each, no allocation), `graphmoe.reference` in plain torch (the meaning, any device).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from graphmoe.formats import ScaleFormat
    from graphmoe.layout import RowLayout


class Ops(Protocol):
    """A module with these functions."""

    def stage(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, x_out: Tensor, ids_out: Tensor, weights_out: Tensor) -> None: ...

    def route(self, topk_ids: Tensor, layout: RowLayout, *, distinct: bool, row_of: Tensor, groups: Tensor, flags: Tensor) -> None: ...

    def scatter(self, x: Tensor, row_of: Tensor, *, rows: Tensor, scales: Tensor | None, scale_format: ScaleFormat | None) -> None: ...

    def act(self, gate_up: Tensor, row_of: Tensor, *, rows: Tensor, scales: Tensor | None, scale_format: ScaleFormat | None) -> None: ...

    def combine(self, rows: Tensor, row_of: Tensor, topk_weights: Tensor, *, scale: float, out: Tensor) -> None: ...
