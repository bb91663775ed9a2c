"""The choice of experts against its twin at real sizes, and a block inside a graph."""

from __future__ import annotations

import pytest
import torch

from graphmoe import ExpertWeights, MoEBlock, MoERuntime, MoESpec, Router, SharedExperts, reference

ROUTERS = {
    "qwen3": Router(128, 8),
    "mixtral": Router(8, 2),
    "deepseek-v3": Router(256, 8, "sigmoid", groups=8, top_groups=4),
    "kimi-k2": Router(384, 8, "sigmoid"),
    "many": Router(512, 10, renormalize=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTERS)
def test_the_kernel_is_its_twin(name: str, dtype: torch.dtype) -> None:
    """Logits are permutations of evenly spread numbers, so that no two choices are nearly the same; one token's are not finite."""
    from graphmoe import kernels

    router = ROUTERS[name]
    for tokens in (1, 7, 512):
        place = torch.argsort(torch.rand(tokens, router.num_experts, device="cuda"), dim=1)
        logits = ((place - router.num_experts / 2) * 2.0**-5).to(dtype)  # at most 9 bits before and 5 behind the point: exact up to 256 experts
        if dtype == torch.bfloat16 and router.num_experts > 256:
            logits = (place % 256 * 2.0**-5).to(dtype)  # equal ones too: the lower number first
        logits[tokens // 2, 3] = float("nan") if tokens > 1 else 0.0
        bias = torch.randperm(router.num_experts, device="cuda") * 2.0**-12 if router.scoring == "sigmoid" else None
        found = []
        for ops in (kernels, reference):
            ids = torch.full((tokens, router.top_k), 77, dtype=torch.int32, device="cuda")
            weights = torch.full((tokens, router.top_k), 77.0, device="cuda")
            ops.select_experts(logits, bias, router, offset=0, experts=router.num_experts, topk_ids=ids, topk_weights=weights)
            found.append((ids, weights))
        (ids, weights), (wanted_ids, wanted_weights) = found
        torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-9, equal_nan=True)
        same = (ids == wanted_ids).all(1)
        assert float(same.float().mean()) > 0.98, "saturated sigmoids tie by rounding, here and there"
        if router.scoring == "softmax":
            assert bool(same.all())


def test_a_block_in_a_graph_gives_the_bits_of_a_call() -> None:
    spec = MoESpec(16, 4, 512, 256)
    w13, w2 = torch.randn(16, 512, 512).bfloat16() / 22, torch.randn(16, 512, 256).bfloat16() / 16
    weights = ExpertWeights.from_bf16(spec, w13, w2).to("cuda")
    shared = SharedExperts(torch.randn(512, 512, device="cuda").bfloat16() / 22, torch.randn(512, 256, device="cuda").bfloat16() / 16)
    hidden = torch.randn(8, 512, device="cuda").bfloat16()
    with MoERuntime(spec, weights, buckets=[8], progress=False) as runtime:
        block = MoEBlock(runtime.layers[0], Router(16, 4), torch.randn(16, 512, device="cuda") / 22, shared=shared)
        wanted = block(hidden).clone()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            block(hidden)
            with torch.cuda.graph(graph, stream=stream):
                out = block(hidden)
        torch.cuda.current_stream().wait_stream(stream)
        for _ in range(3):
            hidden.copy_(torch.randn_like(hidden))
            graph.replay()
            torch.testing.assert_close(out, block(hidden), rtol=0, atol=0)
        assert not torch.equal(out, wanted)
