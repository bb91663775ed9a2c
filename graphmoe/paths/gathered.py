"""`gathered`: no scattered rows. Token rows are read through an index, weights are the left operand, SwiGLU is part of the first GEMM.

    route (+ quantise tokens) -> GEMM w13 + SwiGLU (+ quantise) -> GEMM w2 -> combine          four launches, all Triton

An expert's positions are cut into tiles of `tile` tokens. How many tiles any routing needs is the compact bound with `b = tile`; positions need no
padding, so there are as many as assignments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphmoe import bounds
from graphmoe.errors import UnknownRecipe, UnsupportedShape
from graphmoe.formats import BLOCK, Format, Rounding, ScaleFormat
from graphmoe.paths.base import BufferSpec, Stage, choose, too_many_slots
from graphmoe.recipe import Recipe
from graphmoe.spec import MoESpec

if TYPE_CHECKING:
    from torch import Tensor

    from graphmoe.gemm import GroupedGemm
    from graphmoe.ops import Ops
    from graphmoe.weights import ExpertWeights

_STEP_BYTES, _SHARED_BYTES = 128, (227 << 10) - 4096
"""Bytes of a row that a pipeline stage of the first GEMM holds, and what an SM of Hopper can give to all stages of a block."""
_TMA_BYTES = 16
"""What a TMA descriptor's address must be a multiple of."""


@dataclass(frozen=True)
class GatheredPath:
    """The pure half. Options: `tile` tokens; rows of weights, pipeline stages and warps of each GEMM's programs."""

    name: str = "gathered"
    weight_layout: str = "plain"
    gemm_layout: None = None
    sources: tuple[str, ...] = (
        "paths/gathered.py",
        "kernels/route_tiles.py",
        "kernels/ids.py",
        "kernels/gather_up.py",
        "kernels/gather_down.py",
        "kernels/combine.py",
        "kernels/quantise.py",
        "kernels/pdl.py",
    )

    def options(self, recipe: Recipe) -> dict[str, int]:
        options = choose(
            recipe,
            tile=(16, 32, 64),
            up_rows=(128, 64),
            up_stages=(3, 2, 4, 6),
            up_warps=(4, 8),
            down_rows=(128, 64),
            down_stages=(2, 3, 4, 6),
            down_warps=(4, 8),
        )
        held = options["up_stages"] * (2 * options["up_rows"] + options["tile"]) * _STEP_BYTES
        if held > _SHARED_BYTES:
            raise UnknownRecipe(
                f"{recipe} holds {held} bytes of weights and tokens in shared memory, an SM has {_SHARED_BYTES} for them; "
                f"use fewer up_stages, up_rows=64 or a smaller tile"
            )
        return options

    def rounding(self, options: Mapping[str, int]) -> Rounding:
        return Rounding(gate_up=False, group=options["up_rows"])

    def supports(self, spec: MoESpec, fmt: Format, arch: str) -> str | None:
        if fmt.scales is ScaleFormat.UE8M0_PACKED or arch not in ("cpu", "sm90"):
            return f"its kernels read float32 scales and were written for sm90, not {arch}; use psum or masked"
        if 2 * spec.num_local_experts * spec.intermediate_size >= 1 << 31 or spec.num_local_experts * spec.hidden_size >= 1 << 31:
            return f"E={spec.num_local_experts} experts of I={spec.intermediate_size}, H={spec.hidden_size} have 2^31 rows of weights or more"
        return too_many_slots(spec, arch)

    def tiles(self, spec: MoESpec, tokens: int, tile: int) -> int:
        """Tiles that any routing needs at most."""
        return bounds.compact_blocks(tokens, spec.top_k, spec.num_local_experts, tile, distinct=spec.distinct_topk)

    def rows(self, spec: MoESpec, tokens: int, options: Mapping[str, int]) -> int:
        return bounds.assignments(tokens, spec.top_k, spec.num_local_experts, distinct=spec.distinct_topk)

    def buffers(self, spec: MoESpec, fmt: Format, tokens: int, options: Mapping[str, int]) -> tuple[BufferSpec, ...]:
        h, i = spec.hidden_size, spec.intermediate_size
        rows, tiles = self.rows(spec, tokens, options), self.tiles(spec, tokens, options["tile"])
        buffers = [
            BufferSpec("row_of", (tokens, spec.top_k), "int32", Stage.ROUTE, Stage.COMBINE),
            BufferSpec("tiles", (tiles, 3), "int32", Stage.ROUTE, Stage.DOWN),
            BufferSpec("members", (tiles, options["tile"]), "int32", Stage.ROUTE, Stage.UP),
            BufferSpec("act_rows", (rows, i), fmt.activation_dtype, Stage.UP, Stage.DOWN),
            BufferSpec("down_rows", (rows, h), "bfloat16", Stage.DOWN, Stage.COMBINE),
        ]
        if fmt.scales is not None:
            buffers += [
                BufferSpec("x_rows", (tokens, h), fmt.activation_dtype, Stage.ROUTE, Stage.UP),
                BufferSpec("x_scales", (tokens, h // BLOCK), "float32", Stage.ROUTE, Stage.UP),
                BufferSpec("act_scales", (rows, i // options["up_rows"]), "float32", Stage.UP, Stage.DOWN),
            ]
        return tuple(buffers)

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
    ) -> BoundGathered:
        for name, weight in (("w13", weights.w13), ("w2", weights.w2)):
            if weight.is_cuda and weight.data_ptr() % _TMA_BYTES:
                raise UnsupportedShape(
                    f"path 'gathered' reads {name} through TMA: its address must be a multiple of {_TMA_BYTES}; pass {name}.clone()"
                )
        return BoundGathered(spec, fmt.scales, options, buffers, weights, ops)

    def check_blocks(self, options: Mapping[str, int], gemm_threads: tuple[int, ...]) -> str | None:
        return None


@dataclass(frozen=True)
class BoundGathered:
    """One layer's gathered step over one bucket's buffers."""

    spec: MoESpec
    scale_format: ScaleFormat | None
    options: Mapping[str, int]
    buffers: Mapping[str, Tensor]
    weights: ExpertWeights
    ops: Ops
    launches: int = 4

    def route(self, topk_ids: Tensor, x: Tensor) -> None:
        b = self.buffers
        self.ops.route_tiles(
            topk_ids, x, experts=self.spec.num_local_experts, distinct=self.spec.distinct_topk, row_of=b["row_of"], tiles=b["tiles"],
            members=b["members"], x_rows=b.get("x_rows"), x_scales=b.get("x_scales"), scale_format=self.scale_format, flags=b["flags"],
        )  # fmt: skip

    def up(self, x: Tensor, topk_ids: Tensor) -> None:
        b, o, w = self.buffers, self.options, self.weights
        self.ops.gather_up(
            b.get("x_rows", x), b.get("x_scales"), b["tiles"], b["members"], w.w13, w.w13_scale_inv,
            block_rows=o["up_rows"], stages=o["up_stages"], warps=o["up_warps"],
            act=b["act_rows"], act_scales=b.get("act_scales"), scale_format=self.scale_format,
        )  # fmt: skip

    def down(self) -> None:
        b, o, w = self.buffers, self.options, self.weights
        self.ops.gather_down(
            b["act_rows"], b.get("act_scales"), b["tiles"], w.w2, w.w2_scale_inv,
            tile=o["tile"], block_rows=o["down_rows"], stages=o["down_stages"], warps=o["down_warps"], rows=b["down_rows"],
        )  # fmt: skip

    def combine(self, topk_ids: Tensor, topk_weights: Tensor, out: Tensor) -> None:
        b = self.buffers
        self.ops.combine(b["down_rows"][None], b["row_of"], topk_weights, scale=self.spec.routed_scaling_factor, out=out)
