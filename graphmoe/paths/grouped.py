"""`masked`, `compact` and `psum`: rows scattered by expert, then a library's grouped GEMM.

    count -> route -> scatter (+ quantise) -> GEMM w13 -> SwiGLU (+ quantise) -> GEMM w2 -> combine          seven launches

Only `route` and the GEMMs know the layout. `scatter`, `act` and `combine` find an assignment's row through `row_of` and never visit
padding, so what padding rows hold is never read into a live row: a GEMM's output row depends on its own input row alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphmoe.formats import BLOCK, SCALES_PER_WORD, Format, Rounding, ScaleFormat
from graphmoe.layout import LayoutKind, RowLayout
from graphmoe.paths.base import BufferSpec, Stage, choose, too_many_slots
from graphmoe.recipe import Recipe
from graphmoe.spec import MoESpec

if TYPE_CHECKING:
    from torch import Tensor

    from graphmoe.gemm import GroupedGemm
    from graphmoe.ops import Ops
    from graphmoe.weights import ExpertWeights

SOURCES = (
    "paths/grouped.py",
    "gemm/deep_gemm.py",
    "kernels/count.py",
    "kernels/route.py",
    "kernels/ids.py",
    "kernels/scatter.py",
    "kernels/act.py",
    "kernels/combine.py",
    "kernels/quantise.py",
    "kernels/pdl.py",
)

# deep_gemm on SM90 runs one producer warpgroup and a consumer warpgroup per 64 rows of its tile.
_ROWS_OF_THREADS = {256: 64, 384: 128}
_MOST_BLOCKS, _BLOCK_TOKENS = 64, 16


@dataclass(frozen=True)
class GroupedPath:
    """One of the three layouts; its pure half."""

    name: LayoutKind
    weight_layout: str = "plain"

    @property
    def sources(self) -> tuple[str, ...]:
        return SOURCES

    @property
    def gemm_layout(self) -> LayoutKind:
        return self.name

    def options(self, recipe: Recipe) -> dict[str, int]:
        return choose(recipe, row_tile=(128, 64)) if self.name == "masked" else choose(recipe, block_e=(64, 128))

    def rounding(self, options: Mapping[str, int]) -> Rounding:
        return Rounding()

    def supports(self, spec: MoESpec, fmt: Format, arch: str) -> str | None:
        if arch not in ("cpu", "sm90", "sm100"):
            return f"deep_gemm has no grouped GEMM for {arch}; supported: sm90, sm100, cpu"
        return too_many_slots(spec, arch)

    def layout(self, spec: MoESpec, tokens: int, options: Mapping[str, int]) -> RowLayout:
        if self.name == "masked":
            return RowLayout.masked(spec, tokens, options["row_tile"])
        return RowLayout.contiguous(self.name, spec, tokens, options["block_e"])

    def rows(self, spec: MoESpec, tokens: int, options: Mapping[str, int]) -> int:
        return self.layout(spec, tokens, options).rows

    def buffers(self, spec: MoESpec, fmt: Format, tokens: int, options: Mapping[str, int]) -> tuple[BufferSpec, ...]:
        return buffers_of(self.layout(spec, tokens, options), spec, fmt, tokens)

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
    ) -> BoundGrouped:
        assert gemm is not None
        expected_rows = max(1, -(-tokens * spec.top_k // spec.num_experts))
        return BoundGrouped(spec, fmt.scales, self.layout(spec, tokens, options), expected_rows, buffers, weights, ops, gemm)

    def check_blocks(self, options: Mapping[str, int], gemm_threads: tuple[int, ...]) -> str | None:
        name = "row_tile" if self.name == "masked" else "block_e"
        tile = options[name]
        for threads in gemm_threads:
            stored = _ROWS_OF_THREADS.get(threads)
            if stored is None:
                return f"a {self.name} GEMM runs {threads} threads a block; known: {_ROWS_OF_THREADS} (threads: rows it stores)"
            if stored > tile:
                return f"a {self.name} GEMM stores tiles of {stored} rows but the recipe says {name}={tile}; use {name}={stored}"
        return None


def route_blocks(tokens: int) -> int:
    """Blocks of tokens that `count` counts by themselves."""
    return min(_MOST_BLOCKS, -(-tokens // _BLOCK_TOKENS))


def buffers_of(layout: RowLayout, spec: MoESpec, fmt: Format, tokens: int) -> tuple[BufferSpec, ...]:
    """The scratch buffers of a grouped step over any row layout."""
    h, i = spec.hidden_size, spec.intermediate_size

    def rows(columns: int) -> tuple[int, int, int]:
        return (layout.segments, layout.segment_rows, columns)

    def scales(columns: int) -> tuple[int, int, int]:
        packed = fmt.scales is ScaleFormat.UE8M0_PACKED
        return (layout.segments, -(-columns // (BLOCK * SCALES_PER_WORD)) if packed else columns // BLOCK, layout.segment_rows)

    buffers = [
        BufferSpec("row_of", (tokens, spec.top_k), "int32", Stage.ROUTE, Stage.COMBINE),
        BufferSpec("groups", (layout.group_entries,), "int32", Stage.ROUTE, Stage.DOWN),
        BufferSpec("block_counts", (route_blocks(tokens), layout.num_experts), "int32", Stage.ROUTE, Stage.ROUTE),
        BufferSpec("x_rows", rows(h), fmt.activation_dtype, Stage.SCATTER, Stage.UP),
        BufferSpec("gate_up", rows(2 * i), "bfloat16", Stage.UP, Stage.ACT),
        BufferSpec("act_rows", rows(i), fmt.activation_dtype, Stage.ACT, Stage.DOWN),
        BufferSpec("down_rows", rows(h), "bfloat16", Stage.DOWN, Stage.COMBINE),
    ]
    if fmt.scales is not None:
        dtype = "int32" if fmt.scales is ScaleFormat.UE8M0_PACKED else "float32"
        buffers.append(BufferSpec("x_scales", scales(h), dtype, Stage.SCATTER, Stage.UP))
        buffers.append(BufferSpec("act_scales", scales(i), dtype, Stage.ACT, Stage.DOWN))
    return tuple(buffers)


@dataclass(frozen=True)
class BoundGrouped:
    """One layer's grouped step over one bucket's buffers."""

    spec: MoESpec
    scale_format: ScaleFormat | None
    layout: RowLayout
    expected_rows: int
    buffers: Mapping[str, Tensor]
    weights: ExpertWeights
    ops: Ops
    gemm: GroupedGemm
    launches: int = 7

    def route(self, topk_ids: Tensor, x: Tensor) -> None:
        b = self.buffers
        distinct = self.spec.distinct_topk
        self.ops.count(topk_ids, distinct=distinct, block_counts=b["block_counts"], flags=b["flags"])
        self.ops.route(topk_ids, self.layout, distinct=distinct, block_counts=b["block_counts"], row_of=b["row_of"], groups=b["groups"])

    def up(self, x: Tensor, topk_ids: Tensor) -> None:
        b = self.buffers
        self.ops.scatter(x, b["row_of"], rows=b["x_rows"], scales=b.get("x_scales"), scale_format=self.scale_format)
        self._gemm("x", self.weights.w13, self.weights.w13_scale_inv, b["gate_up"])
        self.ops.act(b["gate_up"], b["row_of"], rows=b["act_rows"], scales=b.get("act_scales"), scale_format=self.scale_format)

    def down(self) -> None:
        self._gemm("act", self.weights.w2, self.weights.w2_scale_inv, self.buffers["down_rows"])

    def combine(self, topk_ids: Tensor, topk_weights: Tensor, out: Tensor) -> None:
        b = self.buffers
        self.ops.combine(b["down_rows"], b["row_of"], topk_weights, scale=self.spec.routed_scaling_factor, out=out)

    def _gemm(self, operand: str, weight: Tensor, weight_scale: Tensor | None, out: Tensor) -> None:
        b = self.buffers
        self.gemm(self.layout, b[f"{operand}_rows"], b.get(f"{operand}_scales"), weight, weight_scale, b["groups"], out, self.expected_rows)
