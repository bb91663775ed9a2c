"""Trials: a recipe on a bucket of real size, checked against the oracle before it is timed, on balanced and on skewed routings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from graphmoe import bounds
from graphmoe.formats import Rounding, get_format
from graphmoe.measure import Ceilings, Timing, call_timing, graph_timing
from graphmoe.paths import filled, rounding_of
from graphmoe.recipe import Recipe
from graphmoe.reference import moe_layer, row_errors, row_limit
from graphmoe.runtime import MoERuntime
from graphmoe.samples import random_inputs, random_weights, routing
from graphmoe.spec import MoESpec

LAYERS, MOST_LAYERS = 6, 40
"""Layers of a rotation: between two reads of one weight the others push it out of the L2 cache."""
_COLD_BYTES = 3 * 60 * 10**6
"""Weights that one rotation reads at least: three times the L2 cache of an H200."""
_CHECKED_ROWS = 16


@dataclass(frozen=True)
class Batch:
    """A named routing of one bucket, with what an exact layer gives for some of its rows.

    Attributes:
        name: `"balanced"` or `"zipf"`.
        x, topk_ids, topk_weights: a call's inputs.
        counts: assignments of each local expert.
        floor_us: see `Ceilings.floor_us`.
    """

    name: str
    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    counts: tuple[int, ...]
    floor_us: float


@dataclass(frozen=True)
class Trial:
    """What one recipe did on one bucket.

    Attributes:
        recipe: with every option.
        refused: why it has no times: it cannot run here, or its output was wrong.
        times: by routing.
        worst_ratio: the largest time / floor over the routings.
        launches: kernels of the graph.
        worst_row: largest relative error of a row against an oracle that rounds nothing but the weights.
        arena_bytes: of this bucket by itself.
        call: wall time of a whole call from Python, if it was asked for.
    """

    recipe: Recipe
    refused: str | None = None
    times: tuple[tuple[str, Timing, float], ...] = ()
    launches: int = 0
    worst_row: float = 0.0
    arena_bytes: int = 0
    call: Timing | None = None

    @property
    def worst_ratio(self) -> float:
        return max((time.median_us / floor for _, time, floor in self.times), default=float("inf"))


class Bench:
    """One shape on one device: random weights of several layers, and the device's ceilings.

    Args:
        spec: the layer as this rank sees it.
        fmt: weight format.
        device: a CUDA device.
        seed: of weights and batches.
    """

    def __init__(self, spec: MoESpec, fmt: str, device: torch.device, *, seed: int = 0) -> None:
        self.spec = spec
        self.fmt = fmt
        self.device = device
        self._seed = seed
        self.ceilings = Ceilings.measure(fmt, device)
        self._oracles: dict[tuple[int, str, Rounding | None], Tensor] = {}
        layers = LAYERS if device.type == "cpu" else layers_of(spec, fmt)
        self.layers = [random_weights(spec, fmt, seed=seed + layer, device=device) for layer in range(layers)]

    def batches(self, tokens: int) -> list[Batch]:
        """A balanced and a Zipf-like routing; where no expert of this rank is hit, the first token's first slot is given one."""
        made = []
        for name in ("balanced", "zipf"):
            seed = self._seed + 10 * tokens
            ids = routing(name, self.spec, tokens, seed=seed, device=self.device)
            if not bool(((ids >= 0) & (ids < self.spec.num_local_experts)).any()):
                ids[0, 0] = 0
            x, weights = random_inputs(self.spec, tokens, seed=seed, device=self.device)
            counts = bounds.expert_counts(ids.cpu().numpy(), self.spec.num_local_experts)
            floor = self.ceilings.floor_us(self.layers[0], counts)
            made.append(Batch(name, x, ids, weights, tuple(counts), floor))
        return made

    def run(self, recipe: Recipe, batches: Sequence[Batch], *, repeats: int = 15, calls: bool = False) -> Trial:
        """Check one recipe on each batch, then time its graph, and with `calls` a call of the last batch from Python.

        A recipe that cannot run or computes wrong rows is refused, not raised.
        """
        tokens = batches[0].x.shape[0]
        recipe = filled(recipe)
        rounding = rounding_of(recipe)
        limit = row_limit(self.fmt, rounding)
        try:
            runtime = MoERuntime(self.spec, layers=self.layers, buckets=[tokens], path=recipe, progress=False, audit=False)
        except Exception as error:  # a plan, a compiler or a library that refuses it: any of them is an answer
            return Trial(recipe, refused=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}")
        with runtime:
            times, worst = [], 0.0
            for batch in batches:
                rows, want, exact = self._wanted(batch, rounding)
                y = runtime.layers[0](batch.x, batch.topk_ids, batch.topk_weights)[rows]
                off = float(row_errors(y, want).max())
                if not off <= limit:
                    return Trial(recipe, refused=f"wrong: a row of {batch.name} is off by {off:.3g}, limit {limit}")
                worst = max(worst, float(row_errors(y, exact).max()))
                times.append((batch.name, graph_timing([partial(layer.replay, tokens) for layer in runtime.layers], repeats=repeats), batch.floor_us))
            bucket = runtime.report().buckets[0]
            turns = cycle(runtime.layers)
            call = call_timing(lambda: next(turns)(batch.x, batch.topk_ids, batch.topk_weights), device=self.device) if calls else None
            return Trial(recipe, None, tuple(times), bucket.kernels, worst, bucket.bucket_bytes, call)

    def _wanted(self, batch: Batch, rounding: Rounding) -> tuple[Tensor, Tensor, Tensor]:
        """Some rows of a batch, what a path that rounds like this gives for them, and what a layer that rounds nothing gives."""
        tokens = batch.x.shape[0]
        rows = torch.randperm(tokens, generator=torch.Generator("cpu").manual_seed(tokens), device="cpu")[:_CHECKED_ROWS].to(self.device)
        inputs = batch.x[rows], batch.topk_ids[rows], batch.topk_weights[rows]
        for each in (rounding, None):
            if (tokens, batch.name, each) not in self._oracles:
                self._oracles[tokens, batch.name, each] = moe_layer(*inputs, self.layers[0], rounding=each)
        return rows, self._oracles[tokens, batch.name, rounding], self._oracles[tokens, batch.name, None]


def layers_of(spec: MoESpec, fmt: str) -> int:
    """Layers that a rotation needs so that even one token's experts outgrow the L2 cache."""
    experts = max(1.0, spec.top_k * spec.num_local_experts / spec.num_experts)
    read = 3 * spec.hidden_size * spec.intermediate_size * get_format(fmt).weight_bits // 8 * experts
    return min(MOST_LAYERS, max(LAYERS, math.ceil(_COLD_BYTES / read)))
