"""The operations of a step that are our own, as one interface with two implementations.

`graphmoe.kernels` implements it in Triton (one launch each, no allocation), `graphmoe.reference` in plain torch (the meaning, any device).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from graphmoe.formats import ScaleFormat
    from graphmoe.layout import RowLayout
    from graphmoe.router import Router


class Ops(Protocol):
    """A module with these functions."""

    def stage(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, x_out: Tensor, ids_out: Tensor, weights_out: Tensor) -> None: ...

    def select_experts(
        self, logits: Tensor, correction_bias: Tensor | None, router: Router, *, offset: int, experts: int, topk_ids: Tensor, topk_weights: Tensor
    ) -> None: ...

    def count(self, topk_ids: Tensor, *, distinct: bool, block_counts: Tensor, flags: Tensor) -> None: ...

    def route(self, topk_ids: Tensor, layout: RowLayout, *, distinct: bool, block_counts: Tensor, row_of: Tensor, groups: Tensor) -> None: ...

    def scatter(self, x: Tensor, row_of: Tensor, *, rows: Tensor, scales: Tensor | None, scale_format: ScaleFormat | None) -> None: ...

    def act(self, gate_up: Tensor, row_of: Tensor, *, rows: Tensor, scales: Tensor | None, scale_format: ScaleFormat | None) -> None: ...

    def combine(self, rows: Tensor, row_of: Tensor, topk_weights: Tensor, *, scale: float, out: Tensor) -> None: ...

    def route_tiles(
        self,
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
    ) -> None: ...

    def gather_up(
        self,
        x: Tensor,
        x_scales: Tensor | None,
        tiles: Tensor,
        members: Tensor,
        w13: Tensor,
        w13_scales: Tensor | None,
        *,
        block_rows: int,
        stages: int,
        warps: int,
        act: Tensor,
        act_scales: Tensor | None,
        scale_format: ScaleFormat | None,
    ) -> None: ...

    def gather_up_w4(
        self,
        x: Tensor,
        x_scales: Tensor,
        tiles: Tensor,
        members: Tensor,
        w13: Tensor,
        w13_scales: Tensor,
        *,
        block_rows: int,
        stages: int,
        warps: int,
        act: Tensor,
        act_scales: Tensor,
    ) -> None: ...

    def gather_down_w4(
        self,
        act: Tensor,
        act_scales: Tensor,
        tiles: Tensor,
        w2: Tensor,
        w2_scales: Tensor,
        *,
        tile: int,
        block_rows: int,
        stages: int,
        warps: int,
        rows: Tensor,
    ) -> None: ...

    def gather_down(
        self,
        act: Tensor,
        act_scales: Tensor | None,
        tiles: Tensor,
        w2: Tensor,
        w2_scales: Tensor | None,
        *,
        tile: int,
        block_rows: int,
        stages: int,
        warps: int,
        rows: Tensor,
    ) -> None: ...

    def gemv_up(
        self, x: Tensor, topk_ids: Tensor, w13: Tensor, w13_scales: Tensor | None, *, block_rows: int, step: int, stages: int, warps: int, act: Tensor
    ) -> None: ...

    def gemv_down(
        self,
        act: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w2: Tensor,
        w2_scales: Tensor | None,
        *,
        scale: float,
        distinct: bool,
        block_rows: int,
        step: int,
        slots: int,
        warps: int,
        out: Tensor,
        flags: Tensor,
    ) -> None: ...

    def requantize_per_tensor(
        self,
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
    ) -> None: ...
