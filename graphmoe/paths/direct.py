"""`direct`: every assignment by itself on CUDA cores, for the smallest batches: no route pass, activations stay bf16.

GEMV w13 + SwiGLU -> GEMV w2 + combine          two launches, all Triton
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphmoe.formats import Format, Rounding, ScaleFormat
from graphmoe.paths.base import BufferSpec, Stage, choose, too_many_slots
from graphmoe.recipe import Recipe
from graphmoe.spec import MoESpec

if TYPE_CHECKING:
    from torch import Tensor

    from graphmoe.gemm import GroupedGemm
    from graphmoe.ops import Ops
    from graphmoe.weights import ExpertWeights


_MOST_SLOTS = 32
"""A program of the second GEMV goes through all slots of its token."""


@dataclass(frozen=True)
class DirectPath:
    """The pure half. Options: rows of weights a program, columns it takes at a time, pipeline stages, warps; and slots that the second GEMV takes at
    a time: 0 for all of a token's, 1 where most are on other ranks.
    """

    name: str = "direct"
    weight_layout: str = "plain"
    gemm_layout: None = None
    sources: tuple[str, ...] = ("paths/direct.py", "kernels/gemv_up.py", "kernels/gemv_down.py", "kernels/pdl.py")

    def options(self, recipe: Recipe) -> dict[str, int]:
        return choose(
            recipe,
            up_rows=(4, 1, 2, 8),
            up_step=(1024, 512, 2048),
            up_stages=(1, 3),
            up_warps=(4, 8),
            down_rows=(8, 4, 16, 32),
            down_step=(256, 128, 512, 1024, 2048),
            down_slots=(0, 1),
            down_warps=(4, 8),
        )

    def rounding(self, options: Mapping[str, int]) -> Rounding:
        return Rounding(quantise=False, gate_up=False)

    def supports(self, spec: MoESpec, fmt: Format, arch: str) -> str | None:
        if fmt.scales is ScaleFormat.UE8M0_PACKED or arch not in ("cpu", "sm90"):
            return f"its kernels read float32 scales and were written for sm90, not {arch}; use psum or masked"
        return too_many_slots(spec, arch, _MOST_SLOTS)

    def rows(self, spec: MoESpec, tokens: int, options: Mapping[str, int]) -> int:
        return tokens * spec.top_k

    def buffers(self, spec: MoESpec, fmt: Format, tokens: int, options: Mapping[str, int]) -> tuple[BufferSpec, ...]:
        return (BufferSpec("act_rows", (self.rows(spec, tokens, options), spec.intermediate_size), "bfloat16", Stage.UP, Stage.COMBINE),)

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
    ) -> BoundDirect:
        return BoundDirect(spec, options, buffers, weights, ops)

    def check_blocks(self, options: Mapping[str, int], gemm_threads: tuple[int, ...]) -> str | None:
        return None


@dataclass(frozen=True)
class BoundDirect:
    """One layer's direct step over one bucket's buffers. The combine is part of the second GEMV."""

    spec: MoESpec
    options: Mapping[str, int]
    buffers: Mapping[str, Tensor]
    weights: ExpertWeights
    ops: Ops
    launches: int = 2

    def route(self, topk_ids: Tensor, x: Tensor) -> None:
        pass

    def up(self, x: Tensor, topk_ids: Tensor) -> None:
        b, o, w = self.buffers, self.options, self.weights
        self.ops.gemv_up(
            x, topk_ids, w.w13, w.w13_scale_inv,
            block_rows=o["up_rows"], step=o["up_step"], stages=o["up_stages"], warps=o["up_warps"], act=b["act_rows"],
        )  # fmt: skip

    def down(self) -> None:
        pass

    def combine(self, topk_ids: Tensor, topk_weights: Tensor, out: Tensor) -> None:
        b, o, w = self.buffers, self.options, self.weights
        self.ops.gemv_down(
            b["act_rows"], topk_ids, topk_weights, w.w2, w.w2_scale_inv, scale=self.spec.routed_scaling_factor, distinct=self.spec.distinct_topk,
            block_rows=o["down_rows"], step=o["down_step"], slots=o["down_slots"], warps=o["down_warps"], out=out, flags=b["flags"],
        )  # fmt: skip
