"""Every Triton kernel against its twin, compiled, on fresh random inputs and poisoned outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphmoe import MoESpec, kernels, reference
from graphmoe.formats import BLOCK, ScaleFormat
from graphmoe.formats.ue8m0 import unpack
from graphmoe.layout import RowLayout
from tests.checks import bits, routings

SPECS = {
    "qwen3-30b-a3b": MoESpec(128, 8, 2048, 768),
    "many experts": MoESpec(1000, 9, 256, 128),
    "one expert": MoESpec(1, 1, 128, 128),
    "K = E": MoESpec(6, 6, 384, 256),
    "K > E": MoESpec(64, 8, 128, 128, num_local_experts=3, expert_offset=7),
    "duplicates allowed": MoESpec(12, 4, 256, 128, distinct_topk=False),
}
TOKENS = (1, 3, 64, 257)


def layouts(spec: MoESpec, tokens: int) -> list[RowLayout]:
    return [RowLayout.masked(spec, tokens, 128), *(RowLayout.contiguous(kind, spec, tokens, b) for kind in ("compact", "psum") for b in (64, 128))]


def routed(ops: object, ids: Tensor, spec: MoESpec, layout: RowLayout) -> tuple[Tensor, Tensor, Tensor]:
    def poisoned(*shape: int) -> Tensor:
        return torch.full(shape, 0x7FFFFFFF, dtype=torch.int32, device="cuda")

    row_of, groups, flags = poisoned(*ids.shape), poisoned(layout.group_entries), torch.zeros(1, dtype=torch.int32, device="cuda")
    ops.route(ids.clamp(max=2**31 - 1).int(), layout, distinct=spec.distinct_topk, row_of=row_of, groups=groups, flags=flags)  # type: ignore[attr-defined]
    return row_of, groups, flags


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


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "K > E", "K = E"])
@pytest.mark.parametrize("scale_format", [None, *ScaleFormat], ids=str)
def test_scatter_and_act_equal_their_twins(name: str, scale_format: ScaleFormat | None) -> None:
    quantised, packed = scale_format is not None, scale_format is ScaleFormat.UE8M0_PACKED
    spec, tokens = SPECS[name], 65
    generator = torch.Generator(device="cuda").manual_seed(1)
    for layout in layouts(spec, tokens):
        _, ids = next(routings(spec, tokens, device="cuda"))
        row_of, _, _ = routed(reference, ids, spec, layout)
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
            row_of, _, _ = routed(reference, ids, spec, layout)
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
