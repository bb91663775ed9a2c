"""The whole layer on real models' shapes: every recipe and format, every bucket, against the float64 oracle row by row."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from graphmoe import MoERuntime, Recipe
from graphmoe.formats import FORMATS
from graphmoe.measure import call_timing, graph_timing
from graphmoe.reference import moe_layer, row_errors
from tests.checks import (
    GROUPED,
    POISONS,
    ROUTINGS,
    assert_rows,
    bits,
    oracle,
    poison,
    random_inputs,
    random_weights,
    rounding_of,
    routings,
)
from tests.gpu.cases import CASES, SHAPES, Case, weights_of
from tests.gpu.conftest import Table


@pytest.fixture(scope="module")
def oracles() -> dict[tuple[object, ...], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Inputs and oracle outputs, shared by recipes that round alike."""
    return {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_bucket_equals_the_oracle(case: Case, compiled: None, oracles: dict, table: Table) -> None:
    spec, weights, buckets = case.spec, weights_of(case.shape, case.fmt), case.buckets
    runtime = MoERuntime(spec, weights, buckets=buckets, path=case.recipe, progress=False)
    worst = dict.fromkeys(buckets, 0.0)
    words = iter(POISONS * 1000)
    for t in buckets:
        for name in ROUTINGS:
            key = (case.shape, case.fmt, t, name, rounding_of(case.recipe))
            if key not in oracles:
                ids = dict(routings(spec, t, seed=t, device="cuda"))[name]
                x, router = random_inputs(spec, t, seed=t, device="cuda")
                oracles[key] = (x, ids, router, oracle(x, ids, router, weights, case.recipe))
            x, ids, router, want = oracles[key]
            poison(runtime, next(words))
            got = runtime(x, ids, router)
            worst[t] = max(worst[t], assert_rows(got, want, case.fmt, f"{case.name} bucket {t} {name}", recipe=case.recipe))

    report = runtime.report()
    launches = {"direct": 2, "gathered": 4, "gathered_w4": 4}.get(case.recipe.path, 7)
    assert {bucket.kernels for bucket in report.buckets} == {launches}
    assert report.capture_allocations == 0
    assert not report.promise_broken
    rows = " ".join(f"{bucket.tokens}:{bucket.rows}" for bucket in report.buckets)
    times = []
    for t in buckets:  # of one layer whose weights may be in the cache: for the table, `graphmoe bench` measures
        x, ids, router, _ = oracles[case.shape, case.fmt, t, "balanced", rounding_of(case.recipe)]
        graph = graph_timing([partial(runtime.replay, t)], repeats=5).median_us
        times.append(f"{t}:{graph:.0f}/{call_timing(partial(runtime, x, ids, router), device=x.device, repeats=3, calls=5).median_us:.0f}")
    table.append(
        f"{case.name:<48} {launches} kernels, worst row {max(worst.values()):.4f}, row bounds {rows}, arena {report.arena_bytes / 2**20:.1f} MiB, "
        f"0 allocations in capture, built in {report.build_seconds:.1f} s, graph/call us {' '.join(times)}"
    )
    runtime.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_padding_and_company_change_no_bit(case: Case, compiled: None) -> None:
    """A token's bits in a fixed bucket depend neither on padding tokens, nor on its company, nor on the replays in between."""
    spec, t = case.spec, min(64, case.buckets[-1])
    runtime = MoERuntime(spec, weights_of(case.shape, case.fmt), buckets=[t], path=case.recipe, progress=False)
    x, router = random_inputs(spec, t, seed=7, device="cuda")
    every = dict(routings(spec, t, seed=7, device="cuda"))
    ids = every["balanced"]
    want = bits(runtime(x, ids, router)).clone()
    for name, others in every.items():
        mine = t // 3
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
@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt != "w4afp8"])
def test_paths_agree_bit_for_bit(shape: str, fmt: str, compiled: None, table: Table) -> None:
    """Every layout gives a row to the same GEMM arithmetic: one output, whatever the path."""
    spec, weights, sizes = SHAPES[shape], weights_of(shape, fmt), (1, 16, 128)
    first: dict[tuple[int, str], Tensor] = {}
    for recipe in GROUPED:
        with MoERuntime(spec, weights, buckets=sizes, path=recipe, progress=False) as runtime:
            for t in sizes:
                x, router = random_inputs(spec, t, seed=t, device="cuda")
                for name, ids in routings(spec, t, seed=t, device="cuda"):
                    got = bits(runtime(x, ids, router)).clone()
                    want = first.setdefault((t, name), got)
                    assert torch.equal(got, want), f"{recipe} differs from {GROUPED[0]} at T={t}, {name}"
    table.append(f"{shape} | {fmt}: all paths agree bit for bit at T = 1, 16, 128 on every routing")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_and_its_requantised_twin_differ_by_rounding_alone(shape: str, compiled: None, table: Table) -> None:
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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", [Recipe("gathered"), Recipe("gathered", tile=32), Recipe("direct"), Recipe("psum")], ids=str)
def test_hundred_replays_give_the_same_bits_whatever_ran_between(shape: str, recipe: Recipe, compiled: None) -> None:
    spec, t = SHAPES[shape], 8
    with MoERuntime(spec, weights_of(shape, "fp8_block"), buckets=[t, 4], path=recipe, progress=False) as runtime:
        x, router = random_inputs(spec, t, device="cuda")
        every = [ids for _, ids in routings(spec, t, device="cuda")]
        want = bits(runtime(x, every[0], router)).clone()
        for replay in range(100):
            runtime(x, every[1 + replay % (len(every) - 1)], router)
            if replay % 10 == 0:
                poison(runtime, POISONS[replay // 10 % 3])
            assert torch.equal(bits(runtime(x, every[0], router)), want), replay


@pytest.mark.parametrize("shape", SHAPES)
def test_accuracy_of_every_path_against_an_unquantised_oracle(shape: str, compiled: None, table: Table) -> None:
    """Nothing in the oracle is rounded but the weights: no path buys its speed with error."""
    spec, weights, t = SHAPES[shape], weights_of(shape, "fp8_block"), 8
    x, router = random_inputs(spec, t, seed=5, device="cuda")
    ids = dict(routings(spec, t, seed=5, device="cuda"))["zipf"]
    exact = moe_layer(x, ids, router, weights, rounding=None)
    worst = {}
    for recipe in (*GROUPED[:1], GROUPED[3], Recipe("gathered"), Recipe("gathered", up_rows=64), Recipe("direct")):
        with MoERuntime(spec, weights, buckets=[t], path=recipe, progress=False) as runtime:
            worst[str(recipe)] = float(row_errors(runtime(x, ids, router), exact).max())
    table.append(f"{shape}: worst row against an oracle that rounds nothing: " + ", ".join(f"{name} {error:.4f}" for name, error in worst.items()))
    assert worst["direct"] < 0.01
    assert max(worst.values()) < 0.08


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", [Recipe("gathered"), Recipe("direct"), Recipe("psum")], ids=str)
@pytest.mark.parametrize("t", [1, 8])
def test_layers_with_their_own_ids_in_one_graph_give_the_bits_of_single_calls(shape: str, recipe: Recipe, t: int, compiled: None) -> None:
    """With programmatic launch kernels of neighbouring layers overlap; small grids leave SMs whose caches nobody refreshed in between."""
    spec = SHAPES[shape]
    layers = [weights_of(shape, "fp8_block", seed) for seed in range(3)]
    with MoERuntime(spec, layers=layers, buckets=[t], path=recipe, progress=False) as runtime:
        every = [ids for _, ids in routings(spec, t, device="cuda")]
        x, router = random_inputs(spec, t, device="cuda")
        inputs = [torch.empty_like(every[0]) for _ in range(9)]
        outs = [torch.empty_like(x) for _ in inputs]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number, (ids, out) in enumerate(zip(inputs, outs, strict=True)):
                runtime.layers[number % 3](x, ids, router, out=out)
        for turn in range(len(every)):
            for number, ids in enumerate(inputs):
                ids.copy_(every[(number + turn) % len(every)])
            for _ in range(3):
                poison(runtime, POISONS[turn % 3])
                graph.replay()
            got = [bits(out).clone() for out in outs]
            for number, ids in enumerate(inputs):
                assert torch.equal(got[number], bits(runtime.layers[number % 3](x, ids, router))), f"turn {turn}, call {number}"
