"""The whole layer on real models' shapes: every recipe and format, every bucket, against the float64 oracle row by row, and timed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle

import pytest
import torch
from torch import Tensor

from graphmoe import MoERuntime, bounds
from graphmoe.formats import FORMATS
from graphmoe.measure import call_timing, floor_us, graph_timing, read_bandwidth
from graphmoe.runtime import MoELayer
from tests.checks import POISONS, RECIPES, ROUTINGS, assert_rows, bits, oracle, poison, random_inputs, random_weights, routings
from tests.gpu.cases import BUCKETS, CASES, SHAPES, Case, weights_of

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def oracles() -> dict[tuple[str, str, int, str], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Inputs and oracle outputs, shared by the recipes: they do not depend on the path."""
    return {}


@pytest.fixture(scope="module")
def bandwidth() -> float:
    return read_bandwidth(DEVICE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_bucket_equals_the_oracle(case: Case, compiled: None, oracles: dict, bandwidth: float, table: list[str]) -> None:
    spec, weights = case.spec, weights_of(case.shape, case.fmt)
    runtime = MoERuntime(spec, weights, buckets=BUCKETS, path=case.recipe, progress=False)
    worst = dict.fromkeys(BUCKETS, 0.0)
    words = iter(POISONS * 1000)
    for t in BUCKETS:
        for name in ROUTINGS:
            key = (case.shape, case.fmt, t, name)
            if key not in oracles:
                ids = dict(routings(spec, t, seed=t, device="cuda"))[name]
                x, router = random_inputs(spec, t, seed=t, device="cuda")
                oracles[key] = (x, ids, router, oracle(x, ids, router, weights))
            x, ids, router, want = oracles[key]
            poison(runtime, next(words))
            got = runtime(x, ids, router)
            worst[t] = max(worst[t], assert_rows(got, want, case.fmt, f"{case.name} bucket {t} {name}"))

    report = {bucket.tokens: bucket for bucket in runtime.report().buckets}
    for t in BUCKETS:
        assert report[t].kernels == 6, report[t]
    allocations = runtime.report().capture_allocations
    assert allocations == 0
    assert not runtime.report().promise_broken

    # Timed over enough layers that their weights exceed the L2 cache; the layers share one arena, so they share its static inputs.
    timed = MoERuntime(
        spec,
        layers=[weights, *(weights_of(case.shape, case.fmt, seed) for seed in (1, 2, 3, 4, 5))],
        buckets=BUCKETS,
        path=case.recipe,
        progress=False,
    )
    for t in BUCKETS:
        x, ids, router, _ = oracles[case.shape, case.fmt, t, "balanced"]
        timed.layers[0](x, ids, router)
        graph = graph_timing([lambda layer=layer, t=t: layer.replay(t) for layer in timed.layers])  # type: ignore[misc]
        call = call_timing(partial(_call_next, cycle(timed.layers), x, ids, router), device=DEVICE)
        counts = bounds.expert_counts(ids.cpu(), spec.num_local_experts)
        active = sum(count > 0 for count in counts)
        floor = floor_us(weights, active, bandwidth)
        ratio = f"{graph.median_us / floor:5.2f}" if active else "    -"
        table.append(
            f"{case.name:<48} T={t:<4} rows bound {report[t].rows:>6} used {sum(-(-c // 64) * 64 for c in counts):>6} kernels {report[t].kernels} "
            f"arena {report[t].bucket_bytes / 2**20:8.1f} MiB  graph {graph.median_us:7.1f} +-{graph.spread_us:4.1f} us  "
            f"call {call.median_us:7.1f} us  graph/floor {ratio}  worst row {worst[t]:.4f}"
        )
    seconds = sum(bucket.capture_seconds for bucket in report.values())
    table.append(f"{case.name:<48} capture {seconds:.2f} s for {len(BUCKETS)} graphs, {allocations} allocations in capture")
    timed.close()
    runtime.close()


def _call_next(layers: Iterator[MoELayer], *batch: Tensor) -> Tensor:
    return next(layers)(*batch)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_padding_and_company_change_no_bit(case: Case, compiled: None) -> None:
    """A token's bits in a fixed bucket depend neither on padding tokens, nor on its company, nor on the replays in between."""
    spec, t = case.spec, 64
    runtime = MoERuntime(spec, weights_of(case.shape, case.fmt), buckets=[t], path=case.recipe, progress=False)
    x, router = random_inputs(spec, t, seed=7, device="cuda")
    every = dict(routings(spec, t, seed=7, device="cuda"))
    ids = every["balanced"]
    want = bits(runtime(x, ids, router)).clone()
    for name, others in every.items():
        mine = 19
        company = others.clone()
        company[:mine] = ids[:mine]
        elsewhere, other_router = random_inputs(spec, t, seed=8, device="cuda")
        elsewhere[:mine], other_router[:mine] = x[:mine], router[:mine]
        poison(runtime, -1)
        assert torch.equal(bits(runtime(elsewhere, company, other_router))[:mine], want[:mine]), f"company {name}"
        inputs = runtime.inputs(t)
        inputs.x[mine:] = torch.nan
        inputs.topk_weights[mine:] = torch.inf
        inputs.topk_ids[mine:] = -1
        assert torch.equal(bits(runtime.replay(t))[:mine], want[:mine]), f"padding after {name}"
    assert torch.equal(bits(runtime(x, ids, router)), want)
    runtime.close()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", list(FORMATS))
def test_paths_agree_bit_for_bit(shape: str, fmt: str, compiled: None, table: list[str]) -> None:
    """Every layout gives a row to the same GEMM arithmetic: one output, whatever the path."""
    spec, weights, sizes = SHAPES[shape], weights_of(shape, fmt), (1, 16, 128)
    first: dict[tuple[int, str], Tensor] = {}
    for recipe in RECIPES:
        with MoERuntime(spec, weights, buckets=sizes, path=recipe, progress=False) as runtime:
            for t in sizes:
                x, router = random_inputs(spec, t, seed=t, device="cuda")
                for name, ids in routings(spec, t, seed=t, device="cuda"):
                    got = bits(runtime(x, ids, router)).clone()
                    want = first.setdefault((t, name), got)
                    assert torch.equal(got, want), f"{recipe} differs from {RECIPES[0]} at T={t}, {name}"
    table.append(f"{shape} | {fmt}: all paths agree bit for bit at T = 1, 16, 128 on every routing")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_and_its_requantised_twin_differ_by_rounding_alone(shape: str, compiled: None, table: list[str]) -> None:
    """Requantised weights move a row by about one more e4m3 rounding of w13 and w2; each form equals its own oracle (see the cases above)."""
    spec, t = SHAPES[shape], 64
    plain = random_weights(spec, "fp8_block", seed=11, device="cuda")
    x, router = random_inputs(spec, t, device="cuda")
    ids = dict(routings(spec, t, device="cuda"))["balanced"]
    with MoERuntime(spec, plain, buckets=[t], path="psum", progress=False) as runtime:
        before = runtime(x, ids, router).double()
    twin = plain.requantize("ue8m0")
    with MoERuntime(spec, twin, buckets=[t], path="psum", progress=False) as runtime:
        after = runtime(x, ids, router).double()
        assert_rows(runtime(x, ids, router), oracle(x, ids, router, twin), "ue8m0")
    norm = before.norm(dim=-1)
    live = norm > 0
    moved = float(((after - before).norm(dim=-1)[live] / norm[live]).max())
    table.append(f"{shape}: a row moves by at most {moved:.4f} of its norm when the layer's weights and activations become UE8M0")
    assert moved < 0.12


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", ["fp8_block", "bf16"])
def test_the_comparison_sees_a_lost_a_doubled_and_a_swapped_expert(shape: str, fmt: str, compiled: None) -> None:
    spec, weights, t = SHAPES[shape], weights_of(shape, fmt), 16
    runtime = MoERuntime(spec, weights, buckets=[t], path="psum", progress=False)
    x, router = random_inputs(spec, t, device="cuda")
    ids = dict(routings(spec, t, device="cuda"))["one_expert"]
    for k in range(2):
        ids[:, k] = k
    want = oracle(x, ids, router, weights)
    assert_rows(runtime(x, ids, router), want, fmt)
    lost, swapped, doubled = ids.clone(), ids.clone(), router.clone()
    lost[5, 0] = -1
    swapped[5, :2] = ids[5, :2].flip(0)
    doubled[5, 0] *= 2
    for name, call in {"lost": (x, lost, router), "swapped": (x, swapped, router), "doubled": (x, ids, doubled)}.items():
        with pytest.raises(AssertionError, match="row 5 is off"):
            assert_rows(runtime(*call), want, fmt, name)
    runtime.close()
