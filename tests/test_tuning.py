"""Tuning on invented times: which recipes are tried, which wins, and that a trial refuses what cannot run or computes wrong rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphmoe import MoESpec, Recipe, model_names, named_spec, reference
from graphmoe import trial as trial_module
from graphmoe import tuning as tuning_module
from graphmoe.errors import GraphMoEError, UnknownRecipe
from graphmoe.formats import get_format
from graphmoe.measure import Ceilings, Timing
from graphmoe.paths import PATHS, get_path
from graphmoe.trial import LAYERS, Bench, Trial, layers_of
from graphmoe.tuning import compile_ahead, neighbours, starting_points, tune
from tests.checks import RUNS, random_weights

SHAPES = {
    f"{model} {how}": shape
    for model in model_names()
    for how, shape in (
        ("whole", named_spec(model)),
        ("tp8", named_spec(model).shard(tp=8, block=128)),
        ("ep2", named_spec(model).shard(ep=2)),
        ("ep8", named_spec(model).shard(ep=8, ep_rank=7)),
        ("tp2 ep4", named_spec(model).shard(tp=2, ep=4, block=128)),
    )
}
EVERY = 16384
SMALL = MoESpec(8, 2, 256, 128)


def is_full(recipe: Recipe) -> bool:
    """Has every option, each with a value that the path accepts."""
    return get_path(recipe.path).options(recipe) == dict(recipe.options)


def reachable(points: Iterable[Recipe]) -> set[Recipe]:
    """Everything that a search from these points could try."""
    found, border = set(), set(points)
    while border:
        found |= border
        border = {recipe for one in border for choices in neighbours(one) for recipe in choices} - found
    return found


# --- what is tried


@pytest.mark.parametrize("shape", SHAPES)
def test_starting_points_of_every_size_are_distinct_recipes_that_can_run(shape: str) -> None:
    """And which: few tokens, few rows an expert, many rows an expert; the borders overlap, so that where they lie decides no profile."""
    spec, fmt = SHAPES[shape], get_format("fp8_block")
    can_run: dict[Recipe, bool] = {}
    for tokens in range(1, EVERY + 1):
        points = starting_points(spec, tokens, "fp8_block")
        for point in points:
            if point not in can_run:
                can_run[point] = is_full(point) and get_path(point.path).supports(spec, fmt, "sm90") is None
        rows = tokens * spec.top_k / spec.num_experts
        plain = [(point.path, dict(point.options).get("tile", dict(point.options).get("block_e"))) for point in points]
        assert len(set(plain)) == len(plain)
        assert set(plain) == {
            *([("direct", None)] if tokens <= 8 else []),
            *([("gathered", 16)] if rows <= 24 else []),
            *([("gathered", 32)] if 6 <= rows <= 48 else []),
            *([("gathered", 64)] if 24 <= rows <= 64 else []),
            *([("masked", None), ("psum", 64)] if tokens >= 8 else []),
            *([("psum", 128), ("compact", 128)] if rows > 32 else []),
        }, tokens
    assert all(can_run.values())
    assert {point.path for point in can_run} == {name for name, path in PATHS.items() if path.weight_layout == "plain"}


@pytest.mark.parametrize("shape", SHAPES)
def test_int4_weights_have_starting_points_of_their_path_at_every_size(shape: str) -> None:
    spec = SHAPES[shape]
    for tokens in range(1, EVERY + 1):
        points, rows = starting_points(spec, tokens, "w4afp8"), tokens * spec.top_k / spec.num_experts
        assert points
        assert {point.path for point in points} == {"gathered_w4"}
        assert all(is_full(point) for point in points)
        assert rows <= 64 or [dict(point.options)["tile"] for point in points] == [64]


def test_direct_of_a_rank_takes_the_slots_one_by_one() -> None:
    """Most slots of a token are on other ranks."""
    for model in model_names():
        for spec, slots in ((named_spec(model), 0), (named_spec(model).shard(ep=2), 1)):
            [direct] = [point for point in starting_points(spec, 1, "fp8_block") if point.path == "direct"]
            assert dict(direct.options)["down_slots"] == slots


ALL_POINTS = {point for spec in SHAPES.values() for tokens in range(1, 2049) for point in starting_points(spec, tokens, "fp8_block")}


def test_every_recipe_that_a_search_can_reach_is_full_and_keeps_its_path_and_tile() -> None:
    for point in ALL_POINTS:
        for recipe in reachable([point]):
            assert is_full(recipe)
            assert recipe.path == point.path
            assert dict(recipe.options).get("tile") == dict(point.options).get("tile")


def test_each_half_changes_its_own_options_only_and_holds_the_recipe_that_is_refined() -> None:
    for recipe in reachable(ALL_POINTS):
        halves = list(neighbours(recipe))
        assert len(halves) == (2 if recipe.path in ("gathered", "direct") else 0)
        for half, prefix in zip(halves, ("up_", "down_"), strict=False):
            assert len(set(half)) == len(half) > 3
            for other in half:
                changed = {name for name, value in other.options if dict(recipe.options)[name] != value}
                assert all(name.startswith(prefix) for name in changed), (recipe, other)
    for point in ALL_POINTS:
        assert all(point in half for half in neighbours(point)), "a plain recipe is none of its own choices: it would win by never being compared"


# --- which wins


class FakeBench:
    """Times invented by `time_of`, microseconds of (balanced, zipf); None refuses the recipe. The floor is 10 of balanced, 20 of zipf."""

    def __init__(self, time_of: Callable[[Recipe], tuple[float, float] | None], spec: MoESpec = SMALL) -> None:
        self.spec, self.fmt = spec, "fp8_block"
        self.runs: list[tuple[Recipe, int]] = []
        self._time_of = time_of

    def batches(self, tokens: int) -> str:
        return f"batches of {tokens}"

    def run(self, recipe: Recipe, batches: str, *, repeats: int) -> Trial:
        assert batches.startswith("batches of ")
        self.runs.append((recipe, repeats))
        times = self._time_of(recipe)
        if times is None:
            return Trial(recipe, refused=f"{recipe.path} does not run")
        balanced, zipf = times
        return Trial(recipe, None, (("balanced", Timing(balanced, 0.5), 10.0), ("zipf", Timing(zipf, 0.7), 20.0)), 4, 0.03)

    @property
    def tried(self) -> set[Recipe]:
        return {recipe for recipe, _ in self.runs}


def pseudo_random(seed: int, *, refuse: float = 0.0) -> Callable[[Recipe], tuple[float, float] | None]:
    """Times that depend on the recipe alone."""

    def time_of(recipe: Recipe) -> tuple[float, float] | None:
        rng = np.random.default_rng([seed, *str(recipe).encode()])
        return None if rng.random() < refuse else (float(rng.uniform(11, 30)), float(rng.uniform(22, 60)))

    return time_of


def worst(times: tuple[float, float] | None) -> float:
    return float("inf") if times is None else max(times[0] / 10, times[1] / 20)


@given(seed=st.integers(0, 2**32 - 1), tokens=st.sampled_from([1, 5, 8, 64, 130, 400]), refuse=st.sampled_from([0.0, 0.3, 0.8]))
def test_the_best_worst_ratio_of_all_that_was_tried_wins(seed: int, tokens: int, refuse: float) -> None:
    time_of = pseudo_random(seed, refuse=refuse)
    bench = FakeBench(time_of)
    try:
        record, trials = tune(bench, tokens)  # type: ignore[arg-type]
    except GraphMoEError:
        assert all(time_of(recipe) is None for recipe in bench.tried)
        return
    assert worst(time_of(record.recipe)) == min(worst(time_of(recipe)) for recipe in bench.tried)
    assert {trial.recipe for trial in trials} == bench.tried
    assert record.tried == len(trials) == len(bench.tried)
    assert set(starting_points(SMALL, tokens, "fp8_block")) <= bench.tried


@given(seed=st.integers(0, 2**32 - 1), tokens=st.sampled_from([1, 8, 64, 130]))
def test_a_recipe_is_tried_once_and_the_two_best_are_measured_once_more_with_more_repeats(seed: int, tokens: int) -> None:
    time_of = pseudo_random(seed)
    bench = FakeBench(time_of)
    seen: list[Trial] = []
    record, trials = tune(bench, tokens, seen=seen.append)  # type: ignore[arg-type]
    *searched, one, other = bench.runs
    assert len({recipe for recipe, _ in searched}) == len(searched) == record.tried
    best_two = sorted({recipe for recipe, _ in searched}, key=lambda recipe: worst(time_of(recipe)))[:2]
    assert [one[0], other[0]] == best_two
    assert one[1] == other[1] > max(repeats for _, repeats in searched)
    assert [trial.recipe for trial in seen] == [recipe for recipe, _ in searched] == [trial.recipe for trial in trials]


def test_the_second_measurement_decides() -> None:
    """What was best by luck loses to its rival."""
    counts: dict[Recipe, int] = {}

    def time_of(recipe: Recipe) -> tuple[float, float]:
        counts[recipe] = counts.get(recipe, 0) + 1
        lucky = recipe == Recipe("psum", block_e=64) and counts[recipe] == 1
        return (12.0, 24.0) if lucky else (13.0, 26.0) if recipe.path == "masked" else (30.0, 60.0)

    record, _ = tune(FakeBench(time_of), 512)  # type: ignore[arg-type]
    assert record.recipe == Recipe("masked", row_tile=128)


@pytest.mark.parametrize(("masked", "winner"), [(12.0, "psum"), (11.95, "psum"), (11.9, "masked")])
def test_of_what_is_equally_fast_the_smaller_arena_wins(masked: float, winner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within half a percent."""
    bench = FakeBench(lambda recipe: {"masked": (masked, 2 * masked), "psum": (12.0, 24.0)}.get(recipe.path, (30.0, 60.0)))
    run = bench.run
    monkeypatch.setattr(
        bench, "run", lambda recipe, *args, **named: replace(run(recipe, *args, **named), arena_bytes=9 if recipe.path == "masked" else 1)
    )
    record, _ = tune(bench, 64)  # type: ignore[arg-type]
    assert record.recipe.path == winner


def test_a_record_holds_the_routing_that_is_farther_from_its_floor() -> None:
    for times, replay, spread, floor in (((15.0, 24.0), 15.0, 0.5, 10.0), ((12.0, 30.0), 30.0, 0.7, 20.0)):
        record, _ = tune(FakeBench(lambda _, times=times: times), 512)  # type: ignore[arg-type,misc]
        assert (record.tokens, record.replay_us, record.spread_us, record.floor_us) == (512, replay, spread, floor)
        assert (record.launches, record.worst_row, record.ratio) == (4, 0.03, 1.5)


def test_a_recipe_that_is_good_on_one_routing_alone_does_not_win() -> None:
    def time_of(recipe: Recipe) -> tuple[float, float]:
        return (10.5, 60.0) if recipe.path == "psum" else (15.0, 30.0) if recipe.path == "masked" else (40.0, 80.0)

    assert tune(FakeBench(time_of), 512)[0].recipe.path == "masked"  # type: ignore[arg-type]


def test_the_options_of_the_best_path_are_found_half_by_half() -> None:
    """The up half's best choice is kept while the down half is tried."""
    wanted = {"up_rows": 64, "up_stages": 6, "down_rows": 64, "down_stages": 4}

    def time_of(recipe: Recipe) -> tuple[float, float]:
        missed = sum(dict(recipe.options).get(name) != value for name, value in wanted.items())
        return (12.0 + 0.1 * missed, 24.0) if recipe.path == "gathered" else (29.0, 58.0)

    record, _ = tune(FakeBench(time_of), 8)  # type: ignore[arg-type]
    assert wanted.items() <= dict(record.recipe.options).items()


def test_refused_recipes_are_ignored_but_counted() -> None:
    """The plain recipe of the best path is among them."""
    [plain] = [point for point in starting_points(SMALL, 8, "fp8_block") if point.path == "gathered"]

    def time_of(recipe: Recipe) -> tuple[float, float] | None:
        return None if recipe == plain or recipe.path != "gathered" else (12.0, 24.0)

    bench = FakeBench(time_of)
    record, trials = tune(bench, 8)  # type: ignore[arg-type]
    assert record.recipe.path == "gathered"
    assert record.recipe != plain
    assert record.tried == len(trials)
    assert {trial.recipe.path for trial in trials if trial.refused} == {"direct", "gathered", "masked", "psum"}
    assert all(repeats == bench.runs[0][1] for recipe, repeats in bench.runs if time_of(recipe) is None), "a refused recipe is not measured again"


def test_of_many_recipes_the_only_one_that_works_wins() -> None:
    bench = FakeBench(lambda recipe: (12.0, 24.0) if recipe.path == "masked" else None)
    record, _ = tune(bench, 512)  # type: ignore[arg-type]
    assert record.recipe == Recipe("masked", row_tile=128)
    assert len(bench.runs) == len(bench.tried) + 1


def test_nothing_that_works_is_an_error_that_says_why() -> None:
    with pytest.raises(GraphMoEError, match=r"no recipe works at 512 tokens: .*masked row_tile=128: masked does not run.*psum does not run"):
        tune(FakeBench(lambda _: None), 512)  # type: ignore[arg-type]


def test_what_works_once_and_then_no_more_is_an_error() -> None:
    """Such as memory that somebody else took."""
    seen: set[Recipe] = set()

    def time_of(recipe: Recipe) -> tuple[float, float] | None:
        first = recipe not in seen
        seen.add(recipe)
        return (12.0, 24.0) if first else None

    with pytest.raises(GraphMoEError, match=r"no recipe works at 512 tokens: .* does not run"):
        tune(FakeBench(time_of), 512)  # type: ignore[arg-type]


def test_of_two_finalists_of_which_one_fails_the_other_wins() -> None:
    runs: list[Recipe] = []

    def time_of(recipe: Recipe) -> tuple[float, float] | None:
        runs.append(recipe)
        if recipe == Recipe("psum", block_e=64):
            return (12.0, 24.0) if runs.count(recipe) == 1 else None
        return (13.0, 26.0) if recipe.path == "masked" else (14.0, 28.0)

    assert tune(FakeBench(time_of), 512)[0].recipe == Recipe("masked", row_tile=128)  # type: ignore[arg-type]
    assert runs.count(Recipe("psum", block_e=64)) == 2


# --- what is compiled ahead


def test_what_the_search_begins_with_is_compiled_ahead_for_every_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[MoESpec, str, Recipe, tuple[int, ...]]] = []
    pools: list[int] = []

    class Pool:
        def __init__(self, workers: int, mp_context: object) -> None:
            pools.append(workers)

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...

        def map(self, _: object, given: list[Any]) -> list[Any]:
            jobs.extend(given)
            return given

    spec, sizes = named_spec("qwen3-30b-a3b"), (1, 2, 8, 64, 512, 1024)
    nbytes = 3 * 128 * 2048 * 768
    monkeypatch.setattr(tuning_module, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(tuning_module.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 * (nbytes + (2 << 30)) + 5, 1 << 40))
    done: list[None] = []
    assert compile_ahead(spec, "fp8_block", sizes, done=lambda: done.append(None)) == len(jobs) == len(done) > 20
    assert pools == [3], "as many processes as the memory holds"
    assert {(of, fmt) for of, fmt, _, _ in jobs} == {(spec, "fp8_block")}
    compiled = {(recipe, tokens) for _, _, recipe, buckets in jobs for tokens in buckets}
    points = {(point, tokens) for tokens in sizes for point in starting_points(spec, tokens, "fp8_block")}
    assert points <= compiled
    assert {recipe for recipe, _ in compiled} == {
        recipe for point, _ in points for recipe in (point, *(one for half in neighbours(point) for one in half))
    }


# --- trials


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    """A bench of small weights on the CPU: the paths run as torch twins, and times are invented."""
    monkeypatch.setattr(Ceilings, "measure", lambda fmt, device: Ceilings(4e12, 1e15))
    monkeypatch.setattr(trial_module, "graph_timing", lambda items, *, repeats: Timing(float(len(items)), float(repeats)))
    return lambda spec=SMALL, fmt="fp8_block", **options: Bench(spec, fmt, torch.device("cpu"), **options)


@pytest.mark.parametrize("spec", [SMALL, MoESpec(64, 2, 256, 128, num_local_experts=4, expert_offset=60), MoESpec(40, 6, 128, 128)], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_batches_are_top_k_routings_of_the_whole_model_that_hit_this_rank(spec: MoESpec, tokens: int, bench: Callable[..., Bench]) -> None:
    made = bench(spec)
    batches = made.batches(tokens)
    assert [batch.name for batch in batches] == ["balanced", "zipf"]
    for batch in batches:
        assert batch.x.shape == (tokens, spec.hidden_size)
        assert batch.topk_ids.shape == batch.topk_weights.shape == (tokens, spec.top_k)
        assert torch.allclose(batch.topk_weights.sum(-1), torch.ones(tokens))
        assert -spec.expert_offset <= int(batch.topk_ids.min())
        assert int(batch.topk_ids.max()) < spec.num_experts - spec.expert_offset
        here = [[i for i in row if 0 <= i < spec.num_local_experts] for row in batch.topk_ids.tolist()]
        assert all(len(set(row)) == len(row) for row in here), "a token names an expert twice"
        assert list(batch.counts) == [sum(row.count(expert) for row in here) for expert in range(spec.num_local_experts)]
        assert sum(batch.counts) >= 1
        assert batch.floor_us == made.ceilings.floor_us(made.layers[0], batch.counts)
    again = made.batches(tokens)
    assert all(torch.equal(one.topk_ids, other.topk_ids) and torch.equal(one.x, other.x) for one, other in zip(batches, again, strict=True))


def test_zipf_is_more_skewed_than_balanced(bench: Callable[..., Bench]) -> None:
    balanced, zipf = (np.array(batch.counts) for batch in bench(MoESpec(32, 2, 128, 128)).batches(400))
    assert balanced.sum() == zipf.sum() == 800
    assert zipf.max() > 1.5 * balanced.max()


def test_layers_of_a_bench_differ_and_its_seed_reproduces_them(bench: Callable[..., Bench]) -> None:
    one, same, other = bench(seed=1), bench(seed=1), bench(seed=9)
    assert len(one.layers) == LAYERS
    payloads = [layer.w13.view(torch.uint8) for layer in one.layers]
    assert not any(torch.equal(a, b) for a, b in combinations(payloads, 2))
    assert torch.equal(payloads[0], same.layers[0].w13.view(torch.uint8))
    assert not torch.equal(payloads[0], other.layers[0].w13.view(torch.uint8))


@pytest.mark.parametrize(("path", "fmt"), [run for run in RUNS if run[1] != "ue8m0"])
def test_a_trial_checks_and_times_every_path(path: str, fmt: str, bench: Callable[..., Bench]) -> None:
    made = bench(fmt=fmt)
    batches = made.batches(9)
    trial = made.run(Recipe(path), batches, repeats=11)
    assert trial.refused is None
    assert is_full(trial.recipe)
    assert trial.times == tuple((batch.name, Timing(float(LAYERS), 11.0), batch.floor_us) for batch in batches)
    assert trial.worst_ratio == LAYERS / min(batch.floor_us for batch in batches)
    assert trial.launches == {"gathered": 4, "gathered_w4": 4, "direct": 2}.get(path, 7)
    assert 0 < trial.worst_row < 0.1
    assert trial.call is None
    called = made.run(Recipe(path), batches[:1], calls=True)
    assert called.call is not None
    assert called.call.median_us > 0


def test_a_trial_of_wrong_rows_is_refused_with_their_error(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    combine = reference.combine

    def lose_a_slot(rows: Any, row_of: torch.Tensor, topk_weights: Any, **named: Any) -> None:
        row_of = row_of.clone()
        row_of[:, 1] = -1
        combine(rows, row_of, topk_weights, **named)

    made = bench()
    batches = made.batches(40)
    monkeypatch.setattr(reference, "combine", lose_a_slot)
    for path in ("psum", "gathered"):
        trial = made.run(Recipe(path), batches)
        assert trial.times == ()
        assert trial.worst_ratio == float("inf")
        assert str(trial.refused).startswith("wrong: a row of balanced is off by ")
    assert made.run(Recipe("direct"), batches).refused is None


def test_a_trial_of_nan_is_refused(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "combine", lambda *_, out, **__: out.fill_(torch.nan))
    made = bench()
    assert str(made.run(Recipe("psum"), made.batches(4)).refused).startswith("wrong: ")


class _CompilerError(Exception):
    """Triton's errors have no base but Exception."""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("CUDA error: out of memory\nat line 7"), "RuntimeError: CUDA error: out of memory"),
        (_CompilerError("out of resource: shared memory"), "_CompilerError: out of resource: shared memory"),
        (RuntimeError(), "RuntimeError: "),
        (ValueError("x" * 500), "ValueError: " + "x" * 160),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_recipe_that_cannot_be_built_is_refused_in_one_line(
    error: Exception, says: str, bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    made = bench()
    batches = made.batches(4)
    monkeypatch.setattr(trial_module, "MoERuntime", fail)
    trial = made.run(Recipe("psum"), batches)
    assert (trial.refused, trial.times) == (says, ())


def test_an_option_that_no_path_has_is_an_error_of_the_caller(bench: Callable[..., Bench]) -> None:
    made = bench()
    with pytest.raises(UnknownRecipe, match="block_e"):
        made.run(Recipe("psum", block_e=96), made.batches(1))


def test_a_whole_bucket_is_tuned_and_its_record_is_of_the_right_rows(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the paths' twins and times that favour psum."""
    made = bench()
    monkeypatch.setattr(tuning_module, "_WORTH", 0.0)  # no options are refined
    run = made.run

    def timed(recipe: Recipe, batches: Any, *, repeats: int) -> Trial:
        trial = run(recipe, batches, repeats=repeats)
        factor = 1.0 if recipe.path == "psum" else 2.0
        return replace(trial, times=tuple((name, Timing(factor * floor, 0.0), floor) for name, _, floor in trial.times))

    monkeypatch.setattr(made, "run", timed)
    record, trials = tune(made, 16)
    assert (record.recipe, record.ratio, record.launches, record.tried) == (Recipe("psum", block_e=64), 1.0, 7, len(trials))
    assert 0 < record.worst_row < 0.1


# --- the floor


@pytest.fixture(scope="module")
def weights() -> dict[str, Any]:
    return {fmt: random_weights(SMALL, fmt) for fmt in ("fp8_block", "bf16")}


def test_the_floor_is_the_slower_of_reading_the_active_experts_and_of_their_products(weights: dict[str, Any]) -> None:
    """An expert: w13 256 x 256 and w2 256 x 128 weights; in fp8 a byte each, and 4 + 2 scales of 4 bytes. An assignment: 2 * 3 * 256 * 128."""
    expert = {"fp8_block": 256 * 256 + 256 * 128 + (2 * 2 + 2 * 1) * 4, "bf16": 2 * (256 * 256 + 256 * 128)}
    for fmt, nbytes in expert.items():
        reads = Ceilings(read_bandwidth=1e9, matmul_flops=1e30)
        assert reads.floor_us(weights[fmt], [1, 0, 0, 0, 0, 0, 0, 0]) == pytest.approx(nbytes / 1e9 * 1e6)
        assert reads.floor_us(weights[fmt], [9, 0, 0, 7, 0, 0, 0, 0]) == pytest.approx(2 * nbytes / 1e9 * 1e6)
        assert reads.floor_us(weights[fmt], [1] * 8) == pytest.approx(weights[fmt].nbytes / 1e9 * 1e6)
        computes = Ceilings(read_bandwidth=1e30, matmul_flops=1e12)
        assert computes.floor_us(weights[fmt], [9, 0, 0, 7, 0, 0, 0, 0]) == pytest.approx(16 * 2 * 3 * 256 * 128 / 1e12 * 1e6)
        both = Ceilings(read_bandwidth=1e9, matmul_flops=1e9)
        for counts in ([1, 0, 0, 0, 0, 0, 0, 0], [100, 0, 0, 0, 0, 0, 0, 0]):
            assert both.floor_us(weights[fmt], counts) == pytest.approx(max(nbytes, sum(counts) * 2 * 3 * 256 * 128) / 1e9 * 1e6)


def test_ceilings_are_measured_in_the_format_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    import graphmoe.measure as measure_module

    monkeypatch.setattr(measure_module, "read_bandwidth", lambda device: asked.append(device) or 3.0)
    monkeypatch.setattr(measure_module, "matmul_flops", lambda fmt, device: asked.append((fmt, device)) or 5.0)
    device = torch.device("cpu")
    assert Ceilings.measure("bf16", device) == Ceilings(read_bandwidth=3.0, matmul_flops=5.0)
    assert asked == [device, ("bf16", device)]


@pytest.mark.parametrize(
    ("model", "ep", "layers"), [("qwen3-30b-a3b", 1, 6), ("deepseek-v3", 8, 6), ("qwen3-30b-a3b", 8, 39), ("qwen3-30b-a3b", 16, 39)]
)
def test_a_rotation_outgrows_the_cache_however_few_experts_a_token_has_here(model: str, ep: int, layers: int) -> None:
    spec = named_spec(model).shard(ep=ep)
    assert layers_of(spec, "fp8_block") == layers
    read = layers * 3 * spec.hidden_size * spec.intermediate_size * max(1, spec.top_k * spec.num_local_experts // spec.num_experts)
    assert read >= 180e6
