"""Every recipe of every shipped profile, on its own shape and bucket: poisoned scratch, worst-case witnesses, skewed routings, against the oracle."""

from __future__ import annotations

import pytest
import torch

from graphmoe import MoERuntime
from graphmoe.profile import Profile, profiles_root
from tests.checks import POISONS, assert_rows, oracle, poison, random_inputs, random_weights, routings
from tests.gpu.conftest import Table

FILES = sorted(profiles_root().rglob("*.json"))
_ROWS = 24
"""Rows of a large batch that the oracle computes: it costs a product an expert."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_recipe_of_a_profile_is_right(file: object, table: Table) -> None:
    profile = Profile.load(str(file))
    if profile.device != torch.cuda.get_device_name():
        pytest.skip(f"measured on {profile.device}")
    spec, weights = profile.shape, random_weights(profile.shape, profile.fmt, device="cuda")
    worst = 0.0
    for record in profile.buckets:
        assert profile.void(record.tokens) is None
        t, recipe = record.tokens, record.recipe
        picked = torch.randperm(t, generator=torch.Generator().manual_seed(t))[:_ROWS].cuda()
        with MoERuntime(spec, weights, buckets=[t], path=recipe, progress=False) as runtime:
            for number, (name, ids) in enumerate(routings(spec, t, seed=t, device="cuda")):
                x, router = random_inputs(spec, t, seed=t, device="cuda")
                poison(runtime, POISONS[number % len(POISONS)])
                got = runtime(x, ids, router)[picked]
                want = oracle(x[picked], ids[picked], router[picked], weights, recipe)
                worst = max(worst, assert_rows(got, want, profile.fmt, f"{recipe} T={t} {name}", recipe=recipe))
            assert not runtime.report().promise_broken
    table.append(f"profile {file.stem}: {len(profile.buckets)} buckets right on every routing, worst row {worst:.4f}")  # type: ignore[attr-defined]
