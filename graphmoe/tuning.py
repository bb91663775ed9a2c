"""The search for a bucket's fastest recipe: starting points of every path that could win, then one option of the best at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context

import torch

from graphmoe.errors import GraphMoEError, UnknownRecipe
from graphmoe.formats import get_format
from graphmoe.paths import filled, get_path
from graphmoe.profile import BucketRecord
from graphmoe.recipe import Recipe
from graphmoe.runtime import MoERuntime
from graphmoe.samples import unwritten_weights
from graphmoe.spec import MoESpec
from graphmoe.trial import Bench, Trial

_DIRECT_TOKENS, _GROUPED_TOKENS = 8, 8
_GATHERED_ROWS = 64
_WORTH = 1.15
"""A path whose plain recipe is slower than the best one's by more than this is not refined: options rarely gain as much."""
_EQUAL = 1.005
"""Ratios that differ by less than this are the same: runs of one recipe differ by as much."""
_PROCESS_BYTES = 2 << 30
"""Device memory of a compiling process besides its weights: the CUDA context, scales, an arena."""

Options = dict[str, int]
_GATHERED_UP: tuple[Options, ...] = (
    {"up_rows": 128, "up_stages": 3, "up_warps": 4},
    {"up_rows": 128, "up_stages": 4, "up_warps": 4},
    {"up_rows": 128, "up_stages": 6, "up_warps": 4},
    {"up_rows": 128, "up_stages": 3, "up_warps": 8},
    {"up_rows": 128, "up_stages": 4, "up_warps": 8},
    {"up_rows": 64, "up_stages": 4, "up_warps": 4},
    {"up_rows": 64, "up_stages": 6, "up_warps": 4},
)
_GATHERED_DOWN: tuple[Options, ...] = (
    {"down_rows": 128, "down_stages": 2},
    {"down_rows": 128, "down_stages": 3},
    {"down_rows": 128, "down_stages": 4},
    {"down_rows": 64, "down_stages": 2},
    {"down_rows": 64, "down_stages": 4},
)
_W4_DOWN: tuple[Options, ...] = tuple({**choice, "down_warps": warps} for warps in (8, 4) for choice in _GATHERED_DOWN)
_DIRECT_UP: tuple[Options, ...] = (
    {"up_rows": 2, "up_step": 512, "up_stages": 1},
    {"up_rows": 2, "up_step": 2048, "up_stages": 3},
    {"up_rows": 1, "up_step": 1024, "up_stages": 1},
    {"up_rows": 4, "up_step": 1024, "up_stages": 3},
    {"up_rows": 8, "up_step": 512, "up_stages": 3},
    {"up_rows": 8, "up_step": 1024, "up_stages": 3},
)
_DIRECT_DOWN: tuple[Options, ...] = (
    {"down_rows": 8, "down_step": 256, "down_slots": 0, "down_warps": 4},
    {"down_rows": 16, "down_step": 128, "down_slots": 0, "down_warps": 4},
    {"down_rows": 8, "down_step": 128, "down_slots": 0, "down_warps": 4},
    {"down_rows": 16, "down_step": 128, "down_slots": 0, "down_warps": 8},
    {"down_rows": 8, "down_step": 2048, "down_slots": 1, "down_warps": 4},
    {"down_rows": 16, "down_step": 1024, "down_slots": 1, "down_warps": 4},
)
_STEPS = {"gathered": (_GATHERED_UP, _GATHERED_DOWN), "gathered_w4": (_GATHERED_UP, _W4_DOWN), "direct": (_DIRECT_UP, _DIRECT_DOWN)}


def starting_points(spec: MoESpec, tokens: int, fmt: str) -> list[Recipe]:
    """A recipe of every path and row tile that could win at this size, with all its options."""
    return [filled(point) for point in _points(spec, tokens) if get_path(point.path).weight_layout == get_format(fmt).layout]


def _points(spec: MoESpec, tokens: int) -> list[Recipe]:
    rows = tokens * spec.top_k / spec.num_experts  # that an expert gets on average
    points = []
    if tokens <= _DIRECT_TOKENS:
        points.append(Recipe("direct", **_DIRECT_UP[3], **_DIRECT_DOWN[0 if spec.num_experts == spec.num_local_experts else 4]))
    if rows <= _GATHERED_ROWS:
        tiles = [tile for tile, least, most in ((16, 0, 24), (32, 6, 48), (64, 24, _GATHERED_ROWS)) if least <= rows <= most]
        points += [Recipe("gathered", tile=tile, **_GATHERED_UP[0], **_GATHERED_DOWN[0]) for tile in tiles]
    else:
        tiles = [64]
    points += [Recipe("gathered_w4", tile=tile, **_GATHERED_UP[3], **_W4_DOWN[0]) for tile in tiles]
    if tokens >= _GROUPED_TOKENS:
        points += [Recipe("masked"), Recipe("psum", block_e=64)]
    if rows > _GATHERED_ROWS // 2:
        points += [Recipe("psum", block_e=128), Recipe("compact", block_e=128)]
    return points


def neighbours(recipe: Recipe) -> Iterator[list[Recipe]]:
    """For each independent half of a path's options: the recipe with every choice of that half that the path takes."""
    for choices in _STEPS.get(recipe.path, ()):
        taken = []
        for choice in choices:
            with suppress(UnknownRecipe):  # more than an SM holds, with the other options
                taken.append(filled(Recipe(recipe.path, **{**dict(recipe.options), **choice})))
        yield taken


def tune(bench: Bench, tokens: int, *, seen: Callable[[Trial], None] = lambda trial: None) -> tuple[BucketRecord, list[Trial]]:
    """The fastest recipe of a bucket, by its worst ratio to the floor over the routings.

    Args:
        bench: the shape and its weights.
        tokens: the bucket.
        seen: called after every trial.

    Raises:
        GraphMoEError: no recipe runs and computes the right rows; the message lists why.
    """
    batches = bench.batches(tokens)
    trials: dict[Recipe, Trial] = {}

    def best_of(recipes: Sequence[Recipe]) -> Trial:
        made = []
        for recipe in recipes:
            if recipe not in trials:
                trials[recipe] = bench.run(recipe, batches, repeats=9)
                seen(trials[recipe])
            made.append(trials[recipe])
        return min(made, key=lambda trial: trial.worst_ratio)

    leaders = sorted((best_of([point]) for point in starting_points(bench.spec, tokens, bench.fmt)), key=lambda trial: trial.worst_ratio)
    for leader in [leader for leader in leaders if leader.recipe.path in _STEPS][:2]:
        if leader.worst_ratio > _WORTH * leaders[0].worst_ratio:
            continue
        best = leader
        for half in range(len(_STEPS[leader.recipe.path])):
            best = min(best, best_of(list(neighbours(best.recipe))[half]), key=lambda trial: trial.worst_ratio)
    # What looked best of many by luck is measured once more, with more repeats, beside its closest rival.
    finals = sorted((trial for trial in trials.values() if trial.refused is None), key=lambda trial: trial.worst_ratio)[:2]
    again = [bench.run(trial.recipe, batches, repeats=25) for trial in finals]
    fastest = min(again, key=lambda trial: trial.worst_ratio, default=None)
    if fastest is not None:  # of what is equally fast, what needs less memory
        fastest = min((one for one in again if one.worst_ratio <= fastest.worst_ratio * _EQUAL), key=lambda one: (one.arena_bytes, one.worst_ratio))
    if fastest is None or fastest.refused is not None:
        why = "; ".join(f"{trial.recipe}: {trial.refused}" for trial in (*trials.values(), *again) if trial.refused is not None)
        raise GraphMoEError(f"no recipe works at {tokens} tokens: {why}")
    _, time, floor = max(fastest.times, key=lambda entry: entry[1].median_us / entry[2])
    record = BucketRecord(tokens, fastest.recipe, time.median_us, time.spread_us, floor, fastest.launches, fastest.worst_row, len(trials))
    return record, list(trials.values())


def compile_ahead(spec: MoESpec, fmt: str, sizes: Sequence[int], *, done: Callable[[], None] = lambda: None) -> int:
    """Compile what tuning these buckets launches, by parallel processes: the compilers keep their results on disk. Returns the number of jobs."""
    jobs: dict[tuple[Recipe, tuple[int, ...]], None] = {}
    for tokens in sizes:
        for point in starting_points(spec, tokens, fmt):
            every = tuple(t for t in sizes if point in starting_points(spec, t, fmt))
            jobs[point, every] = None
            for choices in neighbours(point):
                jobs |= dict.fromkeys((recipe, every[:1]) for recipe in choices if recipe != point)
    each = 3 * spec.num_local_experts * spec.hidden_size * spec.intermediate_size * get_format(fmt).weight_bits // 8 + _PROCESS_BYTES
    workers = max(1, min(len(jobs), (os.cpu_count() or 2) - 2, 14, torch.cuda.mem_get_info()[0] // each))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for _ in pool.map(_compile, [(spec, fmt, recipe, buckets) for recipe, buckets in jobs]):
            done()
    return len(jobs)


def _compile(job: tuple[MoESpec, str, Recipe, tuple[int, ...]]) -> None:
    spec, fmt, recipe, buckets = job
    try:
        MoERuntime(spec, unwritten_weights(spec, fmt, device="cuda"), buckets=buckets, path=recipe, progress=False, audit=False).close()
    except Exception as error:  # a trial will meet it again and say so
        print(f"{recipe}: {error}", file=sys.stderr)
