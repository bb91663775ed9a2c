"""A plan is byte-exact: nothing alive together shares a byte, every size is recomputed here from shapes, and every remedy works."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphmoe
from graphmoe import BucketLadder, MoESpec, Plan, Recipe, bounds, named_spec, plan
from graphmoe import planner as planner_module
from graphmoe.errors import ArenaTooLarge, PlanError, SchemaMismatch, UnknownRecipe, UnsupportedShape
from graphmoe.formats import get_format
from graphmoe.paths import PATHS, get_path
from graphmoe.paths.base import BufferSpec, Stage
from graphmoe.planner import PlacedBuffer, place
from tests import strategies
from tests.checks import FP8_OF, RUNS

GROUPED = ("masked", "compact", "psum")
MASKED, PSUM = Recipe("masked", row_tile=128), Recipe("psum", block_e=64)
DIRECT = Recipe("direct", up_rows=4, up_step=1024, up_stages=1, up_warps=4, down_rows=8, down_step=256, down_slots=0, down_warps=4)


def gathered(tile: int, up_rows: int = 128) -> Recipe:
    return Recipe("gathered", tile=tile, up_rows=up_rows, up_stages=3, up_warps=4, down_rows=128, down_stages=2, down_warps=4)


RECIPES = [
    *(Recipe("masked", row_tile=tile) for tile in (64, 128)),
    *(Recipe(path, block_e=block_e) for path in ("compact", "psum") for block_e in (64, 128)),
    *(gathered(tile) for tile in (16, 32, 64)),
    gathered(16, up_rows=64),
    DIRECT,
]
"""One of each path and of each option that decides rows or bytes, with every option."""
WISHES = st.sampled_from([*RECIPES, *(name for name in PATHS if FP8_OF[name] == "fp8_block"), Recipe("masked"), "auto"])
SMALL = MoESpec(8, 2, 256, 128)
EP_RANK = MoESpec(64, 8, 2048, 768, num_local_experts=32)


def nbytes(buffer: BufferSpec | PlacedBuffer) -> int:
    return math.prod(buffer.shape) * getattr(torch, buffer.dtype).itemsize


def aligned(offset: int) -> int:
    return math.ceil(offset / 256) * 256


def alive_together(a: BufferSpec | PlacedBuffer, b: BufferSpec | PlacedBuffer) -> bool:
    return any(a.first <= stage <= a.last and b.first <= stage <= b.last for stage in Stage)


def share_bytes(a: PlacedBuffer, b: PlacedBuffer, guard_bytes: int = 0) -> bool:
    return a.offset < b.offset + nbytes(b) + guard_bytes and b.offset < a.offset + nbytes(a) + guard_bytes


# --- where every byte lies


@given(arguments=strategies.plan_arguments(WISHES))
def test_buffers_that_are_alive_together_share_no_byte(arguments: dict[str, Any]) -> None:
    made = plan(**arguments)
    for bucket in made.buckets:
        for a, b in combinations(bucket.buffers, 2):
            if made.guard_bytes or alive_together(a, b):
                assert not share_bytes(a, b, made.guard_bytes), f"bucket {bucket.tokens}: {a} and {b}"


@given(arguments=strategies.plan_arguments(WISHES))
def test_static_buffers_share_bytes_with_nothing(arguments: dict[str, Any]) -> None:
    """Static buffers are placed once, for every bucket: what a bucket of any size puts over them would change the next input."""
    made = plan(**arguments)
    for a, b in combinations(made.static, 2):
        assert not share_bytes(a, b, made.guard_bytes), f"{a} and {b}"
    for a in made.static:
        assert aligned(a.offset + nbytes(a) + made.guard_bytes) <= made.static_bytes
        for bucket in made.buckets:
            for b in bucket.buffers:
                assert b.offset >= made.static_bytes
                assert not share_bytes(a, b, made.guard_bytes), f"bucket {bucket.tokens}: {a} and {b}"


@given(arguments=strategies.plan_arguments(WISHES))
def test_static_buffers_hold_the_largest_bucket(arguments: dict[str, Any]) -> None:
    spec, tokens = arguments["spec"], max(arguments["ladder"])
    assert {buffer.name: (buffer.shape, buffer.dtype) for buffer in plan(**arguments).static} == {
        "x": ((tokens, spec.hidden_size), "bfloat16"),
        "topk_ids": ((tokens, spec.top_k), "int32"),
        "topk_weights": ((tokens, spec.top_k), "float32"),
        "y": ((tokens, spec.hidden_size), "bfloat16"),
        "flags": ((1,), "int32"),
    }


@given(arguments=strategies.plan_arguments(WISHES))
def test_the_arena_ends_where_its_last_buffer_ends(arguments: dict[str, Any]) -> None:
    """Every size recomputed from shape and dtype; offsets are multiples of 256."""
    made = plan(**arguments)

    def end(buffers: Iterable[PlacedBuffer]) -> int:
        return max(aligned(buffer.offset + nbytes(buffer) + made.guard_bytes) for buffer in buffers)

    every = [*made.static, *(buffer for bucket in made.buckets for buffer in bucket.buffers)]
    assert all(buffer.nbytes == nbytes(buffer) for buffer in every)
    assert all(buffer.offset % 256 == 0 <= buffer.offset for buffer in every)
    assert made.static_bytes == end(made.static)
    assert made.arena_bytes == end(every)
    assert all(min(buffer.offset for buffer in bucket.buffers) == made.static_bytes for bucket in made.buckets)
    assert [made.bucket_bytes(bucket) for bucket in made.buckets] == [end([*made.static, *bucket.buffers]) for bucket in made.buckets]


_BUFFER_SPECS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
        st.sampled_from(["bfloat16", "float32", "float8_e4m3fn", "int32"]),
        st.tuples(st.sampled_from(Stage), st.sampled_from(Stage)).map(sorted),
    ),
    max_size=10,
).map(lambda drawn: [BufferSpec(f"buffer{n}", shape, dtype, *lifetime) for n, (shape, dtype, lifetime) in enumerate(drawn)])


@given(specs=_BUFFER_SPECS, base=st.integers(0, 8).map(lambda lines: 256 * lines), guard_bytes=st.sampled_from([0, 1, 256, 300]))
def test_first_fit_places_each_buffer_as_low_as_it_can_lie(specs: list[BufferSpec], base: int, guard_bytes: int) -> None:
    """Overlap (too low) and waste (too high): for buffers of any lifetime, against trying every aligned offset from the base up."""
    placed = place(specs, base, guard_bytes)
    assert sorted(buffer.name for buffer in placed) == sorted(spec.name for spec in specs)
    assert [nbytes(buffer) for buffer in placed] == sorted(map(nbytes, specs), reverse=True)
    for n, buffer in enumerate(placed):
        forbidden = [other for other in placed[:n] if guard_bytes or alive_together(buffer, other)]
        free = (
            offset
            for offset in count(base, 256)
            if not any(share_bytes(PlacedBuffer(**{**vars(buffer), "offset": offset}), other, guard_bytes) for other in forbidden)
        )
        assert buffer.offset == next(free)


def test_a_realistic_bucket_shares_bytes_between_stages() -> None:
    made = plan(named_spec("qwen3-30b-a3b"), [256], recipes="psum")
    buffers = made.buckets[0].buffers
    together = [sum(nbytes(buffer) for buffer in buffers if buffer.first <= stage <= buffer.last) for stage in Stage]
    scratch_bytes = made.arena_bytes - made.static_bytes
    assert any(share_bytes(a, b) for a, b in combinations(buffers, 2))
    assert max(together) <= scratch_bytes < sum(map(nbytes, buffers))


def test_guards_keep_every_buffer_of_a_bucket_apart() -> None:
    plain, guarded = (plan(named_spec("qwen3-30b-a3b"), [256], recipes="psum", guard_bytes=guard) for guard in (0, 512))
    buffers = guarded.buckets[0].buffers
    assert guarded.arena_bytes >= sum(nbytes(buffer) + 512 for buffer in (*guarded.static, *buffers))
    assert guarded.arena_bytes > plain.arena_bytes


def test_bytes_beyond_32_bits_are_exact_python_ints() -> None:
    """A product that went through int32 or a float: a masked bucket of 200 GiB."""
    made = plan(named_spec("kimi-k2"), [16_000], recipes=Recipe("masked", row_tile=64))
    rows = {buffer.name: buffer for buffer in made.buckets[0].buffers}["gate_up"]
    assert rows.nbytes == 384 * 16_000 * 2 * 2048 * 2
    assert type(rows.nbytes) is type(made.arena_bytes) is type(made.buckets[0].rows) is int
    assert made.arena_bytes > rows.nbytes > 1 << 35


# --- what a bucket holds


def _wanted_buffers(spec: MoESpec, fmt: str, tokens: int, recipe: Recipe) -> tuple[int, dict[str, tuple[tuple[int, ...], str]]]:
    """Rows, and shape and dtype of every scratch buffer, from the words of `RowLayout` and of the paths without one."""
    if recipe.path == "direct":
        rows = tokens * spec.top_k
        return rows, {"act_rows": ((rows, spec.intermediate_size), "bfloat16")}
    if recipe.path == "gathered":
        return _wanted_of_gathered(spec, fmt, tokens, **dict(recipe.options))
    [(_, align)] = recipe.options
    h, i, experts = spec.hidden_size, spec.intermediate_size, spec.num_local_experts
    if recipe.path == "masked":
        segments, rows = experts, bounds.masked_slots(tokens, spec.top_k, align, distinct=spec.distinct_topk)
    else:
        segments, rows = 1, bounds.compact_rows(tokens, spec.top_k, experts, align, distinct=spec.distinct_topk)
    activation = {"fp8_block": "float8_e4m3fn", "bf16": "bfloat16"}[fmt]
    wanted = {
        "row_of": ((tokens, spec.top_k), "int32"),
        "groups": ((rows if recipe.path == "compact" else experts,), "int32"),
        "block_counts": ((min(64, -(-tokens // 16)), experts), "int32"),
        "x_rows": ((segments, rows, h), activation),
        "gate_up": ((segments, rows, 2 * i), "bfloat16"),
        "act_rows": ((segments, rows, i), activation),
        "down_rows": ((segments, rows, h), "bfloat16"),
    }
    if fmt == "fp8_block":
        wanted["x_scales"] = ((segments, h // 128, rows), "float32")
        wanted["act_scales"] = ((segments, i // 128, rows), "float32")
    return segments * rows, wanted


def _wanted_of_gathered(
    spec: MoESpec, fmt: str, tokens: int, *, tile: int, up_rows: int, **_: int
) -> tuple[int, dict[str, tuple[tuple[int, ...], str]]]:
    """A row an assignment, and a tile for every `tile` positions that an expert begins; x is quantised once a token, and as it is in bf16."""
    h, i, experts = spec.hidden_size, spec.intermediate_size, spec.num_local_experts
    rows = tokens * (min(spec.top_k, experts) if spec.distinct_topk else spec.top_k)
    tiles = bounds.compact_blocks(tokens, spec.top_k, experts, tile, distinct=spec.distinct_topk)
    activation = {"fp8_block": "float8_e4m3fn", "bf16": "bfloat16"}[fmt]
    wanted = {
        "row_of": ((tokens, spec.top_k), "int32"),
        "tiles": ((tiles, 3), "int32"),
        "members": ((tiles, tile), "int32"),
        "act_rows": ((rows, i), activation),
        "down_rows": ((rows, h), "bfloat16"),
    }
    if fmt == "fp8_block":
        wanted["x_rows"] = ((tokens, h), activation)
        wanted["x_scales"] = ((tokens, h // 128), "float32")
        wanted["act_scales"] = ((rows, i // up_rows), "float32")
    return rows, wanted


@given(arguments=strategies.plan_arguments(st.sampled_from(RECIPES)))
def test_a_bucket_has_the_rows_of_the_bounds_and_the_buffers_of_its_layout(arguments: dict[str, Any]) -> None:
    made = plan(**arguments)
    for bucket in made.buckets:
        rows, wanted = _wanted_buffers(made.spec, made.fmt, bucket.tokens, bucket.recipe)
        assert bucket.rows == rows
        assert {buffer.name: (buffer.shape, buffer.dtype) for buffer in bucket.buffers} == wanted


def test_the_bytes_of_the_paths_without_padding_rows_by_hand() -> None:
    """T = 16, K = 2, E = 8: 32 assignments, at most 16 of an expert, so none needs a second tile of 16."""
    for fmt, act_bytes, scales in (("fp8_block", 1, {"x_rows": 16 * 256, "x_scales": 16 * 2 * 4, "act_scales": 32 * 2 * 4}), ("bf16", 2, {})):
        [bucket] = plan(SMALL, [16], fmt=fmt, recipes=gathered(16, up_rows=64)).buckets
        assert (bucket.rows, {buffer.name: buffer.nbytes for buffer in bucket.buffers}) == (
            32,
            {
                "row_of": 16 * 2 * 4,
                "tiles": 8 * 3 * 4,
                "members": 8 * 16 * 4,
                "act_rows": 32 * 128 * act_bytes,
                "down_rows": 32 * 256 * 2,
                **scales,
            },
        )
        [bucket] = plan(SMALL, [16], fmt=fmt, recipes="direct").buckets
        assert (bucket.rows, {buffer.name: buffer.nbytes for buffer in bucket.buffers}) == (32, {"act_rows": 32 * 128 * 2})


class _Name(str):
    """Stands for a tensor: its views are itself, its address is 0."""

    def __getitem__(self, _: object) -> _Name:  # type: ignore[override]
        return self

    is_cuda = True

    def data_ptr(self) -> int:
        return 0


_STAGE_OF = {
    "count": Stage.ROUTE,
    "route": Stage.ROUTE,
    "route_tiles": Stage.ROUTE,
    "scatter": Stage.SCATTER,
    "act": Stage.ACT,
    "gather_up": Stage.UP,
    "gather_down": Stage.DOWN,
    "gather_up_w4": Stage.UP,
    "gather_down_w4": Stage.DOWN,
    "gemv_up": Stage.UP,
    "gemv_down": Stage.COMBINE,
    "combine": Stage.COMBINE,
}


@pytest.mark.parametrize(("path", "fmt"), [run for run in RUNS if run[1] != "ue8m0"])
def test_a_buffer_lives_exactly_from_its_first_to_its_last_use(path: str, fmt: str) -> None:
    """Too short a lifetime lets another buffer overwrite it. The path is bound to names in place of tensors, and its launches are recorded."""
    bucket = plan(SMALL, [16], fmt=fmt, recipes=path).buckets[0]
    launches: list[tuple[Stage, set[str]]] = []

    def record(stage: Stage) -> Callable[..., None]:
        return lambda *arguments, **named: launches.append((stage, {value for value in (*arguments, *named.values()) if isinstance(value, str)}))

    def gemm(*arguments: object) -> None:
        record(Stage.UP if "w13" in arguments else Stage.DOWN)(*arguments)

    ops: Any = SimpleNamespace(**{name: record(stage) for name, stage in _STAGE_OF.items()})
    weights: Any = SimpleNamespace(
        **{name: _Name(name) for name in ("w13", "w13_scale_inv", "w13_input_scale", "w2", "w2_scale_inv", "w2_input_scale")}
    )
    names: Any = {buffer.name: _Name(buffer.name) for buffer in bucket.buffers} | {"flags": _Name("flags")}
    bound = get_path(path).bind(SMALL, get_format(fmt), 16, bucket.options, names, weights, ops, gemm)  # type: ignore[arg-type]
    bound.route(_Name("topk_ids"), _Name("x"))  # type: ignore[arg-type]
    bound.up(_Name("x"), _Name("topk_ids"))  # type: ignore[arg-type]
    bound.down()
    bound.combine(_Name("topk_ids"), _Name("topk_weights"), _Name("y"))  # type: ignore[arg-type]

    assert len(launches) == bound.launches
    assert [stage for stage, _ in launches] == sorted(stage for stage, _ in launches)
    for buffer in bucket.buffers:
        uses = [stage for stage, touched in launches if buffer.name in touched]
        assert (buffer.first, buffer.last) == (min(uses), max(uses)), buffer.name


@given(arguments=strategies.plan_arguments(WISHES))
def test_every_bucket_is_planned_once_in_order_and_found_by_its_batches(arguments: dict[str, Any]) -> None:
    made = plan(**arguments)
    assert [bucket.tokens for bucket in made.buckets] == sorted(set(arguments["ladder"]))
    for tokens in range(made.ladder.largest + 1):
        assert made.bucket(tokens).tokens == made.ladder.bucket_for(tokens)


@pytest.mark.parametrize(
    ("wish", "recipe"),
    [
        ("masked", Recipe("masked", row_tile=128)),
        ("compact", Recipe("compact", block_e=64)),
        ("psum", Recipe("psum", block_e=64)),
        (Recipe("psum"), Recipe("psum", block_e=64)),
        ("gathered", gathered(16)),
        (Recipe("gathered", tile=64, up_rows=64), gathered(64, up_rows=64)),
        ("direct", DIRECT),
        *((recipe, recipe) for recipe in RECIPES),
    ],
    ids=str,
)
def test_a_wish_is_planned_with_its_options_filled_in(wish: Recipe | str, recipe: Recipe) -> None:
    [bucket] = plan(SMALL, [16], recipes=wish).buckets
    assert bucket.recipe == recipe
    assert bucket.options == dict(recipe.options)
    assert bucket.rule == "asked for"


@pytest.mark.parametrize(("tile", "rows", "stages"), list(itertools.product((16, 32, 64), (64, 128), (2, 3, 4, 6))))
def test_gathered_refuses_exactly_what_no_sm_can_hold(tile: int, rows: int, stages: int) -> None:
    """Two weight tiles and one of tokens a stage, 128 bytes a row, in 227 KiB less what the kernel needs besides."""
    held = 128 * stages * (2 * rows + tile)
    asked = Recipe("gathered", tile=tile, up_rows=rows, up_stages=stages)
    if held > 227 * 1024 - 4096:
        with pytest.raises(UnknownRecipe, match=rf"{held} bytes.*use fewer up_stages"):
            plan(SMALL, [16], recipes=asked)
    else:
        assert plan(SMALL, [16], recipes=asked).buckets[0].options["up_stages"] == stages


def test_more_slots_than_kernels_take_are_refused_on_a_gpu_alone() -> None:
    def spec(top_k: int) -> MoESpec:
        return MoESpec(256, top_k, 256, 256)

    for path, most in (("direct", 32), ("gathered", 128), ("psum", 128), ("compact", 128), ("masked", 128)):
        assert plan(spec(most), [2], recipes=path).buckets[0].recipe.path == path
        assert plan(spec(200), [2], recipes=path, arch="cpu").buckets[0].recipe.path == path
        with pytest.raises(UnsupportedShape, match=f"'{path}'.*K={most + 1} .* {most}"):
            plan(spec(most + 1), [2], recipes=path)
    assert plan(spec(33), [2]).buckets[0].recipe.path == "gathered"
    with pytest.raises(UnsupportedShape, match=r"'psum'.*K=129"):
        plan(spec(129), [2])


def test_a_mapping_gives_each_bucket_its_recipe_and_leaves_the_others_to_auto() -> None:
    made = plan(SMALL, [1, 2, 4, 8, 16], recipes={2: "masked", 8: Recipe("compact", block_e=128), 4: "auto"})
    assert [bucket.recipe for bucket in made.buckets] == [
        DIRECT,
        Recipe("masked", row_tile=128),
        DIRECT,
        Recipe("compact", block_e=128),
        gathered(16),
    ]
    assert [bucket.rule == "asked for" for bucket in made.buckets] == [False, True, False, True, False]


# --- the rule of auto


@pytest.mark.parametrize(
    ("tokens", "whole", "rank"),
    [
        (1, (DIRECT, "at most 4 tokens"), (gathered(16), "0.125 rows an expert, at most 12")),
        (4, (DIRECT, "at most 4 tokens"), (gathered(16), "0.5 rows an expert, at most 12")),
        (5, *[(gathered(16), "0.625 rows an expert, at most 12")] * 2),
        (96, *[(gathered(16), "12 rows an expert, at most 12")] * 2),
        (97, *[(gathered(32), "12.1 rows an expert, at most 32")] * 2),
        (256, *[(gathered(32), "32 rows an expert, at most 32")] * 2),
        (257, (PSUM, "psum with block_e 64"), (MASKED, "expert-parallel rank of at most 32 experts")),
        (4096, (PSUM, "psum with block_e 64"), (MASKED, "expert-parallel rank of at most 32 experts")),
    ],
)
@pytest.mark.parametrize(("fmt", "arch"), [("fp8_block", "sm90"), ("ue8m0", "sm90"), ("bf16", "sm90"), ("fp8_block", "cpu")])
def test_auto_goes_by_tokens_and_by_the_rows_that_an_expert_gets_on_average(
    tokens: int, whole: tuple[Recipe, str], rank: tuple[Recipe, str], fmt: str, arch: str
) -> None:
    """K = 8 of 64 experts: T / 8 rows. A rank of an expert-parallel group counts the whole model's experts, and has no direct path."""
    for spec, (recipe, reason) in ((replace(EP_RANK, num_local_experts=64), whole), (EP_RANK, rank)):
        [bucket] = plan(spec, [tokens], fmt=fmt, arch=arch).buckets
        assert (bucket.recipe, bucket.rule) == (recipe, f"auto: no profile, {reason}")


@pytest.mark.parametrize("tokens", [1, 4, 96, 256, 4096])
@pytest.mark.parametrize("fmt", ["ue8m0", "bf16"])
def test_auto_on_blackwell_is_what_deep_gemm_runs_there(tokens: int, fmt: str) -> None:
    for spec, recipe, reason in (
        (replace(EP_RANK, num_local_experts=64), PSUM, "psum with block_e 64"),
        (replace(EP_RANK, num_local_experts=33), PSUM, "psum with block_e 64"),
        (EP_RANK, MASKED, "expert-parallel rank of at most 32 experts"),
    ):
        [bucket] = plan(spec, [tokens], fmt=fmt, arch="sm100").buckets
        assert (bucket.recipe, bucket.rule) == (recipe, f"auto: no profile, {reason}")
    for path in ("gathered", "direct"):
        with pytest.raises(UnsupportedShape, match=rf"path '{path}'.*sm100; use psum or masked"):
            plan(EP_RANK, [tokens], fmt=fmt, arch="sm100", recipes=path)


@pytest.mark.parametrize(
    ("experts", "local", "path"),
    [(64, 32, "masked"), (33, 32, "masked"), (2, 1, "masked"), (66, 33, "psum"), (32, 32, "psum"), (8, 8, "psum"), (128, 128, "psum")],
)
def test_auto_of_many_rows_is_masked_on_an_expert_parallel_rank_of_at_most_32_experts(experts: int, local: int, path: str) -> None:
    [bucket] = plan(MoESpec(experts, 1, 256, 256, num_local_experts=local), [32 * experts + 1]).buckets
    assert bucket.recipe == (MASKED if path == "masked" else PSUM)
    assert bucket.rule.startswith("auto: ")
    assert ("expert-parallel" in bucket.rule) == (path == "masked")
    assert ("psum" in bucket.rule) == (path == "psum")


def test_auto_falls_back_to_psum_by_the_byte() -> None:
    masked_bytes = plan(EP_RANK, [512], recipes="masked").arena_bytes
    [fits] = plan(EP_RANK, [512], max_arena_bytes=masked_bytes).buckets
    [falls_back] = plan(EP_RANK, [512], max_arena_bytes=masked_bytes - 1).buckets
    assert fits.recipe == MASKED
    assert falls_back.recipe == PSUM
    assert falls_back.rule == "auto: no profile, masked exceeds max_arena_bytes, psum with block_e 64"
    assert fits.rule != falls_back.rule


def test_auto_decides_per_bucket() -> None:
    large_bytes = plan(EP_RANK, [8, 264, 512], recipes={8: "gathered", 264: "psum", 512: "masked"}).arena_bytes
    least, small, large = plan(EP_RANK, [8, 264, 512], max_arena_bytes=large_bytes - 1).buckets
    assert least.recipe == gathered(16)
    assert small.recipe == MASKED
    assert large.recipe == PSUM


@given(wishes=st.lists(st.sampled_from(RECIPES), min_size=1, max_size=4, unique=True), share=st.floats(0.0, 1.1))
def test_auto_takes_the_first_of_its_candidates_that_fits_and_names_those_before_it(wishes: list[Recipe], share: float) -> None:
    """For any candidates in any order; if none fits, the refusal asks for the memory of the smallest."""
    needs = [plan(EP_RANK, [64], recipes=wish).arena_bytes for wish in wishes]
    limit = int(max(needs) * share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner_module, "fallback", lambda spec, tokens, layout: ((wish, f"as number {n}") for n, wish in enumerate(wishes)))
        first = next((n for n, need in enumerate(needs) if need <= limit), None)
        if first is None:
            with pytest.raises(ArenaTooLarge, match=rf"max_arena_bytes must be at least {min(needs)}$"):
                plan(EP_RANK, [64], max_arena_bytes=limit)
            return
        [bucket] = plan(EP_RANK, [64], max_arena_bytes=limit).buckets
    assert bucket.recipe == wishes[first]
    misfits = [f"{wish.path} exceeds max_arena_bytes" for wish in wishes[:first]]
    assert bucket.rule == "auto: " + ", ".join(["no profile", *misfits, f"as number {first}"])


def test_a_refusal_of_auto_asks_for_no_more_than_auto_needs() -> None:
    """Not for what the last candidate, psum, would need."""
    need = plan(EP_RANK, [64]).arena_bytes
    assert need < plan(EP_RANK, [64], recipes="psum").arena_bytes
    with pytest.raises(ArenaTooLarge, match=rf"bucket 64 needs .* in path 'gathered'.*max_arena_bytes must be at least {need}$"):
        plan(EP_RANK, [64], max_arena_bytes=need - 1)
    assert plan(EP_RANK, [64], max_arena_bytes=need).buckets[0].recipe == gathered(16)


# --- JSON and fingerprint


def _stored(made: Plan) -> dict[str, Any]:
    return json.loads(json.dumps(made.to_json()))


@given(arguments=strategies.plan_arguments(WISHES))
def test_a_plan_survives_json(arguments: dict[str, Any]) -> None:
    made = plan(**arguments)
    stored = _stored(made)
    assert stored == made.to_json(), "to_json is not plain JSON data"
    loaded = Plan.from_json(stored)
    assert loaded == made
    assert loaded.fingerprint == made.fingerprint == stored["fingerprint"]
    assert loaded.to_json() == stored


@given(arguments=strategies.plan_arguments(WISHES))
def test_equal_arguments_give_equal_plans(arguments: dict[str, Any]) -> None:
    recipes = arguments["recipes"]
    again = {
        **arguments,
        "ladder": BucketLadder(reversed(arguments["ladder"])),
        "recipes": dict(reversed(recipes.items())) if isinstance(recipes, Mapping) else recipes,
    }
    one, other = plan(**arguments), plan(**again)
    assert one == other
    assert one.fingerprint == other.fingerprint


_BASE = {"spec": MoESpec(16, 2, 256, 128, num_local_experts=8), "ladder": [4, 264], "fmt": "fp8_block", "arch": "sm90", "recipes": "auto"}


def _spec(**changed: Any) -> MoESpec:
    return MoESpec(**{**vars(_BASE["spec"]), **changed})


def test_equal_specs_give_equal_fingerprints() -> None:
    """1 == 1.0 in Python, but JSON writes two different things."""
    equal = _spec(routed_scaling_factor=1)
    assert equal == _BASE["spec"]
    assert plan(**{**_BASE, "spec": equal}).fingerprint == plan(**_BASE).fingerprint


CHANGES = [
    {},
    {"spec": _spec(num_experts=17)},
    {"spec": _spec(top_k=3)},
    {"spec": _spec(hidden_size=384)},
    {"spec": _spec(intermediate_size=256)},
    {"spec": _spec(num_local_experts=4)},
    {"spec": _spec(expert_offset=8)},
    {"spec": _spec(routed_scaling_factor=2.5)},
    {"spec": _spec(distinct_topk=False)},
    {"ladder": [4, 265]},
    {"ladder": [264]},
    {"ladder": BucketLadder([4, 264], "chunk")},
    {"fmt": "bf16"},
    {"arch": "cpu"},
    {"recipes": "masked"},
    {"recipes": "psum"},
    {"recipes": "compact"},
    {"recipes": Recipe("psum", block_e=128)},
    {"recipes": "gathered"},
    {"recipes": "direct"},
    {"recipes": {4: "gathered"}},
    {"recipes": {4: "psum"}},
    {"recipes": {264: "psum"}},
    {"guard_bytes": 1},
    {"guard_bytes": 256},
]


def test_any_changed_argument_changes_the_fingerprint() -> None:
    """All pairs: `auto` that chooses masked is told from masked that was asked for by its rule."""
    falls_back = {"max_arena_bytes": plan(**{**_BASE, "recipes": "masked"}).arena_bytes - 1}
    assert [bucket.recipe.path for bucket in plan(**_BASE).buckets] == ["gathered", "masked"]
    changes = [*CHANGES, falls_back]
    fingerprints = [plan(**{**_BASE, **change}).fingerprint for change in changes]
    same = [(a, b) for (a, one), (b, other) in combinations(zip(changes, fingerprints, strict=True), 2) if one == other]
    assert not same


def test_a_limit_that_changes_no_choice_is_not_part_of_a_plan() -> None:
    made = plan(**_BASE)
    assert plan(**_BASE, max_arena_bytes=made.arena_bytes).fingerprint == made.fingerprint


STORED = _stored(plan(MoESpec(16, 2, 256, 128, num_local_experts=8), [4, 8], recipes={4: "compact"}))


@pytest.mark.parametrize("schema", ["graphmoe.plan/0", "graphmoe.plan/2", "", None, 1])
def test_a_plan_of_another_schema_is_refused_by_name(schema: object) -> None:
    with pytest.raises(SchemaMismatch, match=re.escape(repr(schema))):
        Plan.from_json({**STORED, "schema": schema})


def test_a_file_that_is_no_plan_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="None"):
        Plan.from_json({})


def _places(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every value of nested JSON data with its path, containers included."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key), value
        yield from _places(value, (*path, key))


PLACES = [(path, value) for path, value in _places(STORED) if path != ("schema",)]


def _parent(data: Any, path: tuple[str | int, ...]) -> Any:
    for key in path[:-1]:
        data = data[key]
    return data


@pytest.mark.parametrize(
    "path", [path for path, _ in PLACES if isinstance(path[-1], str) and not set(path) & set(range(1, 99))], ids=lambda path: ".".join(map(str, path))
)
def test_a_plan_without_one_of_its_fields_is_refused(path: tuple[str | int, ...]) -> None:
    """Also a field that has a default, or that could be computed: the file is not what was written."""
    cut = copy.deepcopy(STORED)
    del _parent(cut, path)[path[-1]]
    with pytest.raises(PlanError):
        Plan.from_json(cut)


_OTHER_KINDS: list[Any] = [None, -1, 0, 3, 1.5, "", "psum", True, [], ["stage"], {}, {"block_e": 7}]


@st.composite
def _edits(draw: st.DrawFn) -> tuple[tuple[str | int, ...], Any]:
    """One value of the file, and what somebody put in its place: a near miss or something of another kind."""
    path, value = draw(st.sampled_from(PLACES))
    near: list[Any] = []
    if isinstance(value, bool):
        near = [not value]
    elif isinstance(value, (int, float)):
        near = [value + 1, value - 1, value * 2 + 256, -value - 1]
    elif isinstance(value, str):
        near = [value + "x", value.upper(), value[:-1]]
    elif isinstance(value, list):
        near = [value[:-1], value * 2]
    return path, draw(st.sampled_from([other for other in near + _OTHER_KINDS if other != value]))


@given(edit=_edits())
def test_an_edited_plan_is_refused(edit: tuple[tuple[str | int, ...], Any]) -> None:
    """As PlanError, whatever the edit broke: a value that no layer can have, a dtype or stage that does not exist, a byte count."""
    path, value = edit
    edited = copy.deepcopy(STORED)
    _parent(edited, path)[path[-1]] = value
    with pytest.raises(PlanError):
        Plan.from_json(edited)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "top_k"), 0),
        (("spec", "top_k"), 3),
        (("spec", "activation"), "gelu"),
        (("ladder", "sizes"), []),
        (("ladder", "overflow"), "wait"),
        (("static", 0, "dtype"), "int7"),
        (("static", 0, "shape"), 4),
        (("static", 0, "shape", 0), None),
        (("static", 0, "nbytes"), 1),
        (("static", 0, "lifetime"), ["stage"]),
        (("static", 0, "lifetime", 0), 3),
        (("buckets", 0, "recipe", "path"), "psum"),
        (("buckets", 1, "buffers", 2, "offset"), 0),
        (("arena_bytes",), 1),
        (("fingerprint",), "0" * 64),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else repr(value)[:8],
)
def test_these_edits_are_refused(path: tuple[str | int, ...], value: object) -> None:
    """The kinds of edit that the test above meets only now and then."""
    edited = copy.deepcopy(STORED)
    _parent(edited, path)[path[-1]] = value
    with pytest.raises(PlanError):
        Plan.from_json(edited)


def test_a_field_that_no_plan_has_is_refused() -> None:
    with pytest.raises(PlanError):
        Plan.from_json({**STORED, "comment": "tuned by hand"})


# --- refusals


_REMEDY = re.compile(
    r"pass path='(?P<path>\w+)'|drop buckets above (?P<above>\d+)|max_arena_bytes must be at least (?P<need>[\d.]+)(?: (?P<unit>\w+))?"
)
_UNIT_BYTES = {"GiB": 2**30, "MiB": 2**20, "bytes": 1, None: 1}


def _follow_every_remedy(arguments: dict[str, Any], limit: int, message: str) -> None:
    """Do what the message says, each remedy by itself: a plan must come out."""
    remedies = list(_REMEDY.finditer(message))
    assert remedies, f"no remedy in: {message}"
    for remedy in remedies:
        changed = {**arguments, "max_arena_bytes": limit}
        if remedy["path"]:
            changed["recipes"] = remedy["path"]
        elif remedy["above"]:
            sizes = sorted(set(arguments["ladder"]))
            kept = [size for size in sizes if size <= int(remedy["above"])]
            assert 0 < len(kept) < len(sizes), f"{remedy[0]!r} drops {len(sizes) - len(kept)} of {sizes}: {message}"
            changed["ladder"] = kept
            if isinstance(arguments["recipes"], Mapping):
                changed["recipes"] = {tokens: wish for tokens, wish in arguments["recipes"].items() if tokens in kept}
        else:
            changed["max_arena_bytes"] = int(float(remedy["need"]) * _UNIT_BYTES[remedy["unit"]])
        try:
            made = plan(**changed)
        except ArenaTooLarge as error:
            pytest.fail(f"{remedy[0]!r} does not help: {error}; advised by: {message}")
        assert made.arena_bytes <= changed["max_arena_bytes"]


def _refusal(arguments: dict[str, Any], limit: int) -> str | None:
    try:
        made = plan(**arguments, max_arena_bytes=limit)
    except ArenaTooLarge as error:
        return str(error)
    assert made.arena_bytes <= limit, "a plan over the limit was handed out"
    return None


@given(arguments=strategies.plan_arguments(WISHES), share=st.floats(0.0, 1.0, exclude_max=True))
def test_a_plan_that_does_not_fit_is_refused_with_remedies_that_work(arguments: dict[str, Any], share: float) -> None:
    limit = int(plan(**arguments).arena_bytes * share)
    message = _refusal(arguments, limit)
    if message is not None:
        _follow_every_remedy(arguments, limit, message)


def test_the_limit_is_exact() -> None:
    made = plan(SMALL, [4, 64], recipes="psum")
    assert plan(SMALL, [4, 64], recipes="psum", max_arena_bytes=made.arena_bytes) == made
    with pytest.raises(ArenaTooLarge, match="bucket 64 needs"):
        plan(SMALL, [4, 64], recipes="psum", max_arena_bytes=made.arena_bytes - 1)


@pytest.mark.parametrize(
    ("model", "recipes", "share", "worst"),
    [
        ("qwen3-30b-a3b", {512: "masked"}, 0.75, (512, "masked")),  # psum fits
        ("qwen3-30b-a3b", {1: "psum", 64: "psum", 4096: "psum"}, 0.5, (4096, "psum")),  # fewer buckets fit
        ("qwen3-30b-a3b", {1: "masked"}, 0.01, (1, "masked")),  # another path needs less, but not little enough
        ("qwen3-30b-a3b", {8: "masked", 16: "psum"}, 0.75, (8, "masked")),  # the smaller bucket is the one that does not fit
        ("qwen3-30b-a3b", {8: "masked", 512: "psum"}, 0.6, (8, "masked")),  # psum is less for the worst bucket, not for the largest
        ("mixtral-8x7b", {1: "psum"}, 0.0, (1, "psum")),  # nothing fits: a number of MiB or GiB must not be rounded down
        ("deepseek-v3", {512: "psum"}, 0.01, (512, "psum")),
        ("deepseek-v3", {4096: "masked"}, 0.01, (4096, "masked")),
    ],
)
def test_these_refusals_name_bucket_bytes_and_remedies_that_work(model: str, recipes: dict[int, str], share: float, worst: tuple[int, str]) -> None:
    arguments = {"spec": named_spec(model), "ladder": list(recipes), "recipes": recipes}
    made = plan(**arguments)
    limit = int(made.arena_bytes * share)
    message = _refusal(arguments, limit)
    named = re.search(r"bucket (\d+) needs ([\d.]+) (\w+) in path '(\w+)' but max_arena_bytes is ([\d.]+) (\w+)", message)
    assert (int(named[1]), named[4]) == worst
    for number, unit, want in ((named[2], named[3], made.bucket_bytes(made.bucket(worst[0]))), (named[5], named[6], limit)):
        assert float(number) * _UNIT_BYTES[unit] == pytest.approx(want, rel=0.05)
    _follow_every_remedy(arguments, limit, message)


def test_a_path_that_cannot_hold_the_bucket_is_no_remedy_and_no_error() -> None:
    """Masked would need 2**31 rows, which it cannot index; that is nothing to the caller, who asked for psum."""
    with pytest.raises(ArenaTooLarge, match="bucket 8388608 needs"):
        plan(MoESpec(256, 1, 128, 128), [1 << 23], recipes="psum", max_arena_bytes=1 << 30)


def test_rows_that_int32_cannot_index_are_refused_by_number() -> None:
    with pytest.raises(UnsupportedShape, match=rf"bucket {1 << 23} needs {1 << 31} rows in path 'masked'"):
        plan(MoESpec(256, 1, 128, 128), [1 << 23], recipes="masked")
    assert plan(MoESpec(255, 1, 128, 128), [1 << 23], recipes="masked").buckets[0].rows == 255 << 23


@pytest.mark.parametrize(
    ("recipes", "names"),
    [
        ("mega", r"'mega'.*masked, compact, psum"),
        ({8: "mega"}, r"'mega'"),
        (Recipe("psum", row_tile=64), r"'psum' has no option row_tile.*block_e"),
        (Recipe("masked", block_e=64), r"'masked' has no option block_e.*row_tile"),
        (Recipe("compact", block_e=96), r"'compact' takes block_e in \(64, 128\), not 96"),
        (Recipe("masked", row_tile=256), r"'masked' takes row_tile in \(128, 64\), not 256"),
        (Recipe("psum", block_e=0), r"not 0"),
        ({6: "psum"}, r"\[6\].*\[4, 8\]"),
        ({4: "psum", 6: "psum", 9: "auto"}, r"\[6, 9\].*\[4, 8\]"),
        ({"4": "psum"}, r"'4'.*\[4, 8\]"),
        ({"4": "psum", 6: "psum"}, r"\[4, 8\]"),
    ],
    ids=str,
)
def test_recipes_that_nobody_registered_are_refused_by_name(recipes: Any, names: str) -> None:
    with pytest.raises(UnknownRecipe, match=names):
        plan(SMALL, [4, 8], recipes=recipes)


@pytest.mark.parametrize("value", [1.0, True, "64", None], ids=repr)
def test_options_of_a_recipe_are_ints(value: object) -> None:
    with pytest.raises(UnknownRecipe, match=re.escape(f"block_e={value!r}")):
        Recipe("psum", block_e=value)


@pytest.mark.parametrize(("fmt", "divisor"), [("fp8_block", 128), ("bf16", 64)])
@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size"])
@given(value=st.integers(1, 1 << 20))
def test_sizes_that_a_format_cannot_store_are_refused_by_number(fmt: str, divisor: int, name: str, value: int) -> None:
    """Every multiple of the divisor is taken, nothing else is."""
    spec = MoESpec(**{**vars(SMALL), name: value})
    if value % divisor == 0:
        assert plan(spec, [1], fmt=fmt).fmt == fmt
        return
    with pytest.raises(UnsupportedShape, match=rf"{name}={value} is not a multiple of {divisor}\b.*'{fmt}'"):
        plan(spec, [1], fmt=fmt)


@pytest.mark.parametrize(
    ("fmt", "divisor", "value"),
    [("fp8_block", 128, value) for value in (32, 100, 192, 704, 1000)] + [("bf16", 64, value) for value in (32, 100, 1000)],
)
def test_the_way_out_of_such_a_size_works(fmt: str, divisor: int, value: int) -> None:
    """The shard that the message names runs; bf16 is named only to those whom it helps, and no other size of H is."""
    with pytest.raises(UnsupportedShape) as refused:
        plan(MoESpec(8, 2, 256, value), [1], fmt=fmt)
    message = str(refused.value)
    assert f"take spec.shard(tp=..., block={divisor}) of the whole layer" in message
    assert plan(MoESpec(8, 2, 256, value * divisor).shard(tp=divisor, block=divisor), [1], fmt=fmt)
    with pytest.raises(UnsupportedShape, match="no shard changes it"):
        plan(MoESpec(8, 2, value, 256), [1], fmt=fmt)
    assert ("fmt='bf16'" in message) == (fmt != "bf16" and value % 64 == 0), message


@pytest.mark.parametrize(("arch", "gemm"), [("sm90", "deep_gemm"), ("cpu", "torch")])
def test_each_arch_has_its_gemm(arch: str, gemm: str) -> None:
    made = plan(SMALL, [1], arch=arch)
    assert (made.arch, made.gemm) == (arch, gemm)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"fmt": "int4"}, r"'int4'.*fp8_block, ue8m0, w4afp8, bf16"),
        ({"arch": "sm70"}, r"'sm70'.*sm90, sm100, cpu"),
        ({"guard_bytes": -1}, r"guard_bytes=-1"),
        ({"guard_bytes": 1.5}, r"guard_bytes=1.5"),
        ({"guard_bytes": None}, r"guard_bytes=None"),
    ],
    ids=str,
)
def test_arguments_that_no_plan_can_have_are_refused_by_name(wrong: dict[str, Any], names: str) -> None:
    with pytest.raises(PlanError, match=names):
        plan(SMALL, [1], **wrong)


# --- purity


_PURE = ("errors", "spec", "bounds", "buckets", "recipe", "fallback", "layout", "formats", "paths", "profile", "planner")

_WITHOUT_TORCH = f"""
import importlib, sys, types
sys.modules.update(torch=None, triton=None)  # importing them raises
package = types.ModuleType("graphmoe")
package.__path__ = [sys.argv[1]]             # the package without its __init__, which needs torch for the runtime
sys.modules["graphmoe"] = package
for name in {_PURE!r}:
    importlib.import_module("graphmoe." + name)
from graphmoe.planner import plan
from graphmoe.recipe import Recipe
from graphmoe.spec import named_spec
for fmt in ("fp8_block", "bf16"):
    print(plan(named_spec("qwen3-30b-a3b").shard(ep=8, ep_rank=3), "vllm", fmt=fmt, recipes={{8: Recipe("compact", block_e=64)}}).fingerprint)
"""


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_a_plan_needs_no_torch_and_is_the_same_in_every_process(hash_seed: str) -> None:
    """An import of torch by the pure half, or an order of a set or dict that reaches the plan."""
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, str(Path(graphmoe.__file__).parent)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    spec = named_spec("qwen3-30b-a3b").shard(ep=8, ep_rank=3)
    here = [plan(spec, "vllm", fmt=fmt, recipes={8: Recipe("compact", block_e=64)}).fingerprint for fmt in ("fp8_block", "bf16")]
    assert run.stdout.split() == here


@pytest.mark.parametrize(("path", "option"), [("masked", "row_tile"), ("compact", "block_e"), ("psum", "block_e")])
def test_a_captured_gemm_whose_tiles_do_not_fit_the_slots_is_found(path: str, option: str) -> None:
    """256 threads store 64 rows, 384 store 128; anything else is not known to be safe."""
    grouped = get_path(path)
    assert grouped.check_blocks({option: 128}, (256, 384)) is None
    assert grouped.check_blocks({option: 64}, (256, 256)) is None
    assert f"{option}=128" in str(grouped.check_blocks({option: 64}, (256, 384)))
    assert "512 threads" in str(grouped.check_blocks({option: 128}, (512,)))


@pytest.mark.parametrize("path", GROUPED)
@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (7, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_gemms_are_told_the_rows_that_an_expert_of_the_whole_model_gets_on_average(path: str, tokens: int, expected: int) -> None:
    """8 choices of a token over 64 experts, rounded up; that 32 or 2 of the experts are here changes nothing."""
    told: list[int] = []

    def gemm(*arguments: Any) -> None:
        told.append(arguments[-1])

    def ignore(*_: Any, **__: Any) -> None: ...

    weights = SimpleNamespace(w13=None, w13_scale_inv=None, w2=None, w2_scale_inv=None)
    for local in (64, 32, 2):
        spec, grouped = MoESpec(64, 8, 256, 128, num_local_experts=local), get_path(path)
        options = grouped.options(Recipe(path))
        buffers = {buffer.name: None for buffer in grouped.buffers(spec, get_format("fp8_block"), tokens, options)}
        ops: Any = SimpleNamespace(scatter=ignore, act=ignore)
        bound = grouped.bind(spec, get_format("fp8_block"), tokens, options, buffers, weights, ops, gemm)  # type: ignore[arg-type]
        bound.up(None, None)  # type: ignore[arg-type]
        bound.down()
    assert told == [expected] * 6


def test_more_programs_than_a_grid_has_are_refused_and_no_remedy() -> None:
    spec = named_spec("qwen3-30b-a3b")
    with pytest.raises(UnsupportedShape, match=r"bucket 8192 needs 65536 programs in path 'direct', a grid has 65535"):
        plan(spec, [8192], recipes="direct")
    assert plan(spec, [8191], recipes="direct").buckets[0].rows == 8 * 8191
    assert plan(MoESpec(64, 1, 256, 256), [65535], recipes="direct").buckets[0].rows == 65535
    with pytest.raises(UnsupportedShape, match="path 'gathered'"):
        plan(spec, [131072], recipes="gathered")
    with pytest.raises(ArenaTooLarge) as refused:
        plan(spec, [1, 16384], max_arena_bytes=340 << 20)
    assert "path='direct'" not in str(refused.value)


@pytest.mark.parametrize(
    ("spec", "recipe"), [(MoESpec(512, 10, 4096, 256), "gathered"), (MoESpec(160, 8, 5120, 256), "gathered"), (MoESpec(32, 4, 2880, 2880), None)]
)
def test_shapes_without_a_profile_are_planned_by_the_rule_or_refused_with_the_numbers(spec: MoESpec, recipe: str | None) -> None:
    if recipe is None:
        with pytest.raises(UnsupportedShape, match=r"hidden_size=2880 is not a multiple of 128.*bf16"):
            plan(spec, [16])
        assert plan(spec, [16], fmt="bf16").buckets[0].recipe.path == "gathered"
        return
    assert [bucket.recipe.path for bucket in plan(spec, [1, 16, 4096]).buckets] == ["direct", recipe, "psum"]
