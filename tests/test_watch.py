"""Weights under a live runtime: updated, replaced, freed, copied, swapped; nothing is silently stale."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from graphmoe import ExpertWeights, MoERuntime, MoESpec
from graphmoe import build as build_module
from graphmoe.errors import InvalidInput, RuntimeClosed, WeightsMismatch
from graphmoe.watch import WeightWatch
from tests.checks import assert_rows, bits, oracle, random_inputs, random_weights, routings

SPEC = MoESpec(6, 3, 256, 128)


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    x, router = random_inputs(SPEC, 4, seed=seed)
    return x, dict(routings(SPEC, 4, seed=seed))["balanced"], router


def tensors_of(seed: int) -> tuple[Tensor, Tensor]:
    made = random_weights(SPEC, "bf16", seed=seed)
    return made.w13, made.w2


def runtime(weights: ExpertWeights) -> MoERuntime:
    return MoERuntime(SPEC, weights, buckets=[1, 4], device="cpu", path="psum")


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_a_replaced_or_freed_parameter_is_refused_by_name_until_rebound(name: str) -> None:
    parameters = dict(zip(("w13", "w2"), (torch.nn.Parameter(tensor) for tensor in tensors_of(0)), strict=True))
    weights = ExpertWeights.from_bf16(SPEC, **parameters, fmt="bf16")
    with runtime(weights) as made:
        made(*batch())
        parameters[name].data = parameters[name].data.clone()
        for use in (lambda: made(*batch()), lambda: made.replay(4), made.refresh):
            with pytest.raises(WeightsMismatch, match=rf"layer 0: {name} has moved from 0x\w+ to 0x\w+.*rt\.rebind"):
                use()
        made.rebind(ExpertWeights.from_bf16(SPEC, **parameters, fmt="bf16"))
        assert_rows(made(*batch()), oracle(*batch(), weights), "bf16")
        parameters[name].untyped_storage().resize_(0)
        with pytest.raises(WeightsMismatch, match="has moved"):
            made(*batch())


def test_an_in_place_update_of_the_users_parameter_shows_in_the_next_call() -> None:
    w13, w2 = (torch.nn.Parameter(tensor) for tensor in tensors_of(0))
    with runtime(ExpertWeights.from_bf16(SPEC, w13, w2, fmt="bf16")) as made:
        made(*batch())
        other = random_weights(SPEC, "bf16", seed=5)
        with torch.no_grad():
            w13.copy_(other.w13)
            w2.copy_(other.w2)
        assert_rows(made(*batch()), oracle(*batch(), other), "bf16")
        made.refresh()


def test_experts_swapped_in_place_with_their_ids_give_the_same_bits() -> None:
    weights = random_weights(SPEC, "fp8_block")
    x, ids, router = batch()
    with runtime(weights) as made:
        want = bits(made(x, ids, router)).clone()
        for tensor in weights.tensors().values():
            values = tensor.view(torch.uint8)
            values[[1, 4]] = values[[4, 1]].clone()
        swapped = torch.where(ids == 1, 4, torch.where(ids == 4, 1, ids))
        assert torch.equal(bits(made(x, swapped, router)), want)


def copied(weights: ExpertWeights) -> ExpertWeights:
    """What a runtime on another device holds."""
    return ExpertWeights(SPEC, weights.fmt, **{name: tensor.clone() for name, tensor in weights.tensors().items()})  # type: ignore[arg-type]


def test_a_copy_is_stale_once_its_source_changes_and_refresh_renews_it() -> None:
    source = random_weights(SPEC, "fp8_block")
    used = copied(source)
    watch = WeightWatch(3, source, used)
    watch.check()
    source.w2.view(torch.uint8)[2].zero_()
    with pytest.raises(WeightsMismatch, match=r"layer 3: w2 was changed in place.*rt\.refresh\(3\)"):
        watch.check()
    watch.refresh("cpu")
    watch.check()
    assert torch.equal(used.w2.view(torch.uint8), source.w2.view(torch.uint8))
    source.w13.data = source.w13.data.clone()
    with pytest.raises(WeightsMismatch, match="w13 has moved"):
        watch.refresh("cpu")


def test_the_source_of_a_copy_is_not_kept_alive() -> None:
    source = random_weights(SPEC, "fp8_block")
    tensor = weakref.ref(source.w13)
    watch = WeightWatch(0, source, copied(source))
    del source
    gc.collect()
    assert tensor() is None
    watch.check()
    with pytest.raises(WeightsMismatch, match=r"are gone.*rebind"):
        watch.refresh("cpu")


def test_tensors_that_were_converted_are_not_kept_alive_either() -> None:
    w13, w2 = (tensor.float() for tensor in tensors_of(0))
    reference = weakref.ref(w13)
    weights = ExpertWeights.from_bf16(SPEC, w13, w2, fmt="bf16")
    assert weights.origins == {}
    del w13
    assert reference() is None


def test_rebind_swaps_every_layer_at_once_and_keeps_the_static_inputs() -> None:
    first, second = [[random_weights(SPEC, "fp8_block", seed=seed + layer) for layer in range(2)] for seed in (0, 7)]
    with MoERuntime(SPEC, layers=first, buckets=[1, 4], device="cpu", path="gathered") as made:
        inputs, y = made.inputs(4), made.layers[0](*batch())
        layer = made.layers[1]
        made.rebind(layers=second)
        assert made.inputs(4).x.data_ptr() == inputs.x.data_ptr()
        assert made.layers[0](*batch()).data_ptr() == y.data_ptr()
        assert_rows(layer(*batch()), oracle(*batch(), second[1], "gathered"), "fp8_block", recipe="gathered")
        assert made.report().layers == 2


def test_a_rebind_that_fails_leaves_the_old_weights_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(SPEC, "fp8_block")
    with runtime(weights) as made:
        want = bits(made(*batch())).clone()
        for wrong, message in (
            ({"weights": random_weights(SPEC, "bf16")}, "of 'bf16'"),
            ({"weights": random_weights(MoESpec(6, 3, 128, 128), "fp8_block")}, "hidden_size"),
            ({"layers": [weights, weights]}, r"1 layer.*these are 2"),
            ({}, "neither"),
        ):
            with pytest.raises(WeightsMismatch, match=message):
                made.rebind(**wrong)  # type: ignore[arg-type]

        def fail(*_: object) -> None:
            raise RuntimeError("in the middle")

        with monkeypatch.context() as patch:
            patch.setattr(build_module, "_bind", fail)
            with pytest.raises(RuntimeError, match="in the middle"):
                made.rebind(random_weights(SPEC, "fp8_block", seed=3))
        assert torch.equal(bits(made(*batch())), want)
        assert made.inputs(4).x.shape == (4, 256)
        with pytest.raises(InvalidInput, match="2 is not a layer"):
            made.refresh(2)
    for use in (made.refresh, lambda: made.rebind(weights)):
        with pytest.raises(RuntimeClosed):
            use()
