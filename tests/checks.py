"""What every path must do, as functions that CPU and GPU tests share: inputs, routings by name, and the comparison per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from graphmoe import ExpertWeights, MoERuntime, MoESpec, Recipe, bounds
from graphmoe.build import Built
from graphmoe.formats import Rounding
from graphmoe.paths import get_path
from graphmoe.reference import moe_layer, row_errors, row_limit

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
POISONS = (0x7FC00000, -1, 0x7FFFFFFF)
"""32-bit words that fill the scratch: a float32 NaN, 0xFF bytes (NaN in bf16 and e4m3, -1 in int32), and the largest int32."""


def random_weights(spec: MoESpec, fmt: str, *, seed: int = 0, device: str = "cpu") -> ExpertWeights:
    """Random experts of about unit gain."""
    generator = torch.Generator(device=device).manual_seed(seed)
    e, h, i = spec.num_local_experts, spec.hidden_size, spec.intermediate_size

    def draw(rows: int, columns: int) -> Tensor:
        values = torch.empty(e, rows, columns, dtype=torch.bfloat16, device=device)
        return values.normal_(0.0, columns**-0.5, generator=generator)

    return ExpertWeights.from_bf16(spec, draw(2 * i, h), draw(h, i), fmt=fmt)


def random_inputs(spec: MoESpec, tokens: int, *, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """`x` bf16 `[t, H]` and router weights float32 `[t, K]`, every one large enough that a lost expert shows in its row."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(tokens, spec.hidden_size, generator=generator, device=device).bfloat16()
    weights = torch.rand(tokens, spec.top_k, generator=generator, device=device) + 0.5
    return x, weights / weights.sum(-1, keepdim=True)


def _distinct(spec: MoESpec, rng: np.random.Generator, tokens: int, bias: np.ndarray) -> np.ndarray:
    """Top-k of biased Gumbel noise over all experts of the model, as local ids."""
    noise = rng.gumbel(size=(tokens, spec.num_experts)) + bias
    order = np.argsort(-noise, axis=1)[:, : spec.top_k]
    ids = np.full((tokens, spec.top_k), -1, dtype=np.int64)
    ids[:, : order.shape[1]] = spec.to_local(order)
    return ids


def _balanced(spec: MoESpec, rng: np.random.Generator, tokens: int) -> np.ndarray:
    return _distinct(spec, rng, tokens, np.zeros(spec.num_experts))


def _zipf(spec: MoESpec, rng: np.random.Generator, tokens: int) -> np.ndarray:
    return _distinct(spec, rng, tokens, -1.5 * np.log(1 + rng.permutation(spec.num_experts)))


def _one_expert(spec: MoESpec, rng: np.random.Generator, tokens: int) -> np.ndarray:
    """One expert gets every token and nothing else is local."""
    ids = np.full((tokens, spec.top_k), spec.num_local_experts, dtype=np.int64)
    ids[:, rng.integers(spec.top_k)] = rng.integers(spec.num_local_experts)
    return ids


def _sentinels(spec: MoESpec, rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Balanced, with a third of the slots replaced by every kind of sentinel."""
    ids = _balanced(spec, rng, tokens)
    e = spec.num_local_experts
    return np.where(rng.random(ids.shape) < 0.33, rng.choice([-1, e, e + 7, np.iinfo(np.int32).max], size=ids.shape), ids)


def _none_local(spec: MoESpec, rng: np.random.Generator, tokens: int) -> np.ndarray:
    return rng.choice([-1, spec.num_local_experts], size=(tokens, spec.top_k)).astype(np.int64)


def _witness(block_e: int) -> Callable[[MoESpec, np.random.Generator, int], np.ndarray]:
    def build(spec: MoESpec, rng: np.random.Generator, tokens: int) -> np.ndarray:
        ids = bounds.worst_case_topk_ids(tokens, spec.top_k, spec.num_local_experts, block_e, distinct=spec.distinct_topk)
        return rng.permuted(ids, axis=1)

    return build


ROUTINGS: dict[str, Callable[[MoESpec, np.random.Generator, int], np.ndarray]] = {
    "balanced": _balanced,
    "zipf": _zipf,
    "one_expert": _one_expert,
    "sentinels": _sentinels,
    "none_local": _none_local,
    "witness64": _witness(64),
    "witness128": _witness(128),
}


def routings(spec: MoESpec, tokens: int, *, seed: int = 0, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Every named routing of `tokens` tokens: name and int64 `[tokens, K]`."""
    for offset, (name, build) in enumerate(ROUTINGS.items()):
        yield name, torch.from_numpy(build(spec, np.random.default_rng(seed * 100 + offset), tokens)).to(device)


def rounding_of(recipe: Recipe | str) -> Rounding:
    recipe = Recipe.of(recipe)
    path = get_path(recipe.path)
    return path.rounding(path.options(recipe))


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
