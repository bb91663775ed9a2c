"""The arena is what was planned, byte for byte; poison reaches all scratch and nothing else; a guard names the buffer that broke it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphmoe import MoERuntime, MoESpec, Recipe, plan
from graphmoe.arena import GUARD_BYTE, Arena
from graphmoe.paths.base import Stage
from graphmoe.planner import BucketPlan, PlacedBuffer, Plan
from tests import strategies
from tests.checks import POISONS, random_weights

CPU = torch.device("cpu")
WISHES = st.sampled_from(
    ["auto", *(Recipe("masked", row_tile=tile) for tile in (64, 128)), *(Recipe(path, block_e=64) for path in ("compact", "psum"))]
)


def small_plans(guard_bytes: st.SearchStrategy[int] | None = None) -> st.SearchStrategy[Plan]:
    arguments = strategies.plan_arguments(WISHES, guard_bytes=guard_bytes, max_experts=6, max_top_k=4, max_tokens=150, max_dim=256)
    return arguments.map(lambda drawn: plan(**drawn))


NOT_THE_GUARD_BYTE = st.integers(0, 255).filter(lambda value: value != GUARD_BYTE)
GUARDED = small_plans(st.one_of(st.integers(1, 600), st.sampled_from([256, 512, 4096])))


def all_bytes(arena: Arena) -> Tensor:
    """uint8 `[arena_bytes]`: the storage that all views share."""
    return torch.empty(0, dtype=torch.uint8).set_(arena.view(arena.plan.static[0]).untyped_storage())


def buffers_of(arena: Arena) -> Iterator[PlacedBuffer]:
    yield from arena.plan.static
    for bucket in arena.plan.buckets:
        yield from bucket.buffers


def as_bytes(view: Tensor) -> Tensor:
    return view.view(-1).view(torch.uint8)


@given(made=small_plans())
def test_the_planned_bytes_are_the_allocated_bytes(made: Plan) -> None:
    arena = Arena(made, CPU)
    assert arena.nbytes == made.arena_bytes == all_bytes(arena).numel()
    assert arena.base == all_bytes(arena).data_ptr()


@given(made=small_plans())
def test_a_view_is_the_planned_buffer_at_its_place(made: Plan) -> None:
    arena = Arena(made, CPU)
    for buffer in buffers_of(arena):
        view = arena.view(buffer)
        assert tuple(view.shape) == buffer.shape
        assert view.dtype == getattr(torch, buffer.dtype)
        assert view.device == CPU
        assert view.is_contiguous()
        assert view.data_ptr() == arena.base + buffer.offset
        assert view.nbytes == buffer.nbytes
        assert view.data_ptr() + view.nbytes + made.guard_bytes <= arena.base + arena.nbytes


@given(made=small_plans(), data=st.data())
def test_a_view_of_fewer_tokens_is_the_first_rows(made: Plan, data: st.DataObject) -> None:
    arena = Arena(made, CPU)
    tokens = data.draw(st.integers(0, made.ladder.largest))
    for buffer in made.static:
        if buffer.name == "flags":
            continue
        view = arena.view(buffer, tokens)
        assert tuple(view.shape) == (tokens, *buffer.shape[1:])
        assert view.is_contiguous()
        assert tokens == 0 or view.data_ptr() == arena.base + buffer.offset


@given(made=small_plans())
def test_what_is_alive_together_keeps_its_bytes(made: Plan) -> None:
    """Write every view that is alive in a stage, then read them all back: a shared byte holds only the last value."""
    arena = Arena(made, CPU)
    for bucket in made.buckets:
        for stage in Stage:
            alive = [buffer for buffer in (*made.static, *bucket.buffers) if buffer.first <= stage <= buffer.last]
            for value, buffer in enumerate(alive):
                as_bytes(arena.view(buffer)).fill_(value)
            for value, buffer in enumerate(alive):
                assert bool((as_bytes(arena.view(buffer)) == value).all()), f"bucket {bucket.tokens}, stage {stage.name}: {buffer.name}"


def test_a_sealed_arena_hands_out_no_view_and_leaves_the_others_alive() -> None:
    made = plan(MoESpec(8, 2, 256, 128), [4], recipes="psum")
    arena = Arena(made, CPU)
    views = {buffer.name: arena.view(buffer) for buffer in buffers_of(arena)}
    arena.seal()
    for buffer in buffers_of(arena):
        with pytest.raises(RuntimeError, match=rf"sealed.*'{buffer.name}'"):
            arena.view(buffer)
    arena.poison(0x7FFFFFFF)
    assert bool((views["row_of"] == 2**31 - 1).all())
    assert arena.nbytes == made.arena_bytes


def test_a_built_runtime_has_sealed_its_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Arena] = []
    allocate = Arena.__init__

    def recorded(arena: Arena, *arguments: Any) -> None:
        allocate(arena, *arguments)
        made.append(arena)

    monkeypatch.setattr(Arena, "__init__", recorded)
    spec = MoESpec(4, 2, 128, 128)
    with MoERuntime(spec, random_weights(spec, "bf16"), buckets=[1, 4], device="cpu"):
        [arena] = made
        for buffer in buffers_of(arena):
            with pytest.raises(RuntimeError, match=rf"sealed.*'{buffer.name}'"):
                arena.view(buffer)


@pytest.mark.parametrize("word", POISONS, ids=hex)
@given(made=small_plans())
def test_poison_fills_all_scratch_and_no_static_byte(word: int, made: Plan) -> None:
    arena = Arena(made, CPU)
    memory = all_bytes(arena)
    memory.fill_(0x5A)
    arena.poison(word)
    assert bool((memory[: made.static_bytes] == 0x5A).all())
    pattern = torch.tensor(list((word & 0xFFFFFFFF).to_bytes(4, "little")), dtype=torch.uint8)
    scratch = memory[made.static_bytes :].view(-1, 4)
    assert scratch.numel() == made.arena_bytes - made.static_bytes > 0
    assert bool((scratch == pattern).all())


@pytest.mark.parametrize(
    ("word", "name", "holds"),
    [
        (0x7FC00000, "act_scales", lambda view: view.isnan()),
        (-1, "down_rows", lambda view: view.isnan()),
        (-1, "x_rows", lambda view: view.float().isnan()),
        (-1, "act_scales", lambda view: view.isnan()),
        (-1, "row_of", lambda view: view == -1),
        (0x7FFFFFFF, "row_of", lambda view: view == 2**31 - 1),
    ],
)
def test_poison_is_what_it_is_meant_to_be_in_each_dtype(word: int, name: str, holds: Any) -> None:
    made = plan(MoESpec(8, 2, 256, 128), [4], recipes="psum")
    arena = Arena(made, CPU)
    arena.poison(word)
    [buffer] = [buffer for buffer in made.buckets[0].buffers if buffer.name == name]
    assert bool(holds(arena.view(buffer)).all())


def _draw_bucket(data: st.DataObject, made: Plan) -> tuple[BucketPlan, list[PlacedBuffer]]:
    bucket = data.draw(st.sampled_from(made.buckets))
    return bucket, [*made.static, *bucket.buffers]


@given(made=GUARDED, data=st.data())
def test_one_byte_past_a_buffer_names_that_buffer(made: Plan, data: st.DataObject) -> None:
    """Any buffer, any guard size, any byte of the guard, any value but the guard's own."""
    arena = Arena(made, CPU)
    memory = all_bytes(arena)
    bucket, buffers = _draw_bucket(data, made)
    memory.zero_()
    arena.fill_guards(bucket)
    assert arena.broken_guards(bucket) == []
    buffer = data.draw(st.sampled_from(buffers))
    past = data.draw(st.one_of(st.just(0), st.just(made.guard_bytes - 1), st.integers(0, made.guard_bytes - 1)))
    memory[buffer.offset + buffer.nbytes + past] = data.draw(NOT_THE_GUARD_BYTE)
    assert arena.broken_guards(bucket) == [buffer.name]
    arena.fill_guards(bucket)
    assert arena.broken_guards(bucket) == []


@given(made=GUARDED, data=st.data())
def test_several_broken_guards_are_all_named(made: Plan, data: st.DataObject) -> None:
    arena = Arena(made, CPU)
    bucket, buffers = _draw_bucket(data, made)
    arena.fill_guards(bucket)
    broken = data.draw(st.lists(st.sampled_from(buffers), unique_by=lambda buffer: buffer.name))
    for buffer in broken:
        all_bytes(arena)[buffer.offset + buffer.nbytes] = GUARD_BYTE ^ 1
    assert sorted(arena.broken_guards(bucket)) == sorted(buffer.name for buffer in broken)


@given(made=GUARDED, data=st.data(), value=NOT_THE_GUARD_BYTE)
def test_writing_all_of_every_buffer_breaks_no_guard(made: Plan, data: st.DataObject, value: int) -> None:
    """A guard that lies inside a buffer; and filling the guards must not touch what the buffers hold."""
    arena = Arena(made, CPU)
    bucket, buffers = _draw_bucket(data, made)
    arena.fill_guards(bucket)
    views = [as_bytes(arena.view(buffer)) for buffer in buffers]
    for view in views:
        view.fill_(value)
    assert arena.broken_guards(bucket) == []
    arena.fill_guards(bucket)
    assert all(bool((view == value).all()) for view in views)


@given(made=GUARDED)
def test_guards_of_a_bucket_lie_between_its_buffers(made: Plan) -> None:
    """Every guard byte is written by `fill_guards`, and belongs to one guard and no buffer."""
    arena = Arena(made, CPU)
    for bucket in made.buckets:
        memory = all_bytes(arena).zero_()
        arena.fill_guards(bucket)
        buffers = (*made.static, *bucket.buffers)
        assert int((memory == GUARD_BYTE).sum()) == made.guard_bytes * len(buffers)
        spans = [(buffer.offset, buffer.offset + buffer.nbytes + made.guard_bytes) for buffer in buffers]
        assert not any(a < d and c < b for (a, b), (c, d) in combinations(spans, 2))


def test_without_guards_nothing_is_written_and_nothing_is_broken() -> None:
    made = plan(MoESpec(8, 2, 256, 128), [4], recipes="psum")
    arena = Arena(made, CPU)
    memory = all_bytes(arena).zero_()
    arena.fill_guards(made.buckets[0])
    assert not memory.any()
    assert arena.broken_guards(made.buckets[0]) == []
