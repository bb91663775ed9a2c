"""Tensor-parallel shards of the intermediate size sum to the unsharded layer, also where a shard's border falls inside a scale block."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphmoe import ExpertWeights, MoERuntime, MoESpec
from graphmoe.errors import WeightsMismatch
from graphmoe.reference import moe_layer
from tests.checks import assert_rows, oracle, random_inputs, random_weights

IDS = torch.tensor([[0, 1], [1, 2], [2, 0], [-1, 2], [0, 2]])


@pytest.mark.parametrize("fmt", ["fp8_block", "ue8m0", "bf16"])
@pytest.mark.parametrize(
    ("intermediate", "tp", "stored"),
    [(768, 1, 768), (768, 2, 384), (768, 4, 256), (768, 8, 256), (1536, 8, 256), (640, 8, 256), (512, 8, 128)],
    ids=["whole", "384", "192", "96", "192 of 1536", "80", "64"],
)
def test_shards_sum_to_the_whole(fmt: str, intermediate: int, tp: int, stored: int, tmp_path: Path) -> None:
    """Unquantised activations: equal to the last bits of float64. Loaded shards are the shards of loaded weights, bit for bit."""
    spec = MoESpec(3, 2, 256, intermediate, routed_scaling_factor=2.0)
    weights = random_weights(spec, fmt)
    weights.save(tmp_path)
    x, router = random_inputs(spec, 5)
    whole = moe_layer(x, IDS, router, weights, rounding=None)
    total = torch.zeros_like(whole)
    for rank in range(tp):
        shard = weights.shard(tp, rank)
        loaded = ExpertWeights.load(tmp_path, spec, tp=tp, tp_rank=rank)
        assert loaded.spec == shard.spec
        assert loaded.fmt == shard.fmt == fmt
        for name, tensor in shard.tensors().items():
            assert torch.equal(tensor.view(torch.uint8), loaded.tensors()[name].view(torch.uint8))
        if fmt != "bf16":
            assert shard.spec.intermediate_size == stored
        total += moe_layer(x, IDS, router, shard, rounding=None)
    assert float((total - whole).norm() / whole.norm()) < 1e-12


@pytest.mark.parametrize("fmt", ["fp8_block", "ue8m0", "bf16"])
def test_a_shard_runs_as_a_layer_of_its_own(fmt: str) -> None:
    spec = MoESpec(3, 2, 256, 768)
    weights = random_weights(spec, fmt)
    x, router = random_inputs(spec, 5)
    total = torch.zeros(5, 256, dtype=torch.float64)
    for rank in range(8):
        shard = weights.shard(8, rank)
        with MoERuntime(shard.spec, shard, buckets=[8], device="cpu", path="psum") as runtime:
            y = runtime(x, IDS, router)
            assert_rows(y, oracle(x, IDS, router, shard), fmt)
            total += y.double()
    whole = moe_layer(x, IDS, router, weights, rounding=None)
    error = (total - whole).norm(dim=-1) / whole.norm(dim=-1)
    assert float(error.max()) < (0.02 if fmt == "bf16" else 0.08)


def test_shards_that_do_not_exist_are_refused() -> None:
    weights = random_weights(MoESpec(2, 1, 128, 384), "fp8_block")
    for tp, rank, message in (
        (5, 0, "tp=5 does not divide intermediate_size=384; these do: 1, 2, 3, 4, 6, "),
        (0, 0, "tp=0"),
        (2, 2, "tp_rank=2"),
        (2, -1, "tp_rank=-1"),
    ):
        with pytest.raises(WeightsMismatch, match=message):
            weights.shard(tp, rank)
