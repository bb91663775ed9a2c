"""`gathered_w4`: `gathered` for int4 weights, which are widened to e4m3 in registers: half the bytes of every expert.

    route + quantise tokens -> GEMM w13 + SwiGLU + quantise -> GEMM w2 -> combine              four launches, all Triton

Activations have a scale per token and 128 columns, which is more accurate than a checkpoint's one input scale a GEMM; `per_tensor=1` takes that one,
with a fifth launch, which brings the quantised tokens to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphmoe.errors import UnknownRecipe, UnsupportedShape
from graphmoe.formats import Format, Rounding
from graphmoe.paths.base import choose
from graphmoe.paths.gathered import BoundGathered, GatheredPath
from graphmoe.recipe import Recipe
from graphmoe.spec import MoESpec

if TYPE_CHECKING:
    from torch import Tensor

    from graphmoe.gemm import GroupedGemm
    from graphmoe.ops import Ops
    from graphmoe.weights import ExpertWeights

_REQUANTIZE = {"block_rows": 4, "block_groups": 4, "warps": 4}
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
        "kernels/requantize_per_tensor.py",
        "kernels/combine.py",
        "kernels/quantise.py",
        "kernels/pdl.py",
    )

    def options(self, recipe: Recipe) -> dict[str, int]:
        given = dict(recipe.options)
        per_tensor = choose(Recipe(recipe.path, **{name: given.pop(name) for name in ("per_tensor",) if name in given}), per_tensor=(0, 1))
        more = {"up_warps": 8, "down_warps": 8} if given.get("tile") == _WIDEST else {}
        options = super().options(Recipe(recipe.path, **more | given))
        for gemm in ("up", "down"):
            if options["tile"] == _WIDEST and options[f"{gemm}_rows"] == 128 and options[f"{gemm}_warps"] == 4:
                raise UnknownRecipe(f"{recipe} has more sums in {gemm} than 4 warps can hold; use {gemm}_warps=8 or {gemm}_rows=64")
        return options | per_tensor

    def rounding(self, options: Mapping[str, int]) -> Rounding:
        return replace(super().rounding(options), per_tensor=bool(options["per_tensor"]))

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
        if options["per_tensor"] and weights.w13_input_scale is None:
            raise UnsupportedShape("per_tensor=1 rounds activations with the weights' input scales, and these have none; leave it out")
        launches = 4 + options["per_tensor"]
        return BoundGatheredW4(bound.spec, bound.scale_format, bound.options, bound.buffers, bound.weights, bound.ops, launches)


class BoundGatheredW4(BoundGathered):
    """One layer's step over one bucket's buffers."""

    def route(self, topk_ids: Tensor, x: Tensor) -> None:
        super().route(topk_ids, x)
        b = self.buffers
        if self.options["per_tensor"]:
            assert self.weights.w13_input_scale is not None
            self.ops.requantize_per_tensor(
                b["x_rows"], b["x_scales"], self.weights.w13_input_scale, masked_m=None, row_map=None, out=b["x_rows"], **_REQUANTIZE
            )

    def up(self, x: Tensor, topk_ids: Tensor) -> None:
        b, o, w = self.buffers, self.options, self.weights
        assert w.w13_scale_inv is not None
        self.ops.gather_up_w4(
            b["x_rows"], self._scales("x_scales", w.w13_input_scale), b["tiles"], b["members"], w.w13, w.w13_scale_inv,
            block_rows=o["up_rows"], stages=o["up_stages"], warps=o["up_warps"], act=b["act_rows"],
            act_scales=self._scales("act_scales", w.w2_input_scale),
        )  # fmt: skip

    def down(self) -> None:
        b, o, w = self.buffers, self.options, self.weights
        assert w.w2_scale_inv is not None
        self.ops.gather_down_w4(
            b["act_rows"], self._scales("act_scales", w.w2_input_scale), b["tiles"], w.w2, w.w2_scale_inv,
            tile=o["tile"], block_rows=o["down_rows"], stages=o["down_stages"], warps=o["down_warps"], rows=b["down_rows"],
        )  # fmt: skip

    def _scales(self, name: str, one: Tensor | None) -> Tensor:
        """Scales of each row and group, or the one of all."""
        if not self.options["per_tensor"]:
            return self.buffers[name]
        assert one is not None
        return one
