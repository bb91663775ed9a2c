"""The shapes, formats and recipes that GPU tests run, and a command that compiles the kernels of one: `python -m tests.gpu.cases NAME`."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from graphmoe import ExpertWeights, MoERuntime, MoESpec, Recipe, named_spec
from graphmoe.errors import CaptureError
from graphmoe.samples import unwritten_weights
from tests.checks import RECIPES, W4_RECIPES, random_weights

BUCKETS = (1, 2, 8, 32, 128, 512)
SMALL = MoESpec(16, 4, 1024, 512, routed_scaling_factor=1.5)
SHAPES = {"qwen3-30b-a3b": named_spec("qwen3-30b-a3b"), "deepseek-v3 ep=8": named_spec("deepseek-v3").shard(ep=8, ep_rank=3)}


@dataclass(frozen=True)
class Case:
    shape: str
    fmt: str
    recipe: Recipe

    @property
    def name(self) -> str:
        return f"{self.shape} | {self.fmt} | {self.recipe}"

    @property
    def buckets(self) -> tuple[int, ...]:
        """The sizes that its path is for."""
        most = {"direct": 8, "gathered": 256}.get(self.recipe.path, BUCKETS[-1])
        return tuple(t for t in BUCKETS if t <= most)

    @property
    def spec(self) -> MoESpec:
        return SMALL if self.shape == "small" else SHAPES[self.shape]


CASES = tuple(Case(shape, fmt, recipe) for shape in SHAPES for fmt in ("fp8_block", "ue8m0", "bf16") for recipe in RECIPES) + tuple(
    Case(shape, "w4afp8", recipe) for shape in SHAPES for recipe in W4_RECIPES
)


SMALL_CASES = tuple(Case("small", "fp8_block", recipe) for recipe in (*RECIPES, Recipe("masked", row_tile=64)))


@cache
def weights_of(shape: str, fmt: str, seed: int = 0) -> ExpertWeights:
    return random_weights(SHAPES[shape], fmt, seed=seed, device="cuda")


def _compile(case: Case) -> None:
    with suppress(CaptureError):  # compiled all the same
        weights = unwritten_weights(case.spec, case.fmt, device="cuda")
        MoERuntime(case.spec, weights, buckets=case.buckets, path=case.recipe, progress=False).close()


if __name__ == "__main__":
    _compile(next(case for case in (*CASES, *SMALL_CASES) if case.name == sys.argv[1]))
