"""`gathered_w4`: `gathered` for int4 weights, which are widened to e4m3 in registers: half the bytes of every expert.

    route + quantise tokens -> GEMM w13 + SwiGLU + quantise -> GEMM w2 -> combine              four launches, all Triton

Activations have a scale per token and 128 columns, which is more accurate than a checkpoint's one input scale a GEMM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphmoe.errors import UnknownRecipe
from graphmoe.formats import Format
from graphmoe.paths.gathered import BoundGathered, GatheredPath
from graphmoe.recipe import Recipe
from graphmoe.spec import MoESpec

if TYPE_CHECKING:
    from torch import Tensor

    from graphmoe.gemm import GroupedGemm
    from graphmoe.ops import Ops
    from graphmoe.weights import ExpertWeights

_WIDEST = 64
"""The tile whose sums fill the registers of 4 warps."""


@dataclass(frozen=True)
class GatheredW4Path(GatheredPath):
    """The pure half: buffers and options of `gathered`, another layout of the weights."""

    name: str = "gathered_w4"
    weight_layout: str = "w4"
    sources: tuple[str, ...] = (
        "paths/gathered_w4.py",
        "paths/gathered.py",
        "kernels/route_tiles.py",
        "kernels/ids.py",
        "kernels/gather_up_w4.py",
        "kernels/gather_down_w4.py",
        "kernels/w4.py",
        "kernels/combine.py",
        "kernels/quantise.py",
        "kernels/pdl.py",
    )

    def options(self, recipe: Recipe) -> dict[str, int]:
        given = dict(recipe.options)
        more = {"up_warps": 8, "down_warps": 8} if given.get("tile") == _WIDEST else {}
        options = super().options(Recipe(recipe.path, **more | given))
        for gemm in ("up", "down"):
            if options["tile"] == _WIDEST and options[f"{gemm}_rows"] == 128 and options[f"{gemm}_warps"] == 4:
                raise UnknownRecipe(f"{recipe} has more sums in {gemm} than 4 warps can hold; use {gemm}_warps=8 or {gemm}_rows=64")
        return options

    def bind(
        self,
        spec: MoESpec,
        fmt: Format,
        tokens: int,
        options: Mapping[str, int],
        buffers: Mapping[str, Tensor],
        weights: ExpertWeights,
        ops: Ops,
        gemm: GroupedGemm | None,
    ) -> BoundGatheredW4:
        bound = super().bind(spec, fmt, tokens, options, buffers, weights, ops, gemm)
        return BoundGatheredW4(bound.spec, bound.scale_format, bound.options, bound.buffers, bound.weights, bound.ops)


class BoundGatheredW4(BoundGathered):
    """One layer's step over one bucket's buffers."""

    def up(self, x: Tensor, topk_ids: Tensor) -> None:
        b, o, w = self.buffers, self.options, self.weights
        assert w.w13_scale_inv is not None
        self.ops.gather_up_w4(
            b["x_rows"], b["x_scales"], b["tiles"], b["members"], w.w13, w.w13_scale_inv,
            block_rows=o["up_rows"], stages=o["up_stages"], warps=o["up_warps"], act=b["act_rows"], act_scales=b["act_scales"],
        )  # fmt: skip

    def down(self) -> None:
        b, o, w = self.buffers, self.options, self.weights
        assert w.w2_scale_inv is not None
        self.ops.gather_down_w4(
            b["act_rows"], b["act_scales"], b["tiles"], w.w2, w.w2_scale_inv,
            tile=o["tile"], block_rows=o["down_rows"], stages=o["down_stages"], warps=o["down_warps"], rows=b["down_rows"],
        )  # fmt: skip
