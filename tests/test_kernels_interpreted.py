"""The Triton kernels through Triton's CPU interpreter against their twins: integers and bf16 copies exactly, `combine` within one bf16 step.

Payloads in FP8 are left to the GPU tests: the interpreter casts to e4m3 differently.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphmoe import MoESpec, bounds, reference
from graphmoe.formats import ScaleFormat, w4afp8
from graphmoe.layout import RowLayout
from graphmoe.samples import random_weights
from tests import strategies
from tests.checks import bits
from tests.requantized import LAYOUTS, exact_bytes, requantized
from tests.test_formats import E4M3

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled here; tests/gpu compares them", allow_module_level=True)

from graphmoe import kernels
from graphmoe.kernels import count as count_function
from graphmoe.kernels import route as route_function
from graphmoe.kernels import route_tiles as route_tiles_function

_GUARD = 4096
# An interpreted program costs milliseconds.
few = settings(max_examples=max(5, settings().max_examples // 6))
many = settings(max_examples=max(40, settings().max_examples // 6))


def layouts(spec: MoESpec, tokens: int) -> list[RowLayout]:
    return [RowLayout.masked(spec, tokens, 64), *(RowLayout.contiguous(kind, spec, tokens, 64) for kind in ("compact", "psum"))]


@contextmanager
def guarded() -> Iterator[Callable[..., Tensor]]:
    """Makes poisoned int32 buffers with memory behind them that nothing may have written when the block ends."""
    guards = []

    def buffer(*shape: int) -> Tensor:
        size = math.prod(shape)
        memory = torch.full((size + _GUARD,), 0x7FFFFFFF, dtype=torch.int32)
        guards.append(memory[size:])
        return memory[:size].view(shape)

    yield buffer
    assert all(bool((guard == 0x7FFFFFFF).all()) for guard in guards), "something was written behind a buffer"


def followed_by_live_ids(ids: Tensor) -> Tensor:
    """The same ids in memory where more ids, of expert 0, lie behind them: what is read there must not count."""
    memory = torch.zeros(ids.numel() + _GUARD, dtype=ids.dtype)
    memory[: ids.numel()] = ids.flatten()
    return memory[: ids.numel()].view(ids.shape)


def routed(ops: object, ids: Tensor, spec: MoESpec, layout: RowLayout, *, flag: int = 0, blocks: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`count` and `route` on poisoned buffers with guards behind them: row map, groups, flag, counts of each block of tokens."""
    with guarded() as buffer:
        row_of, groups = buffer(*ids.shape), buffer(layout.group_entries)
        counts, flags = buffer(min(blocks, ids.shape[0]), spec.num_local_experts), buffer(1).fill_(flag)
        ids = followed_by_live_ids(ids)
        ops.count(ids, distinct=spec.distinct_topk, block_counts=counts, flags=flags)  # type: ignore[attr-defined]
        ops.route(ids, layout, distinct=spec.distinct_topk, block_counts=counts, row_of=row_of, groups=groups)  # type: ignore[attr-defined]
    return row_of, groups, flags, counts


@st.composite
def small_routings(draw: st.DrawFn) -> strategies.Routing:
    """At most 16 experts and 32 tokens, at least one token."""
    routing = draw(strategies.routings(spec=strategies.specs(max_experts=16, max_top_k=5), max_tokens=32))
    ids = routing.ids if routing.tokens else np.full((1, routing.spec.top_k), -1, dtype=np.int64)
    return strategies.Routing(routing.spec, ids)


@few
@given(routing=small_routings(), broken=st.booleans(), blocks=st.integers(1, 40))
def test_route_equals_its_twin_exactly(routing: strategies.Routing, broken: bool, blocks: int) -> None:
    ids = torch.from_numpy(routing.ids).int()
    if broken:
        ids[0, -1] = ids[0, 0]
    for layout in layouts(routing.spec, routing.tokens):
        got, want = (routed(ops, ids, routing.spec, layout, blocks=blocks) for ops in (kernels, reference))
        for mine, twin in zip(got, want, strict=True):
            assert torch.equal(mine, twin), layout


@pytest.mark.parametrize("block", [16, 1024])
@pytest.mark.parametrize("distinct", [True, False])
def test_route_over_several_chunks_with_every_kind_of_id(block: int, distinct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks, counts and the flag carry over chunks; ids of E and beyond, negative ones and duplicates in the first and in the last chunk."""
    for function in (count_function, route_function):
        monkeypatch.setattr(sys.modules[function.__module__], "_BLOCK", block)
    for name, value in (("_COUNTED", 32), ("_FILLED", 16)):  # two blocks' counts, and 16 rows of groups, at a time
        monkeypatch.setattr(sys.modules[route_function.__module__], name, value)
    spec = MoESpec(5, 4, 128, 128, distinct_topk=distinct)
    clean = torch.stack([torch.roll(torch.arange(5), t)[:4] for t in range(17)]).int()
    clean[2] = torch.tensor([5, 0, -1, 6])
    clean[9] = torch.tensor([-5, 2**31 - 1, 4, 5])
    for broken in ((), (0,), (16,), (0, 8, 16)):
        ids = clean.clone()
        for token in broken:
            ids[token, 3] = ids[token, 1]
        for layout in layouts(spec, 17):
            mine, twin = routed(kernels, ids, spec, layout, blocks=7), routed(reference, ids, spec, layout, blocks=7)
            for got, want in zip(mine, twin, strict=True):
                assert torch.equal(got, want), f"{layout} broken={broken}"
            assert int(mine[2]) == (1 if distinct and broken else 0)
            if distinct:
                assert int((mine[0] == -2).sum()) == 2 * len(broken)


def test_route_where_experts_fill_the_bins() -> None:
    """E = 16, a power of two: no bin is left for a sentinel."""
    spec = MoESpec(16, 3, 128, 128)
    ids = torch.stack([torch.tensor([15, t % 15, 16 if t % 2 else -1]) for t in range(9)]).int()
    for layout in layouts(spec, 9):
        for got, want in zip(routed(kernels, ids, spec, layout), routed(reference, ids, spec, layout), strict=True):
            assert torch.equal(got, want), layout


@pytest.mark.parametrize("ops", [kernels, reference], ids=["kernels", "reference"])
@pytest.mark.parametrize("distinct", [True, False])
def test_no_route_lowers_the_flag(ops: object, distinct: bool) -> None:
    spec = MoESpec(5, 2, 128, 128, distinct_topk=distinct)
    for ids in (torch.tensor([[0, 1], [4, 2]]), torch.tensor([[-1, 5]]), torch.tensor([[3, 3]])):
        for layout in layouts(spec, len(ids)):
            assert int(routed(ops, ids.int(), spec, layout, flag=1)[2]) == 1, layout
        assert int(tiled(ops, ids.int(), torch.zeros(len(ids), 128).bfloat16(), spec, 16, flag=1)[3]) == 1


@few
@given(routing=small_routings())
def test_a_route_fills_exactly_the_rows_it_owns(routing: strategies.Routing) -> None:
    """Rows are distinct, inside the bound, in their expert's segment; every row-map entry is -1 or a live expert."""
    spec = routing.spec
    counts = bounds.expert_counts(routing.ids, spec.num_local_experts)
    for layout in layouts(spec, routing.tokens):
        row_of, groups, flags, _ = routed(kernels, torch.from_numpy(routing.ids).int(), spec, layout)
        rows = row_of[row_of >= 0].tolist()
        assert len(set(rows)) == len(rows) == sum(counts)
        assert all(row < layout.rows for row in rows)
        assert int(flags) == 0
        local = torch.from_numpy(routing.ids)
        here = (local >= 0) & (local < spec.num_local_experts)
        assert torch.equal(row_of >= 0, here)
        if layout.kind == "compact":
            live = torch.full((layout.rows,), -1, dtype=torch.int32)
            live[row_of[here].long()] = local[here].int()
            assert torch.equal(groups, live)
        elif layout.kind == "masked":
            assert groups.tolist() == counts
            assert torch.equal(row_of[here].long() // layout.segment_rows, local[here])
        else:
            starts = [end - count for end, count in zip(groups.tolist(), counts, strict=True)]
            assert all(start % layout.align == 0 for start in starts)


@few
@given(routing=small_routings(), seed=st.integers(0, 1000))
def test_scatter_and_combine(routing: strategies.Routing, seed: int) -> None:
    spec, tokens = routing.spec, routing.tokens
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, spec.hidden_size, generator=generator).bfloat16()
    weights = torch.rand(tokens, spec.top_k, generator=generator)
    for layout in layouts(spec, tokens):
        row_of, *_ = routed(reference, torch.from_numpy(routing.ids), spec, layout)
        weights[row_of < 0] = torch.nan
        filled = []
        for ops in (kernels, reference):
            rows = torch.full((layout.segments, layout.segment_rows, spec.hidden_size), torch.nan, dtype=torch.bfloat16)
            ops.scatter(x, row_of, rows=rows, scales=None, scale_format=None)
            filled.append(rows)
        assert torch.equal(bits(filled[0]), bits(filled[1]))
        if routing.tokens > 1:
            row_of[1, 0] = -2
        outs = []
        for ops in (kernels, reference):
            out = torch.full_like(x, 99.0)
            ops.combine(filled[1], row_of, weights, scale=spec.routed_scaling_factor, out=out)
            outs.append(out.float())
        mine, twin = outs
        assert torch.equal(mine.isnan(), twin.isnan())
        assert bool(((mine - twin).abs() <= twin.abs() * 2.0**-7 + 1e-6)[~twin.isnan()].all())


@pytest.mark.parametrize("top_k", [1, 16, 17, 40])
def test_combine_of_few_and_of_many_slots(top_k: int) -> None:
    """Few are asked for at once, many one by one; every third has no row here, and the last token broke a promise."""
    rows, weights = torch.randn(1, 2 * top_k, 128).bfloat16(), torch.rand(2, top_k)
    row_of = torch.randperm(2 * top_k).int().view(2, top_k)
    row_of[:, 2::3] = -1
    for broken in (False, True):
        row_of[1, top_k - 1] = -2 if broken else -1
        outs = []
        for ops in (kernels, reference):
            out = torch.full((2, 128), 9.0).bfloat16()
            ops.combine(rows, row_of, weights, scale=0.5, out=out)
            outs.append(out.float())
        assert bool(outs[0][1].isnan().all()) == broken
        torch.testing.assert_close(*outs, rtol=2.0**-7, atol=1e-6, equal_nan=True)


def with_guard(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """bf16 `[rows, columns]` and the memory right behind it, which holds 7."""
    memory = torch.full((rows * columns + 1024,), 7.0).bfloat16()
    return memory[: rows * columns].view(rows, columns), memory[rows * columns :]


@pytest.mark.parametrize("columns", [384, 1152, 64])
def test_nothing_is_written_behind_the_last_row(columns: int) -> None:
    """Widths that are no multiple of what a program writes at once."""
    x, row_of = torch.randn(2, columns).bfloat16(), torch.tensor([[0], [1]], dtype=torch.int32)
    rows, behind_rows = with_guard(2, columns)
    kernels.scatter(x, row_of, rows=rows[None], scales=None, scale_format=None)
    assert torch.equal(rows, x)
    out, behind_out = with_guard(2, columns)
    kernels.combine(rows[None], row_of, torch.ones(2, 1), scale=1.0, out=out)
    assert torch.equal(out, x)
    hidden, behind_hidden = with_guard(2, columns)
    kernels.act(torch.zeros(1, 2, 2 * columns).bfloat16(), row_of, rows=hidden[None], scales=None, scale_format=None)
    assert bool((hidden == 0).all())
    staged, behind_staged = with_guard(2, columns)
    kernels.stage(x, row_of, torch.ones(2, 1), x_out=staged, ids_out=torch.empty_like(row_of), weights_out=torch.empty(2, 1))
    assert torch.equal(staged, x)
    for guard in (behind_rows, behind_out, behind_hidden, behind_staged):
        assert bool((guard == 7).all())


FAR_ROW = 2**23
"""In 512 columns it starts at element 2^32: an offset that 32 bits hold only as 0."""


def near_and_far(columns: int) -> tuple[Tensor, Tensor]:
    """bf16 rows 0 and `FAR_ROW` of one matrix of zeros `[1, FAR_ROW + 1, columns]`, each as `[1, 1, columns]`; what nobody writes takes no memory.

    Triton's interpreter copies the storage of an argument: row 0 has one of its own that ends there.
    """
    nbytes = 2 * columns * (FAR_ROW + 1)
    with tempfile.TemporaryFile() as file:
        file.truncate(nbytes)
        memory = mmap.mmap(file.fileno(), nbytes)
    near, far = (torch.frombuffer(memory, dtype=torch.bfloat16, count=columns, offset=2 * columns * row) for row in (0, FAR_ROW))
    return near.view(1, 1, columns), far.view(1, 1, columns)


def test_rows_beyond_32_bits_of_elements_are_found() -> None:
    values, there = torch.randn(1, 1, 1024).bfloat16(), torch.tensor([[FAR_ROW]], dtype=torch.int32)
    rows, far_rows = near_and_far(512)
    kernels.scatter(values[0, :, :512], there, rows=rows, scales=None, scale_format=None)
    assert torch.equal(far_rows, values[:, :, :512])
    assert not rows.any()
    out = torch.empty(1, 512).bfloat16()
    kernels.combine(rows, there, torch.ones(1, 1), scale=1.0, out=out)
    assert torch.equal(out, far_rows[0])

    gate_up, far_gate_up = near_and_far(1024)
    far_gate_up.copy_(values)
    rows, far_rows = near_and_far(512)
    kernels.act(gate_up, there, rows=rows, scales=None, scale_format=None)
    want = torch.empty_like(rows)
    kernels.act(values, torch.zeros_like(there), rows=want, scales=None, scale_format=None)
    assert torch.equal(far_rows, want)
    assert bool(want.any())
    assert not rows.any()


@few
@given(
    tokens=st.integers(0, 6), wide=st.booleans(), expanded=st.booleans(), dtype=st.sampled_from([torch.int32, torch.int64]), seed=st.integers(0, 1000)
)
def test_stage_equals_its_twin_exactly(tokens: int, wide: bool, expanded: bool, dtype: torch.dtype, seed: int) -> None:
    """Any strides and addresses; ids that int32 cannot hold do not wrap into live experts; the tail is routed nowhere."""
    bucket, h, k = 6, 132, 3
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, h + 1, generator=generator).bfloat16()[:, 0 if wide else 1 :][:, :h]
    ids = torch.randint(-2, 9, (k, tokens), generator=generator, dtype=dtype).T
    if dtype == torch.int64 and tokens:
        ids[0, 0], ids[0, 1] = (1 << 32) + 1, 1 - (1 << 32)
    weights = torch.rand(1, k, generator=generator).expand(tokens, k) if expanded else torch.rand(k, tokens, generator=generator).T
    results = []
    for ops in (kernels, reference):
        buffers = torch.full((bucket, h), 9.0).bfloat16(), torch.full((bucket, k), 9, dtype=torch.int32), torch.full((bucket, k), 9.0)
        ops.stage(x, ids, weights, x_out=buffers[0], ids_out=buffers[1], weights_out=buffers[2])
        results.append(buffers)
    for mine, twin in zip(*results, strict=True):
        assert torch.equal(mine, twin)
    assert bool((results[0][1][tokens:] == -1).all())
    if dtype == torch.int64 and tokens:
        assert results[0][1][0, :2].tolist() == [-1, -1]


@pytest.mark.parametrize("columns", [1, 3, 4, 5, 56])
@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_pack_equals_its_twin_exactly(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    scales = torch.exp2(torch.randint(-126, 128, (2, columns, rows), generator=generator).float()).transpose(1, 2)
    scales[0, 0, 0] = torch.nan
    outs = [torch.full((2, -(-columns // 4), -(-rows // 4) * 4), 0x7E7E7E7E, dtype=torch.int32) for _ in range(2)]
    kernels.pack(scales, out=outs[0])
    reference.pack(scales, out=outs[1])
    assert torch.equal(*outs)


def test_act_is_within_one_bf16_step_of_its_twin() -> None:
    spec = MoESpec(4, 2, 128, 256)
    layout = RowLayout.contiguous("psum", spec, 5, 64)
    row_of, *_ = routed(reference, torch.tensor([[0, 1], [1, 2], [3, -1], [2, 4], [0, 3]]), spec, layout)
    gate_up = torch.randn(layout.segments, layout.segment_rows, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    results = []
    for ops in (kernels, reference):
        rows = torch.full((layout.segments, layout.segment_rows, 256), 9.0).bfloat16()
        ops.act(gate_up, row_of, rows=rows, scales=None, scale_format=None)
        results.append(rows.float())
    mine, twin = results
    assert bool(((mine - twin).abs() <= twin.abs() * 2.0**-7 + 1e-30).all())


def tiled(ops: object, ids: Tensor, x: Tensor, spec: MoESpec, tile: int, *, flag: int = 0) -> tuple[Tensor, ...]:
    """`route_tiles` on poisoned buffers with guards behind them: row_of, tiles, members, flags."""
    tokens = ids.shape[0]
    most = bounds.compact_blocks(tokens, spec.top_k, spec.num_local_experts, tile, distinct=spec.distinct_topk)
    with guarded() as buffer:
        row_of, tiles, members, flags = buffer(tokens, spec.top_k), buffer(most, 3), buffer(most, tile), buffer(1).fill_(flag)
        ops.route_tiles(  # type: ignore[attr-defined]
            followed_by_live_ids(ids), x, experts=spec.num_local_experts, distinct=spec.distinct_topk, row_of=row_of, tiles=tiles, members=members,
            x_rows=None, x_scales=None, scale_format=None, flags=flags,
        )  # fmt: skip
    tiles[tiles[:, 2] == 0] = 0
    return row_of, tiles, members, flags


@few
@given(routing=small_routings(), broken=st.booleans(), tile=st.sampled_from([16, 32]))
def test_route_tiles_equals_its_twin_exactly(routing: strategies.Routing, broken: bool, tile: int) -> None:
    ids, spec = torch.from_numpy(routing.ids).int(), routing.spec
    if broken:
        ids[0, -1] = ids[0, 0]
    x = torch.zeros(routing.tokens or 1, spec.hidden_size, dtype=torch.bfloat16)
    mine, twin = tiled(kernels, ids, x, spec, tile), tiled(reference, ids, x, spec, tile)
    for got, want in zip(mine, twin, strict=True):
        assert torch.equal(got, want)
    row_of, tiles, members, _ = mine
    # What the GEMMs rely on: every live assignment is in exactly one tile, of its expert, at its position, as its token.
    found = {}
    for number, (expert, first, count) in enumerate(tiles.tolist()):
        for slot in range(count):
            found[first + slot] = (expert, int(members[number, slot]))
    live = {int(row): (int(ids[t, k]), t) for t, line in enumerate(row_of) for k, row in enumerate(line) if row >= 0}
    assert found == live
    assert sorted(live) == list(range(len(live)))


@pytest.mark.parametrize("broken", [0, 36])
@pytest.mark.parametrize("block", [16, 1024])
def test_route_tiles_over_several_chunks(block: int, broken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[route_tiles_function.__module__], "_BLOCK", block)
    spec = MoESpec(5, 4, 128, 128)
    ids = torch.stack([torch.roll(torch.arange(5), t)[:4] for t in range(37)]).int()
    ids[2], ids[9], ids[broken, 3] = torch.tensor([5, 0, -1, 6]), torch.tensor([-5, 2**31 - 1, 4, 5]), ids[broken, 1]
    x = torch.zeros(37, 128, dtype=torch.bfloat16)
    for got, want in zip(tiled(kernels, ids, x, spec, 16), tiled(reference, ids, x, spec, 16), strict=True):
        assert torch.equal(got, want)


def small_experts(spec: MoESpec) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    e, h, i = spec.num_local_experts, spec.hidden_size, spec.intermediate_size
    return tuple(torch.randn(shape, generator=generator).bfloat16() * shape[-1] ** -0.5 for shape in ((e, 2 * i, h), (e, h, i)))  # type: ignore[return-value]


def near(mine: Tensor, twin: Tensor, scale: float) -> bool:
    return bool(((mine.float() - twin.float()).abs() <= 2.0**-6 * twin.float().abs() + 2.0**-7 * scale).all())


@pytest.mark.parametrize(("width", "block_rows"), [(128, 128), (192, 128), (192, 64)])
def test_gathered_gemms_are_near_their_twins(width: int, block_rows: int) -> None:
    """With a ragged last block of rows; what lies behind the live positions and in dead tiles stays as it was.

    In float32: the interpreter's `dot` takes bf16 for integers.
    """
    spec, tokens, tile = MoESpec(4, 2, 192, width), 21, 16
    w13, w2 = (weight.float() for weight in small_experts(spec))
    x = torch.randn(tokens, 192, generator=torch.Generator().manual_seed(1))
    ids = torch.stack([torch.tensor([t % 2, 3 if t % 3 else -1]) for t in range(tokens)]).int()
    _, tiles, members, _ = tiled(reference, ids, x, spec, tile)
    launch = {"block_rows": block_rows, "stages": 2, "warps": 4}
    results = []
    for ops in (kernels, reference):
        act, rows = torch.full((tokens * 2 + 1, width), 9.0), torch.full((tokens * 2 + 1, 192), 9.0)
        ops.gather_up(x, None, tiles, members, w13, None, act=act, act_scales=None, scale_format=None, **launch)
        ops.gather_down(act, None, tiles, w2, None, tile=tile, rows=rows, **launch)
        results.append((act, rows))
    for mine, twin in zip(*results, strict=True):
        assert near(mine, twin, 1.0)
        live = int(tiles[:, 2].sum())
        assert bool((mine[live:] == 9).all())


@pytest.mark.parametrize(("block_rows", "tile"), [(128, 16), (64, 32)])
def test_int4_gemms_are_near_their_twins(block_rows: int, tile: int) -> None:
    """Scales of the result say that the sums are right; its payload the interpreter rounds in its own way. Activations are integers, exact in e4m3,
    with scales of their own, a whole group or a half; all 16 weight values occur."""
    spec, tokens, width = MoESpec(4, 2, 256, 256), 21, 256
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-8, 9, shape, generator=generator).float().to(torch.float8_e4m3fn)  # noqa: E731
    scales = lambda *shape: torch.rand(shape, generator=generator) + 0.5  # noqa: E731
    weights = [torch.randint(-8, 8, (4, rows, 256), generator=generator, dtype=torch.int8) for rows in (2 * width, 256)]
    (w13, w13_scale), (w2, w2_scale) = (w4afp8.prepare(w4afp8.pack(values), (scales(*values.shape[:2], 2) / 64).bfloat16()) for values in weights)
    x, x_scales, act_in, act_scales_in = (
        draw(tokens, 256),
        scales(tokens, 2),
        draw(tokens * 2 + 1, width),
        scales(tokens * 2 + 1, width // block_rows),
    )
    ids = torch.stack([torch.tensor([t % 2, 3 if t % 3 else -1]) for t in range(tokens)]).int()
    _, tiles, members, _ = tiled(reference, ids, x.float().bfloat16(), spec, tile)
    live, launch, results = int(tiles[:, 2].sum()), {"block_rows": block_rows, "stages": 2, "warps": 4}, []
    for ops in (kernels, reference):
        act, act_scales = torch.full((tokens * 2 + 1, width), 9.0).to(torch.float8_e4m3fn), torch.full((tokens * 2 + 1, width // block_rows), 7.0)
        rows = torch.full((tokens * 2 + 1, 256), 9.0).bfloat16()
        ops.gather_up_w4(x, x_scales, tiles, members, w13, w13_scale, act=act, act_scales=act_scales, **launch)
        ops.gather_down_w4(act_in, act_scales_in, tiles, w2, w2_scale, tile=tile, rows=rows, **launch)
        results.append((act.float(), act_scales, rows))
    (act, act_scales, rows), (act_twin, scales_twin, rows_twin) = results
    torch.testing.assert_close(act_scales, scales_twin, rtol=1e-5, atol=0)
    assert float(((act - act_twin).abs() <= act_twin.abs() / 8 + 2.0**-6).float().mean()) > 0.95
    assert near(rows, rows_twin, 1.0)
    for stale in (act[live:] == 9, act_scales[live:] == 7, rows[live:] == 9):
        assert bool(stale.all())


def test_int4_gemms_with_one_scale_are_near_their_twins() -> None:
    """One scale for all tokens and one for all results; a result beyond the second saturates, what is not finite is NaN."""
    spec, tokens, width = MoESpec(4, 2, 256, 256), 21, 256
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randint(-8, 8, (4, rows, 256), generator=generator, dtype=torch.int8) for rows in (2 * width, 256)]
    (w13, w13_scale), (w2, w2_scale) = (w4afp8.prepare(w4afp8.pack(each), torch.full((*each.shape[:2], 2), 2.0**-8).bfloat16()) for each in weights)
    x = torch.randint(-8, 9, (tokens, 256), generator=generator).float()
    x[5, 100] = float("nan")
    x = x.to(torch.float8_e4m3fn)
    ids = torch.stack([torch.tensor([t % 2, 3 if t % 3 else -1]) for t in range(tokens)]).int()
    _, tiles, members, _ = tiled(reference, ids, torch.zeros(tokens, 256).bfloat16(), spec, 16)
    live, launch, results = int(tiles[:, 2].sum()), {"block_rows": 128, "stages": 2, "warps": 4}, []
    for ops in (kernels, reference):
        act, rows = torch.full((tokens * 2 + 1, width), 9.0).to(torch.float8_e4m3fn), torch.full((tokens * 2 + 1, 256), 9.0).bfloat16()
        ops.gather_up_w4(x, torch.tensor(0.5), tiles, members, w13, w13_scale, act=act, act_scales=torch.tensor(2.0**-9), **launch)
        taken = torch.randint(-8, 9, act.shape, generator=torch.Generator().manual_seed(1)).float().to(torch.float8_e4m3fn)
        ops.gather_down_w4(taken, torch.tensor(0.25), tiles, w2, w2_scale, tile=16, rows=rows, **launch)
        results.append((act.float(), rows))
    (act, rows), (act_twin, rows_twin) = results
    bad = act_twin.isnan()
    assert 0 < int(bad.any(1).sum()) <= 2
    assert bool((act_twin.abs() == 448).any()), "nothing saturated"
    same = (act - act_twin).abs() <= act_twin.abs() / 8 + 2.0**-6
    assert float(same[~bad].float().mean()) > 0.95
    assert near(rows, rows_twin, 1.0)
    assert bool((act[live:] == 9).all() and (rows[live:] == 9).all())


@pytest.mark.parametrize("slots", [0, 1])
@pytest.mark.parametrize(("fmt", "width"), [("bf16", 128), ("bf16", 192), ("bf16", 704), ("fp8_block", 256), ("ue8m0", 640)])
def test_gemvs_are_near_their_twins(fmt: str, width: int, slots: int) -> None:
    """One step of columns, a ragged one, more than are unrolled; NaN router weights on sentinels; an id beyond E named twice breaks no promise."""
    h = 192 if fmt == "bf16" else 256
    spec, tokens = MoESpec(4, 3, h, width), 4
    w = random_weights(spec, fmt, seed=5)
    x = torch.randn(tokens, h, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.tensor([[0, -1, 3], [4, -1, 2**31 - 1], [4, 4, 0], [2, 2, 1]], dtype=torch.int32)
    router = torch.tensor([[0.5, torch.nan, 0.25], [torch.nan] * 3, [torch.nan, torch.nan, 1.0], [1.0, 0.5, 0.25]])
    for distinct in (True, False):
        results = []
        for ops in (kernels, reference):
            act, out = torch.full((tokens * 3, width), torch.nan).bfloat16(), torch.full((tokens, h), 9.0).bfloat16()
            flags = torch.zeros(1).int()
            ops.gemv_up(x, ids, w.w13, w.w13_scale_inv, block_rows=64, step=128, stages=1, warps=4, act=act)
            down = {"scale": 1.5, "distinct": distinct, "block_rows": 32, "step": 128, "slots": slots, "warps": 4, "flags": flags}
            ops.gemv_down(act, ids, router, w.w2, w.w2_scale_inv, out=out, **down)
            results.append((act, out, flags))
        (act, out, flags), (act_twin, out_twin, flags_twin) = results
        assert torch.equal(act.isnan(), act_twin.isnan())
        assert near(act.nan_to_num(0.0), act_twin.nan_to_num(0.0), 1.0)
        assert near(out[:3], out_twin[:3], 1.0)
        assert bool((out[1] == 0).all())
        assert bool(out[3].isnan().all() and out_twin[3].isnan().all()) == distinct
        assert distinct or near(out[3:], out_twin[3:], 4.0)
        assert int(flags) == int(flags_twin) == int(distinct)
        kernels.gemv_down(act, ids[:2], router[:2], w.w2, w.w2_scale_inv, out=out[:2], **down | {"flags": flags.fill_(1)})
        assert int(flags) == 1, "a good call does not lower the flag"


@pytest.mark.parametrize("scale_format", list(ScaleFormat))
def test_scales_of_scatter_equal_their_twins_exactly(scale_format: ScaleFormat) -> None:
    """Groups whose largest values are zero, subnormal, at and next to borders of the scale, huge, infinite and NaN. (Payloads differ from the
    compiled ones: the interpreter rounds to e4m3 otherwise.)
    """
    amax = [0.0, 1e-40, 2.0**-126, 448 * 2.0**-126, 448.0, 450.0, 1.75, 1.7578125, 2.0**127, 3.38e38, torch.inf, torch.nan, 1.0, 0.3, 3.5]
    x = torch.zeros(3, 640).bfloat16()
    x.view(15, 128)[:, 5] = torch.tensor(amax).bfloat16()
    x.view(15, 128)[4:10, 77] = -0.25
    row_of = torch.tensor([[2, -1], [0, 3], [1, -1]], dtype=torch.int32)
    results = []
    for ops in (kernels, reference):
        packed = scale_format is ScaleFormat.UE8M0_PACKED
        scales = torch.full((1, 2 if packed else 5, 4), 7, dtype=torch.int32) if packed else torch.full((1, 5, 4), 7.0)
        ops.scatter(x, row_of, rows=torch.zeros(1, 4, 640).to(torch.float8_e4m3fn), scales=scales, scale_format=scale_format)
        results.append(scales if packed else torch.where(scales.isnan(), torch.nan, scales).view(torch.int32))
    assert torch.equal(*results)


@many
@given(
    rows=strategies.scaled_rows(exact=True),
    packed=st.booleans(),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    block_rows=st.sampled_from([1, 2, 4]),
    block_groups=st.sampled_from([1, 2, 8]),
)
def test_requantising_equals_its_twin_where_e4m3_is_exact(
    rows: strategies.ScaledRows, packed: bool, layouts: tuple[str, str, str], block_rows: int, block_groups: int
) -> None:
    """Values that no rounding moves, or that saturate: the interpreter has those right. Rounding and NaN are left to the twin and to the GPU."""
    launch = {"block_rows": block_rows, "block_groups": block_groups, "warps": 4}
    (mine, memory), (twin, twin_memory) = (requantized(ops, rows, packed=packed, layouts=layouts, **launch) for ops in (kernels, reference))
    assert torch.equal(mine, twin)
    assert torch.equal(memory, twin_memory)
    assert (mine.numpy()[rows.alive] == exact_bytes(rows, E4M3)).all()
