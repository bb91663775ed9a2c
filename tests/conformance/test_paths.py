"""Every registered path, with every value of its options and every format, against the oracle on the CPU. A new path joins by being registered."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmoe import ExpertWeights, MoERuntime, MoESpec, Recipe
from graphmoe.errors import UnknownRecipe
from graphmoe.formats import FORMATS
from graphmoe.paths import PATHS, get_path
from graphmoe.paths.base import Path
from graphmoe.reference import moe_layer
from tests import strategies
from tests.checks import POISONS, ROUTINGS, assert_rows, bits, oracle, poison, random_inputs, random_weights, routings

_TRIED = (16, 32, 64, 128, 256)

# An example builds a runtime and runs it six times; every recipe and format has its own examples.
fewer = settings(max_examples=max(10, settings().max_examples // 6))


def every_recipe() -> list[Recipe]:
    """Each path with each value of the options that change its buffers or its rounding; the others are launch sizes, which a CPU has not."""
    spec, fmt, recipes = MoESpec(6, 3, 256, 256), FORMATS["fp8_block"], []
    for path in PATHS.values():

        def effect(recipe: Recipe, path: Path = path) -> object:
            options = path.options(recipe)
            return path.buffers(spec, fmt, 40, options), path.rounding(options)

        plain = Recipe(path.name)
        allowed: dict[str, list[int]] = {}
        for name, default in path.options(plain).items():
            values = []
            for value in _TRIED:
                with suppress(UnknownRecipe):
                    if value == default or effect(Recipe(path.name, **{name: value})) != effect(plain):
                        values.append(value)
            if len(values) > 1:
                allowed[name] = values
        recipes += [Recipe(path.name, **dict(zip(allowed, values, strict=True))) for values in product(*allowed.values())]
    return recipes


CASES = [
    pytest.param(recipe, fmt, id=f"{recipe} {fmt}")
    for recipe, fmt in product(every_recipe(), FORMATS)
    if get_path(recipe.path).weight_layout == FORMATS[fmt].layout
]


@cache
def weights_for(spec: MoESpec, fmt: str) -> ExpertWeights:
    return random_weights(spec, fmt)


def test_every_path_is_tried_with_every_option() -> None:
    named = {str(recipe) for recipe in every_recipe()}
    assert named >= {"masked row_tile=64", "masked row_tile=128", "compact block_e=64", "psum block_e=128", "gathered tile=32 up_rows=64", "direct"}
    assert {recipe.path for recipe in every_recipe()} == set(PATHS)


@pytest.mark.parametrize(("recipe", "fmt"), CASES)
@fewer
@given(data=st.data())
def test_any_routing_equals_the_oracle_and_padding_changes_no_bit(recipe: Recipe, fmt: str, data: st.DataObject) -> None:
    """Random specs; several changed routings on one runtime, the scratch poisoned before each; then other padding, bit for bit."""
    spec = data.draw(strategies.specs(max_experts=6, max_top_k=4))
    weights = weights_for(spec, fmt)
    with MoERuntime(spec, weights, buckets=[1, 4, 9], path=recipe, device="cpu") as runtime:
        for round_, word in enumerate(POISONS):
            routing = data.draw(strategies.routings(spec=st.just(spec), max_tokens=9))
            ids = torch.from_numpy(routing.ids)
            x, router = random_inputs(spec, routing.tokens, seed=round_)
            poison(runtime, word)
            y = runtime(x, ids, router).clone()
            assert_rows(y, oracle(x, ids, router, weights, recipe), fmt, f"{routing}", recipe=recipe)
            bucket = runtime.plan.ladder.bucket_for(routing.tokens)
            inputs = runtime.inputs(bucket)
            assert bool((inputs.topk_ids[routing.tokens :] == -1).all()), "padding tokens are routed nowhere"
            junk = data.draw(st.sampled_from([torch.nan, torch.inf, 3e38]))
            inputs.x[routing.tokens :] = junk
            inputs.topk_weights[routing.tokens :] = junk
            inputs.topk_ids[routing.tokens :] = data.draw(st.sampled_from([-1, spec.num_local_experts]))
            poison(runtime, word ^ 0x5A5A5A5A)
            again = runtime.replay(bucket)
            assert torch.equal(bits(again)[: routing.tokens], bits(y))
            assert bool((again[routing.tokens :] == 0).all())
        assert not runtime.report().promise_broken


@pytest.mark.parametrize(("recipe", "fmt"), CASES)
def test_every_named_routing_with_witnesses_and_skew(recipe: Recipe, fmt: str) -> None:
    """The routings that GPU tests use, on a spec with E not a power of two and an expert-parallel one with K > E."""
    for spec in (MoESpec(11, 3, 256, 128, routed_scaling_factor=2.5), MoESpec(24, 5, 128, 256, num_local_experts=3, expert_offset=6)):
        weights = weights_for(spec, fmt)
        with MoERuntime(spec, weights, buckets=[2, 70], path=recipe, device="cpu") as runtime:
            for t in (1, 2, 70):
                for name, ids in routings(spec, t, seed=t):
                    x, router = random_inputs(spec, t, seed=t)
                    poison(runtime, POISONS[t % 3])
                    assert_rows(runtime(x, ids, router), oracle(x, ids, router, weights, recipe), fmt, f"{spec} {name} T={t}", recipe=recipe)
    assert len(ROUTINGS) >= 7


@pytest.mark.parametrize(("recipe", "fmt"), CASES)
def test_a_broken_promise_is_nan_alone(recipe: Recipe, fmt: str) -> None:
    spec = MoESpec(5, 3, 128, 128)
    weights = weights_for(spec, fmt)
    x, router = random_inputs(spec, 4)
    good = torch.tensor([[0, 1, 2], [2, 3, 4], [4, 0, 1], [1, 2, 3]])
    with MoERuntime(spec, weights, buckets=[4], path=recipe, device="cpu") as runtime:
        want = bits(runtime(x, good, router)).clone()
        for broken in ([2, 2, 4], [3, -1, 3], [4, 4, 4]):
            ids = good.clone()
            ids[1] = torch.tensor(broken)
            poison(runtime, -1)
            with pytest.warns(match="distinct_topk"):
                y = runtime(x, ids, router)
            assert_rows(y, oracle(x, ids, router, weights, recipe), fmt, recipe=recipe)
            assert bool(y[1].isnan().all())
            assert torch.equal(bits(y)[[0, 2, 3]], want[[0, 2, 3]])
            assert runtime.report().promise_broken
            runtime.clear_flag()
        assert torch.equal(bits(runtime(x, good, router)), want)


@pytest.mark.parametrize(("recipe", "fmt"), CASES)
def test_nan_and_infinity_in_a_token_stay_in_that_token(recipe: Recipe, fmt: str) -> None:
    spec = MoESpec(5, 2, 256, 128)
    weights = weights_for(spec, fmt)
    x, router = random_inputs(spec, 4)
    ids = torch.tensor([[0, 1]] * 4)
    with MoERuntime(spec, weights, buckets=[4], path=recipe, device="cpu") as runtime:
        want = bits(runtime(x, ids, router)).clone()
        for bad in (torch.nan, torch.inf, -torch.inf):
            x_bad, router_bad = x.clone(), router.clone()
            x_bad[1, 200] = bad
            router_bad[2, 1] = torch.nan
            y = runtime(x_bad, ids, router_bad)
            assert bool(y[1].isnan().any())
            assert bool(y[2].isnan().all())
            assert torch.equal(bits(y)[[0, 3]], want[[0, 3]])


@pytest.mark.parametrize(("recipe", "fmt"), CASES)
def test_mutations_are_caught(recipe: Recipe, fmt: str) -> None:
    """A dropped, doubled or swapped expert, a swapped gate and up, and scaling applied twice each break the comparison: none could pass unseen."""
    spec = MoESpec(6, 3, 256, 128, routed_scaling_factor=1.5)
    weights = weights_for(spec, fmt)
    x, router = random_inputs(spec, 5)
    ids = torch.tensor([[0, 1, 2], [3, 4, 5], [0, 2, 4], [1, 3, 5], [5, 0, 3]])
    want = oracle(x, ids, router, weights, recipe)
    dropped, swapped, doubled = ids.clone(), ids.clone(), router.clone()
    dropped[3, 1] = -1
    swapped[3, 1] = 4
    doubled[3, 1] *= 2
    gate_first = [weights.w13, weights.w13_scale_inv]
    up_first = [None if tensor is None else torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1) for tensor in gate_first]
    assert up_first[0] is not None
    turned = replace(weights, w13=up_first[0], w13_scale_inv=up_first[1])
    with MoERuntime(spec, layers=[weights, turned], buckets=[5], path=recipe, device="cpu") as runtime:
        assert_rows(runtime.layers[0](x, ids, router), want, fmt, recipe=recipe)
        for call in ((x, dropped, router), (x, swapped, router), (x, ids, doubled)):
            with pytest.raises(AssertionError, match="row 3 is off"):
                assert_rows(runtime.layers[0](*call), want, fmt, recipe=recipe)
        with pytest.raises(AssertionError, match="is off"):
            assert_rows(runtime.layers[1](x, ids, router), want, fmt, recipe=recipe)
        with pytest.raises(AssertionError, match="is off"):
            assert_rows(runtime.layers[0](x, ids, router * 1.5), want, fmt, recipe=recipe)


@pytest.mark.parametrize(("recipe", "fmt"), CASES)
def test_accuracy_against_an_unquantised_oracle(recipe: Recipe, fmt: str) -> None:
    """Whole-layer error of the format itself: activations rounded to e4m3 twice cost about 4 % of a row, bf16 well under 1 %."""
    spec = MoESpec(6, 3, 256, 128)
    weights = weights_for(spec, fmt)
    x, router = random_inputs(spec, 8)
    ids = torch.arange(24).reshape(8, 3) % 6
    exact = moe_layer(x, ids, router, weights, rounding=None)
    with MoERuntime(spec, weights, buckets=[8], path=recipe, device="cpu") as runtime:
        y = runtime(x, ids, router).double()
    error = (y - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) < (0.01 if recipe.path == "direct" or fmt == "bf16" else 0.08)
