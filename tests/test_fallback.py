"""The rule of `auto` without a profile: what it offers for every published shape, in which order, and that each reason is true."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphmoe import MoESpec, Recipe, model_names, named_spec, plan
from graphmoe.fallback import fallback
from graphmoe.paths import get_path
from tests import strategies

SHAPES = [
    *(named_spec(model) for model in model_names()),
    *(named_spec(model).shard(ep=2) for model in model_names()),
    *(named_spec(model).shard(ep=8) for model in model_names()),
    *(named_spec(model).shard(tp=2, ep=4, ep_rank=3, block=128) for model in model_names()),
]
TOKENS = [*range(1, 600), 1000, 1024, 2048, 4096, 8192, 16384]


def offered(spec: MoESpec, tokens: int) -> list[str]:
    return [str(recipe) for recipe, _ in fallback(spec, tokens, "plain")]


def by_the_rule(spec: MoESpec, tokens: int) -> list[str]:
    """In exact fractions: few tokens, then few rows an expert, then the grouped GEMMs."""
    rows = Fraction(tokens * spec.top_k, spec.num_experts)
    everything_here = spec.num_local_experts == spec.num_experts
    wanted = ["direct"] if everything_here and tokens <= 4 else []
    if rows <= 32:
        wanted.append("gathered tile=16" if rows <= 12 else "gathered tile=32")
    if not everything_here and spec.num_local_experts <= 32:
        wanted.append("masked")
    return [*wanted, "psum block_e=64"]


@pytest.mark.parametrize("spec", SHAPES, ids=lambda spec: f"E{spec.num_local_experts}of{spec.num_experts}-I{spec.intermediate_size}")
def test_every_published_shape_is_offered_what_the_rule_says(spec: MoESpec) -> None:
    for tokens in TOKENS:
        assert offered(spec, tokens) == by_the_rule(spec, tokens), tokens


@given(spec=strategies.specs(max_experts=64, max_top_k=10), tokens=st.integers(1, 5000))
def test_any_shape_is_offered_what_the_rule_says(spec: MoESpec, tokens: int) -> None:
    assert offered(spec, tokens) == by_the_rule(spec, tokens)


@given(spec=strategies.specs(max_experts=64, max_top_k=10), tokens=st.integers(1, 5000))
def test_what_is_offered_has_options_that_its_path_accepts_and_ends_with_what_runs_everywhere(spec: MoESpec, tokens: int) -> None:
    recipes = [recipe for recipe, _ in fallback(spec, tokens, "plain")]
    for recipe in recipes:
        options = get_path(recipe.path).options(recipe)
        assert dict(recipe.options).items() <= options.items()
    assert len({recipe.path for recipe in recipes}) == len(recipes)
    assert recipes[-1] == Recipe("psum", block_e=64)


@given(spec=strategies.specs(max_experts=64, max_top_k=10), tokens=st.integers(1, 5000))
def test_the_numbers_of_a_reason_are_those_that_decided(spec: MoESpec, tokens: int) -> None:
    for recipe, reason in fallback(spec, tokens, "plain"):
        numbers = [float(number) for number in re.findall(r"[\d.]+(?:e[+-]\d+)?", reason)]
        if recipe.path == "direct":
            assert tokens <= numbers[0]
        elif recipe.path == "gathered":
            rows, most = numbers
            assert rows == pytest.approx(tokens * spec.top_k / spec.num_experts, rel=0.005)
            assert rows <= most
            assert "rows an expert" in reason
        elif recipe.path == "masked":
            assert spec.num_local_experts <= numbers[0] < 33
            assert spec.num_local_experts < spec.num_experts
        else:
            assert reason == "psum with block_e 64"


def test_no_published_shape_takes_direct_on_a_rank_of_an_expert_parallel_group() -> None:
    """Most of a token's experts are elsewhere, so a program an assignment would mostly idle."""
    for model in model_names():
        assert "direct" not in offered(named_spec(model).shard(ep=2), 1)
        assert offered(named_spec(model), 1)[0] == offered(named_spec(model).shard(tp=2), 1)[0] == "direct"


def test_a_plan_takes_the_first_that_the_arch_supports() -> None:
    for spec in SHAPES[:14]:
        for tokens in (1, 8, 256, 4096):
            for arch, kept in (
                ("sm90", {"direct", "gathered", "masked", "psum"}),
                ("cpu", {"direct", "gathered", "masked", "psum"}),
                ("sm100", {"masked", "psum"}),
            ):
                [bucket] = plan(spec, [tokens], fmt="bf16", arch=arch).buckets
                recipe, reason = next((recipe, reason) for recipe, reason in fallback(spec, tokens, "plain") if recipe.path in kept)
                assert bucket.recipe == Recipe(recipe.path, **get_path(recipe.path).options(recipe))
                assert bucket.rule == f"auto: no profile, {reason}"
