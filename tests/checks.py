"""What every path must do, as functions that CPU and GPU tests share: inputs, routings by name, and the comparison per row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from graphmoe import ExpertWeights, MoERuntime, MoESpec, Recipe
from graphmoe.build import Built
from graphmoe.formats import FORMATS
from graphmoe.paths import PATHS, rounding_of
from graphmoe.reference import moe_layer, row_errors, row_limit
from graphmoe.samples import ROUTINGS, random_inputs, random_weights, routing
from graphmoe.verify import POISONS

GROUPED = (
    Recipe("masked", row_tile=128),
    Recipe("compact", block_e=64),
    Recipe("compact", block_e=128),
    Recipe("psum", block_e=64),
    Recipe("psum", block_e=128),
)
"""The same GEMM arithmetic over five layouts: their outputs are equal bit for bit."""
RECIPES = (
    *GROUPED,
    Recipe("gathered", tile=16),
    Recipe("gathered", tile=32, up_rows=64, up_stages=4, up_warps=8, down_rows=64, down_stages=3),
    Recipe("direct"),
    Recipe("direct", down_slots=1, up_stages=3),
)
W4_RECIPES = (
    Recipe("gathered_w4", tile=16),
    Recipe("gathered_w4", tile=32, up_rows=64, up_stages=4, up_warps=8, down_rows=64, down_stages=3),
    Recipe("gathered_w4", tile=64),
)
"""Of the format `w4afp8`, which no other path runs."""
RUNS = tuple((name, fmt) for name, path in PATHS.items() for fmt in FORMATS if path.weight_layout == FORMATS[fmt].layout)
"""Every path with every format that it reads."""
FP8_OF = {name: "fp8_block" if path.weight_layout == "plain" else "w4afp8" for name, path in PATHS.items()}
"""A format with FP8 activations that a path reads."""
__all__ = ["POISONS", "ROUTINGS", "random_inputs", "random_weights", "rounding_of"]  # shared through here


def routings(spec: MoESpec, tokens: int, *, seed: int = 0, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Every named routing of `tokens` tokens: name and int64 `[tokens, K]`."""
    for name in ROUTINGS:
        yield name, routing(name, spec, tokens, seed=seed, device=device)


def assert_rows(y: Tensor, want: Tensor, fmt: str, where: str = "", *, recipe: Recipe | str = "psum") -> float:
    """Raise with the coordinate of the worst row unless every row is within the limit of the recipe that made it; returns the worst error."""
    limit = row_limit(fmt, rounding_of(recipe))
    if y.shape[0] == 0:
        return 0.0
    errors = row_errors(y, want)
    worst = int(errors.argmax())
    assert float(errors[worst]) <= limit, f"{where}: row {worst} is off by {float(errors[worst]):.4f} (limit {limit})"
    return float(errors[worst])


def built_of(runtime: MoERuntime) -> Built:
    """What a runtime runs: its arena, buckets and graphs."""
    return runtime._core.open()


def poison(runtime: MoERuntime, word: int) -> None:
    """Fill every scratch byte of a runtime."""
    built_of(runtime).arena.poison(word)


def oracle(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, recipe: Recipe | str = "psum") -> Tensor:
    """float64 `[t, H]`, activations rounded where that recipe's path rounds them."""
    return moe_layer(x, ids, weights, experts, rounding=rounding_of(recipe))


def bits(tensor: Tensor) -> Tensor:
    """bf16 values as int16, so that NaN compares."""
    return tensor.view(torch.int16)
