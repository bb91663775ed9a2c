"""Every Triton kernel against its twin, compiled, on fresh random inputs and poisoned outputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from graphmoe import ExpertWeights, MoERuntime, MoESpec, Recipe, bounds, kernels, reference
from graphmoe.formats import BLOCK, ScaleFormat
from graphmoe.formats.ue8m0 import unpack
from graphmoe.layout import RowLayout
from graphmoe.paths.grouped import route_blocks
from tests.checks import assert_rows, bits, oracle, random_inputs, random_weights, routings

SPECS = {
    "qwen3-30b-a3b": MoESpec(128, 8, 2048, 768),
    "many experts": MoESpec(1000, 9, 256, 128),
    "one expert": MoESpec(1, 1, 128, 128),
    "K = E": MoESpec(6, 6, 384, 256),
    "K > E": MoESpec(64, 8, 128, 128, num_local_experts=3, expert_offset=7),
    "duplicates allowed": MoESpec(12, 4, 256, 128, distinct_topk=False),
}
TOKENS = (1, 257)


def layouts(spec: MoESpec, tokens: int) -> list[RowLayout]:
    return [RowLayout.masked(spec, tokens, 128), *(RowLayout.contiguous(kind, spec, tokens, b) for kind in ("compact", "psum") for b in (64, 128))]


def routed(ops: object, ids: Tensor, spec: MoESpec, layout: RowLayout) -> tuple[Tensor, ...]:
    def poisoned(*shape: int) -> Tensor:
        return torch.full(shape, 0x7FFFFFFF, dtype=torch.int32, device="cuda")

    row_of, groups, flags = poisoned(*ids.shape), poisoned(layout.group_entries), torch.zeros(1, dtype=torch.int32, device="cuda")
    counts, ids = poisoned(route_blocks(len(ids)), spec.num_local_experts), ids.clamp(max=2**31 - 1).int()
    ops.count(ids, distinct=spec.distinct_topk, block_counts=counts, flags=flags)  # type: ignore[attr-defined]
    ops.route(ids, layout, distinct=spec.distinct_topk, block_counts=counts, row_of=row_of, groups=groups)  # type: ignore[attr-defined]
    return row_of, groups, flags, counts


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", SPECS)
def test_route_equals_its_twin_exactly(name: str, tokens: int) -> None:
    spec = SPECS[name]
    for layout in layouts(spec, tokens):
        for routing, ids in routings(spec, tokens, seed=tokens, device="cuda"):
            for broken in (False, True):
                if broken:
                    ids[:, -1] = ids[:, 0]
                got, want = routed(kernels, ids, spec, layout), routed(reference, ids, spec, layout)
                for mine, twin in zip(got, want, strict=True):
                    assert torch.equal(mine, twin), f"{layout} {routing} broken={broken}"


def tiled(ops: object, ids: Tensor, x: Tensor, spec: MoESpec, tile: int, scale_format: ScaleFormat | None) -> dict[str, Tensor]:
    """`route_tiles` on poisoned buffers."""
    tokens, h = x.shape
    most = bounds.compact_blocks(tokens, spec.top_k, spec.num_local_experts, tile, distinct=spec.distinct_topk)
    out = {name: torch.full(shape, 0x7FFFFFFF, dtype=torch.int32, device="cuda") for name, shape in (("row_of", ids.shape), ("tiles", (most, 3)))}
    out["members"] = torch.full((most, tile), 0x7FFFFFFF, dtype=torch.int32, device="cuda")
    out["flags"] = torch.zeros(1, dtype=torch.int32, device="cuda")
    rows = {} if scale_format is None else {"x_rows": torch.zeros(tokens, h, device="cuda").to(torch.float8_e4m3fn)}
    scales = {} if scale_format is None else {"x_scales": torch.full((tokens, h // BLOCK), 7.0, device="cuda")}
    ops.route_tiles(  # type: ignore[attr-defined]
        ids.clamp(max=2**31 - 1).int(), x, experts=spec.num_local_experts, distinct=spec.distinct_topk, scale_format=scale_format,
        **out, **({"x_rows": None, "x_scales": None} | rows | scales),
    )  # fmt: skip
    out["tiles"][out["tiles"][:, 2] == 0] = 0
    return {**out, **{name: value.view(torch.uint8) for name, value in rows.items()}, **scales}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("name", "scale_format", "tile"),
    [*((name, None, 16) for name in SPECS), ("qwen3-30b-a3b", ScaleFormat.FLOAT32, 32), ("K > E", ScaleFormat.UE8M0, 64)],
)
def test_route_tiles_equals_its_twin_exactly(name: str, tokens: int, scale_format: ScaleFormat | None, tile: int) -> None:
    spec = SPECS[name]
    x = torch.randn(tokens, spec.hidden_size, device="cuda").bfloat16()
    x[0, 5], x[tokens // 2, 7], x[-1] = torch.inf, torch.nan, 0
    for routing, ids in routings(spec, tokens, seed=tokens, device="cuda"):
        for broken in (False, True):
            if broken:
                ids[:, -1] = ids[:, 0]
            got, want = (tiled(ops, ids, x, spec, tile, scale_format) for ops in (kernels, reference))
            for key, twin in want.items():
                same = torch.equal(got[key], twin) if not twin.is_floating_point() else torch.equal(got[key].nan_to_num(-1), twin.nan_to_num(-1))
                if key == "x_rows":  # what a group with NaN or infinity holds means nothing: its scale is NaN
                    finite = want["x_scales"].isfinite().repeat_interleave(BLOCK, -1)
                    same = torch.equal(got[key][finite], twin[finite])
                assert same, f"{key} {routing} broken={broken} tile={tile}"


def experts_of(spec: MoESpec, scale_format: ScaleFormat | None) -> ExpertWeights:
    return random_weights(spec, {None: "bf16", ScaleFormat.FLOAT32: "fp8_block", ScaleFormat.UE8M0: "ue8m0"}[scale_format], device="cuda")


@pytest.mark.parametrize(("name", "scale_format"), [("ragged", None), ("K = E", ScaleFormat.FLOAT32), ("K > E", ScaleFormat.UE8M0)])
def test_gathered_gemms_equal_their_twins(name: str, scale_format: ScaleFormat | None) -> None:
    """Launch sizes of every kind on identical inputs; rows that no position owns stay as they were."""
    spec, tokens = SPECS.get(name, MoESpec(6, 3, 448, 192)), 77
    weights = experts_of(spec, scale_format)
    x = torch.randn(tokens, spec.hidden_size, device="cuda").bfloat16()
    ids = dict(routings(spec, tokens, device="cuda"))["sentinels"]
    i, h, a = spec.intermediate_size, spec.hidden_size, tokens * spec.top_k
    for tile, rows, stages, warps in ((16, 128, 3, 4), (16, 64, 6, 4), (32, 128, 2, 8), (32, 64, 4, 8), (64, 128, 3, 8)):
        routed = tiled(reference, ids, x, spec, tile, scale_format)
        x_rows = routed["x_rows"].view(torch.float8_e4m3fn) if scale_format else x
        results = []
        for ops in (kernels, reference):
            act = torch.full((a + 1, i), 9.0, device="cuda").to(x_rows.dtype)
            act_scales = torch.full((a + 1, i // rows), 7.0, device="cuda") if scale_format else None
            ops.gather_up(
                x_rows, routed.get("x_scales"), routed["tiles"], routed["members"], weights.w13, weights.w13_scale_inv,
                block_rows=rows, stages=stages, warps=warps, act=act, act_scales=act_scales, scale_format=scale_format,
            )  # fmt: skip
            results.append((act, act_scales))
        live = int(routed["tiles"][:, 2].sum())
        (mine, mine_scales), (twin, twin_scales) = results
        where = f"tile={tile} rows={rows} stages={stages} warps={warps}"
        assert bool((mine[live:].float() == 9).all()), where
        if twin_scales is not None:
            torch.testing.assert_close(mine_scales, twin_scales, rtol=1.0 if scale_format is ScaleFormat.UE8M0 else 1e-2, atol=0)
        got, want = (
            act[:live].float() * (1.0 if scales is None else scales[:live].repeat_interleave(i // scales.shape[1], -1)) for act, scales in results
        )
        error = (got - want).norm(dim=-1) / want.norm(dim=-1)
        if scale_format:  # sums of another order move a value over a rounding border: by one e4m3 step then, and seldom
            group = want.unflatten(-1, (-1, rows)).abs().amax(-1).repeat_interleave(rows, -1)
            assert bool(((got - want).abs() <= want.abs() / 8 + group / 100).all()), where
        assert float(error.mean()) < 0.01, where
        assert float(error.max()) < (1 / 16 if scale_format else 0.005), where
        outs = []
        for ops in (kernels, reference):
            out = torch.full((a + 1, h), 9.0, device="cuda", dtype=torch.bfloat16)
            ops.gather_down(
                twin, twin_scales, routed["tiles"], weights.w2, weights.w2_scale_inv, tile=tile, block_rows=rows, stages=stages, warps=warps, rows=out
            )
            outs.append(out.float())
        assert bool((outs[0][live:] == 9).all()), where
        error = (outs[0] - outs[1])[:live].norm(dim=-1) / outs[1][:live].norm(dim=-1)
        assert float(error.max()) < 0.005, where


def test_int4_gemms_equal_their_twins() -> None:
    """Launch sizes of every kind on identical inputs; rows that no position owns stay as they were; activations of large and small groups."""
    spec, tokens = SPECS["K > E"], 77
    weights = random_weights(spec, "w4afp8", device="cuda").prepared("sm90")
    x = torch.randn(tokens, spec.hidden_size, device="cuda").bfloat16() * torch.logspace(-3, 3, tokens, device="cuda")[:, None].bfloat16()
    ids = dict(routings(spec, tokens, device="cuda"))["sentinels"]
    i, h, a = spec.intermediate_size, spec.hidden_size, tokens * spec.top_k
    for tile, rows, stages, warps in ((16, 128, 3, 4), (16, 64, 6, 4), (32, 128, 2, 8), (32, 64, 4, 8), (64, 128, 3, 8)):
        routed = tiled(reference, ids, x, spec, tile, ScaleFormat.FLOAT32)
        x_rows, live = routed["x_rows"].view(torch.float8_e4m3fn), int(routed["tiles"][:, 2].sum())
        launch, where = {"block_rows": rows, "stages": stages, "warps": warps}, f"tile={tile} rows={rows} stages={stages} warps={warps}"
        ups, downs = [], []
        for ops in (kernels, reference):
            act, act_scales = torch.full((a + 1, i), 9.0, device="cuda").to(torch.float8_e4m3fn), torch.full((a + 1, i // rows), 7.0, device="cuda")
            ops.gather_up_w4(
                x_rows,
                routed["x_scales"],
                routed["tiles"],
                routed["members"],
                weights.w13,
                weights.w13_scale_inv,
                act=act,
                act_scales=act_scales,
                **launch,
            )
            ups.append((act, act_scales))
        assert bool((ups[0][0][live:].float() == 9).all()), where
        assert bool((ups[0][1][live:] == 7).all()), where
        torch.testing.assert_close(ups[0][1][:live], ups[1][1][:live], rtol=1e-2, atol=0)
        got, want = (act[:live].float() * scales[:live].repeat_interleave(rows, -1) for act, scales in ups)
        group = want.unflatten(-1, (-1, rows)).abs().amax(-1).repeat_interleave(rows, -1)
        assert bool(((got - want).abs() <= want.abs() / 8 + group / 100).all()), where
        error = (got - want).norm(dim=-1) / want.norm(dim=-1)
        assert float(error.mean()) < 0.01, where
        assert float(error.max()) < 1 / 16, where
        for ops in (kernels, reference):
            out = torch.full((a + 1, h), 9.0, device="cuda", dtype=torch.bfloat16)
            ops.gather_down_w4(*ups[1], routed["tiles"], weights.w2, weights.w2_scale_inv, tile=tile, rows=out, **launch)
            downs.append(out.float())
        assert bool((downs[0][live:] == 9).all()), where
        error = (downs[0] - downs[1])[:live].norm(dim=-1) / downs[1][:live].norm(dim=-1)
        assert float(error.max()) < 0.005, where


def test_int4_with_the_scales_of_a_checkpoint_equals_the_oracle() -> None:
    spec = MoESpec(16, 4, 1024, 512, routed_scaling_factor=1.5)
    one = {"w13_input_scale": torch.tensor(5.0 / 448, device="cuda"), "w2_input_scale": torch.tensor(4.0 / 448, device="cuda")}
    weights = replace(random_weights(spec, "w4afp8", device="cuda"), **one)
    recipe = Recipe("gathered_w4", per_tensor=1)
    with MoERuntime(spec, weights, buckets=[1, 32], path=recipe, progress=False) as runtime:
        for tokens in (1, 20, 32):
            for name, ids in routings(spec, tokens, seed=tokens, device="cuda"):
                x, router = random_inputs(spec, tokens, seed=tokens, device="cuda")
                assert_rows(runtime(x, ids, router), oracle(x, ids, router, weights, recipe), "w4afp8", f"{name} T={tokens}", recipe=recipe)
        assert {bucket.kernels for bucket in runtime.report().buckets} == {5}


@pytest.mark.parametrize(("name", "scale_format"), [("ragged", None), ("K > E", ScaleFormat.FLOAT32)])
def test_gemvs_equal_their_twins(name: str, scale_format: ScaleFormat | None) -> None:
    spec, tokens = SPECS.get(name, MoESpec(6, 3, 448, 192)), 5
    weights = experts_of(spec, scale_format)
    x, router = random_inputs(spec, tokens, device="cuda")
    flags = torch.zeros(1, dtype=torch.int32, device="cuda")
    for routing, ids in routings(spec, tokens, device="cuda"):
        ids = ids.clamp(max=2**31 - 1).int()
        acts = [torch.full((tokens * spec.top_k, spec.intermediate_size), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        reference.gemv_up(x, ids, weights.w13, weights.w13_scale_inv, block_rows=4, step=128, stages=1, warps=4, act=acts[1])
        want = torch.empty_like(x)
        down = {"scale": 1.5, "distinct": True, "flags": flags}
        reference.gemv_down(acts[1], ids, router, weights.w2, weights.w2_scale_inv, block_rows=8, step=128, slots=0, warps=4, out=want, **down)
        for rows, step, stages, warps in ((1, 1024, 1, 4), (2, 512, 3, 8), (4, 1024, 3, 4), (8, 512, 1, 8)):
            kernels.gemv_up(
                x, ids, weights.w13, weights.w13_scale_inv, block_rows=rows, step=step, stages=stages, warps=warps, act=acts[0].fill_(torch.nan)
            )
            assert torch.equal(acts[0].isnan(), acts[1].isnan())
            torch.testing.assert_close(acts[0].nan_to_num(0.0), acts[1].nan_to_num(0.0), rtol=2.0**-6, atol=2.0**-8)
        for rows, step, slots, warps in ((4, 2048, 0, 4), (8, 256, 0, 8), (16, 128, 1, 4), (32, 256, 1, 8)):
            out = torch.full_like(x, 9.0)
            kernels.gemv_down(
                acts[1], ids, router, weights.w2, weights.w2_scale_inv, block_rows=rows, step=step, slots=slots, warps=warps, out=out, **down
            )
            assert_close_rows(out, want, f"{routing} rows={rows} step={step} slots={slots}")
    assert int(flags) == 0


def assert_close_rows(got: Tensor, want: Tensor, where: str) -> None:
    error = (got.float() - want.float()).norm(dim=-1)
    assert bool((error <= 0.005 * want.float().norm(dim=-1)).all()), where


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "K > E", "K = E"])
@pytest.mark.parametrize("scale_format", [None, *ScaleFormat], ids=str)
def test_scatter_and_act_equal_their_twins(name: str, scale_format: ScaleFormat | None) -> None:
    quantised, packed = scale_format is not None, scale_format is ScaleFormat.UE8M0_PACKED
    spec, tokens = SPECS[name], 65
    generator = torch.Generator(device="cuda").manual_seed(1)
    for layout in layouts(spec, tokens):
        _, ids = next(routings(spec, tokens, device="cuda"))
        row_of, *_ = routed(reference, ids, spec, layout)
        x = torch.randn(tokens, spec.hidden_size, generator=generator, device="cuda").bfloat16()
        x[0] = 0
        x[1, 5] = torch.inf
        x[2, 0] = torch.nan
        x[3] *= 1e-30
        x[4] *= 1e30
        gate_up = torch.randn(layout.segments, layout.segment_rows, 2 * spec.intermediate_size, generator=generator, device="cuda").bfloat16()
        for op, source, columns in (("scatter", x, spec.hidden_size), ("act", gate_up, spec.intermediate_size)):
            results, words = [], []
            for ops in (kernels, reference):
                dtype = torch.float8_e4m3fn if quantised else torch.bfloat16
                rows = torch.full((layout.segments, layout.segment_rows, columns), 0.0, device="cuda").to(dtype)
                scales = None
                if packed:
                    scales = torch.full((layout.segments, -(-columns // 512), layout.segment_rows), 0x7E7E7E7E, dtype=torch.int32, device="cuda")
                elif quantised:
                    scales = torch.full((layout.segments, columns // BLOCK, layout.segment_rows), 7.0, device="cuda")
                getattr(ops, op)(source, row_of, rows=rows, scales=scales, scale_format=scale_format)
                words.append(scales)
                floats = unpack(scales.transpose(1, 2), columns // BLOCK).transpose(1, 2) if packed else scales
                results.append((rows.float(), floats))
            (mine, mine_scales), (twin, twin_scales) = results
            if packed and op == "scatter":  # bit for bit, unused bytes included
                assert torch.equal(*words)
            if quantised:
                assert mine_scales is not None
                assert twin_scales is not None
                torch.testing.assert_close(mine_scales, twin_scales, rtol=0 if op == "scatter" else 1e-5, atol=0, equal_nan=True)
                mine *= mine_scales.transpose(1, 2).repeat_interleave(BLOCK, 2)
                twin *= twin_scales.transpose(1, 2).repeat_interleave(BLOCK, 2)
            assert torch.equal(mine.isnan(), twin.isnan())
            if op == "scatter":
                assert torch.equal(mine.nan_to_num(0.5), twin.nan_to_num(0.5)), layout
                continue
            # exp differs in its last bits between the two, so a product may fall on the other side of a rounding border: seldom, and by one step.
            step = 2.0**-3 if quantised else 2.0**-7
            assert bool(((mine - twin).abs() <= step * twin.abs()).all()), layout
            assert float(((mine - twin).abs() > 1e-5 * twin.abs()).float().mean()) < 0.01


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "K > E", "duplicates allowed"])
def test_combine_is_within_one_bf16_step_of_its_twin(name: str) -> None:
    spec, tokens = SPECS[name], 65
    for layout in layouts(spec, tokens):
        for _, ids in routings(spec, tokens, device="cuda"):
            ids[3] = ids[3, 0]
            row_of, *_ = routed(reference, ids, spec, layout)
            rows = torch.full((layout.segments, layout.segment_rows, spec.hidden_size), torch.nan, device="cuda", dtype=torch.bfloat16)
            live = row_of[row_of >= 0].long()
            rows.flatten(0, 1)[live] = torch.randn(live.numel(), spec.hidden_size, device="cuda").bfloat16()
            weights = torch.rand(tokens, spec.top_k, device="cuda")
            weights[row_of < 0] = torch.nan
            outs = []
            for ops in (kernels, reference):
                out = torch.full((tokens, spec.hidden_size), 99.0, device="cuda", dtype=torch.bfloat16)
                ops.combine(rows, row_of, weights, scale=2.5, out=out)
                outs.append(out.float())
            mine, twin = outs
            assert torch.equal(mine.isnan(), twin.isnan())
            assert bool(((mine - twin).abs() <= twin.abs() * 2.0**-7 + 1e-6)[~twin.isnan()].all())


@pytest.mark.parametrize("columns", [384, 1152, 64])
def test_nothing_is_written_behind_the_last_row(columns: int) -> None:
    """Widths that are no multiple of what a program writes at once."""

    def with_guard() -> tuple[Tensor, Tensor]:
        memory = torch.full((2 * columns + 1024,), 7.0, device="cuda", dtype=torch.bfloat16)
        return memory[: 2 * columns].view(2, columns), memory[2 * columns :]

    x = torch.randn(2, columns, device="cuda").bfloat16()
    row_of, weights = torch.tensor([[0], [1]], dtype=torch.int32, device="cuda"), torch.ones(2, 1, device="cuda")
    (rows, behind_rows), (out, behind_out), (hidden, behind_hidden), (staged, behind_staged) = (with_guard() for _ in range(4))
    kernels.scatter(x, row_of, rows=rows[None], scales=None, scale_format=None)
    kernels.combine(rows[None], row_of, weights, scale=1.0, out=out)
    kernels.stage(x, row_of, weights, x_out=staged, ids_out=torch.empty_like(row_of), weights_out=torch.empty_like(weights))
    for copied in (rows, out, staged):
        assert torch.equal(copied, x)
    kernels.act(torch.zeros(1, 2, 2 * columns, device="cuda").bfloat16(), row_of, rows=hidden[None], scales=None, scale_format=None)
    assert bool((hidden == 0).all())
    for guard in (behind_rows, behind_out, behind_hidden, behind_staged):
        assert bool((guard == 7).all())


FAR = 2**23
"""A row, or a token, that in 512 columns starts at element 2^32: an offset that 32 bits hold only as 0."""


def test_rows_beyond_32_bits_of_elements_are_found() -> None:
    values, there = torch.randn(1, 1, 1024, device="cuda").bfloat16(), torch.tensor([[FAR]], dtype=torch.int32, device="cuda")
    rows = torch.zeros(1, FAR + 1, 512, device="cuda", dtype=torch.bfloat16)
    kernels.scatter(values[0, :, :512], there, rows=rows, scales=None, scale_format=None)
    assert torch.equal(rows[:, -1:], values[:, :, :512])
    assert not rows[0, 0].any()
    out = torch.empty(1, 512, device="cuda", dtype=torch.bfloat16)
    kernels.combine(rows, there, torch.ones(1, 1, device="cuda"), scale=1.0, out=out)
    assert torch.equal(out, rows[0, -1:])
    gate_up = torch.zeros(1, FAR + 1, 1024, device="cuda", dtype=torch.bfloat16)
    gate_up[:, -1:] = values
    kernels.act(gate_up, there, rows=rows.zero_(), scales=None, scale_format=None)
    want = torch.empty(1, 1, 512, device="cuda", dtype=torch.bfloat16)
    kernels.act(values, torch.zeros_like(there), rows=want, scales=None, scale_format=None)
    assert torch.equal(rows[:, -1:], want)
    assert bool(want.any())
    assert not rows[0, 0].any()


def test_tokens_beyond_32_bits_of_elements_are_found() -> None:
    x = torch.zeros(FAR + 1, 512, device="cuda", dtype=torch.bfloat16)
    x[-1] = torch.randn(512, device="cuda")
    row_of = torch.full((FAR + 1, 1), -1, dtype=torch.int32, device="cuda")
    row_of[-1] = 0
    rows = torch.empty(1, 1, 512, device="cuda", dtype=torch.bfloat16)
    kernels.scatter(x, row_of, rows=rows, scales=None, scale_format=None)
    assert torch.equal(rows[0], x[-1:])
    out = torch.full_like(x, 9.0)
    kernels.combine(rows, row_of, torch.ones(FAR + 1, 1, device="cuda"), scale=1.0, out=out)
    assert torch.equal(out[-1:], x[-1:])
    assert not out[0].any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("tokens", [0, 1, 5, 8])
def test_stage_equals_its_twin_exactly(dtype: torch.dtype, expanded: bool, shift: int, tokens: int) -> None:
    h, k, bucket = 2048, 8, 8
    x = torch.randn(tokens, h + 1, device="cuda").bfloat16()[:, shift : shift + h]
    ids = torch.randint(-2, 200, (k, tokens), device="cuda", dtype=dtype).T
    if dtype == torch.int64 and tokens:
        ids[0, 0] = (1 << 32) + 1
        ids[0, 1] = -(1 << 32) + 1
    weights = torch.rand(1, k, device="cuda").expand(tokens, k) if expanded else torch.rand(k, tokens, device="cuda").T
    outs = []
    for ops in (kernels, reference):
        buffers = (
            torch.full((bucket, h), 9.0, device="cuda", dtype=torch.bfloat16),
            torch.full((bucket, k), 9, device="cuda", dtype=torch.int32),
            torch.full((bucket, k), 9.0, device="cuda"),
        )
        ops.stage(x, ids, weights, x_out=buffers[0], ids_out=buffers[1], weights_out=buffers[2])
        outs.append(buffers)
    assert torch.equal(bits(outs[0][0]), bits(outs[1][0]))
    assert torch.equal(outs[0][1], outs[1][1])
    assert torch.equal(outs[0][2], outs[1][2])
    assert bool((outs[0][1][tokens:] == -1).all())
