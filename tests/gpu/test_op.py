"""A layer's call under torch.compile on a GPU: inductor's own kernels around it, and its CUDA graphs, which record the step."""

from __future__ import annotations

import pytest
import torch

from graphmoe import MoERuntime
from graphmoe.samples import random_inputs, random_weights, routing
from tests.gpu.cases import SMALL


@pytest.mark.parametrize("path", ["direct", "gathered", "psum"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_loop_has_the_eager_bits(mode: str, path: str, compiled: None) -> None:
    """Three layers and a residual stream, called again and again with other routings; the eager runtime is called in between."""
    layers = [random_weights(SMALL, "fp8_block", seed=seed, device="cuda") for seed in range(3)]
    with MoERuntime(SMALL, layers=layers, buckets=[8], path=path, progress=False) as rt, torch.no_grad():

        def loop(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            for layer in rt.layers:
                x = x + layer(x, ids, weights)
            return x

        optimised = torch.compile(loop, mode=mode, fullgraph=True)
        for seed, name in enumerate(("balanced", "zipf", "balanced", "one_expert", "balanced", "zipf")):
            x, weights = random_inputs(SMALL, 8, seed=seed, device="cuda")
            ids = routing(name, SMALL, 8, seed=seed, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            got = optimised(x, ids, weights).clone()
            assert torch.equal(got, loop(x, ids, weights)), (seed, name)
