"""From hidden states to hidden states: the choice of experts, and the block around a layer."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from graphmoe import ExpertWeights, MoEBlock, MoERuntime, MoESpec, Router, SharedExperts, reference
from graphmoe.errors import BatchTooLarge, BrokenPromise, InvalidInput, SpecError
from tests.checks import bits

SPEC = MoESpec(8, 2, 128, 128)


def choose(ops: Any, logits: Tensor, bias: Tensor | None, router: Router, offset: int = 0, experts: int | None = None) -> tuple[Tensor, Tensor]:
    ids = torch.full((logits.shape[0], router.top_k), 77, dtype=torch.int32)
    weights = torch.full((logits.shape[0], router.top_k), 77.0)
    experts = router.num_experts if experts is None else experts
    ops.select_experts(logits, bias, router, offset=offset, experts=experts, topk_ids=ids, topk_weights=weights)
    return ids, weights


def by_hand(logits: list[float], bias: list[float], router: Router) -> tuple[list[int], list[float]]:
    """One token's choice as a person would make it, in float64."""
    values = torch.tensor(logits, dtype=torch.float64)
    scores = (values.softmax(0) if router.scoring == "softmax" else values.sigmoid()).tolist()
    wanted = [score + shift for score, shift in zip(scores, bias, strict=True)]
    size = router.group_size
    worth = {group: sum(sorted(wanted[group * size : (group + 1) * size])[-2:]) for group in range(router.groups)}
    groups = sorted(worth, key=lambda group: (-worth[group], group))[: router.top_groups]
    allowed = [expert for expert in range(router.num_experts) if expert // size in groups]
    chosen = sorted(allowed, key=lambda expert: (-wanted[expert], expert))[: router.top_k]
    weights = [scores[expert] for expert in chosen]
    return chosen, [weight / sum(weights) for weight in weights] if router.renormalize else weights


@st.composite
def routers(draw: st.DrawFn) -> Router:
    groups, size = draw(st.integers(1, 5)), draw(st.integers(2, 7))
    top_groups = draw(st.integers(1, groups))
    top_k = draw(st.integers(1, min(9, top_groups * size)))
    return Router(groups * size, top_k, draw(st.sampled_from(["softmax", "sigmoid"])), draw(st.booleans()), groups, top_groups)


def spread_out(router: Router, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Logits and biases of which no two choices are nearly the same: multiples of a step, each once."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.stack([torch.randperm(router.num_experts, generator=generator) for _ in range(tokens)])
    logits = (place - router.num_experts / 2) * 0.11 + 0.003 * place**1.5
    bias = torch.randperm(router.num_experts, generator=generator) * 0.0137
    return logits.float(), bias.float()


@given(routers(), st.booleans(), st.integers(1, 4), st.integers(0, 2**31))
@settings(max_examples=40)
def test_the_choice_is_what_a_person_would_make(router: Router, biased: bool, tokens: int, seed: int) -> None:
    logits, bias = spread_out(router, tokens, seed)
    ids, weights = choose(reference, logits, bias if biased else None, router)
    for token in range(tokens):
        wanted = by_hand(logits[token].tolist(), bias.tolist() if biased else [0.0] * router.num_experts, router)
        assert ids[token].tolist() == wanted[0]
        assert weights[token].tolist() == pytest.approx(wanted[1], rel=1e-5)


@given(routers(), st.booleans(), st.booleans(), st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_the_kernel_is_its_twin(router: Router, biased: bool, narrow: bool, tokens: int, seed: int) -> None:
    """In Triton's interpreter; one token's logits are not finite, rows are strided, and the rank holds only some of the experts."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernel is compiled here; tests/gpu compares it")
    from graphmoe import kernels

    logits, bias = spread_out(router, tokens, seed)
    rows = torch.full((tokens, router.num_experts + 3), float("nan"))[:, : router.num_experts].copy_(logits)
    if tokens > 1:
        rows[1, seed % router.num_experts] = [float("nan"), float("inf")][seed % 2]
    offset = seed % router.num_experts if narrow else 0
    experts = max(1, (router.num_experts - offset) // 2) if narrow else router.num_experts
    found = [choose(ops, rows, bias if biased else None, router, offset, experts) for ops in (kernels, reference)]
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=2e-6, atol=1e-12, equal_nan=True)


def test_of_equals_the_lower_number_comes_first_and_a_disabled_expert_never() -> None:
    kernels = pytest.importorskip("graphmoe.kernels")
    for ops in (reference,) if torch.cuda.is_available() else (reference, kernels):
        assert choose(ops, torch.zeros(1, 8), None, Router(8, 3))[0].tolist() == [[0, 1, 2]]
        assert choose(ops, torch.zeros(1, 8), None, Router(8, 3, "sigmoid", groups=4, top_groups=2))[0].tolist() == [[0, 1, 2]]
        off = torch.tensor([float("-inf")] * 6 + [0.0, 0.0])
        ids, weights = choose(ops, torch.zeros(1, 8), off, Router(8, 3, "sigmoid"))
        assert (ids.tolist(), weights.tolist()) == ([[6, 7, -1]], [[0.5, 0.5, 0.0]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_no_plausible_choice(bad: float) -> None:
    logits = torch.zeros(2, 8)
    logits[1, 3] = bad
    ids, weights = choose(reference, logits, None, Router(8, 2))
    assert bool(weights[0].isfinite().all())
    assert bool(weights[1].isnan().all()), "softmax of an infinity is NaN too"
    assert ids[1].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_experts": 0}, "num_experts=0"),
        ({"top_k": 9}, "top_k=9"),
        ({"groups": 3}, "groups=3"),
        ({"groups": 8}, "two best"),
        ({"groups": 4, "top_groups": 5}, "top_groups=5"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "top_k=3"),
        ({"scoring": "tanh"}, "'tanh'"),
    ],
)
def test_numbers_that_name_no_choice_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Router(**{"num_experts": 8, "top_k": 2, **arguments})


# the block


def layer_weights(spec: MoESpec, fmt: str = "bf16") -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)
    e, h, i = spec.num_local_experts, spec.hidden_size, spec.intermediate_size
    w13 = torch.randn(e, 2 * i, h, generator=generator).bfloat16() / h**0.5
    return ExpertWeights.from_bf16(spec, w13, torch.randn(e, h, i, generator=generator).bfloat16() / i**0.5, fmt=fmt)


def shared_experts(gated: bool, width: int = 128) -> SharedExperts:
    generator = torch.Generator().manual_seed(1)
    w13, w2, gate = (torch.randn(shape, generator=generator).bfloat16() / 12 for shape in ((2 * 96, width), (width, 96), (1, width)))
    return SharedExperts(w13, w2, gate if gated else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shared", [None, False, True])
def test_a_block_is_router_experts_and_shared_experts(shared: bool | None, dtype: torch.dtype) -> None:
    """Against each part in float32."""
    generator = torch.Generator().manual_seed(2)
    gate, hidden = torch.randn(8, 128, generator=generator).to(dtype) / 11, torch.randn(5, 128, generator=generator).bfloat16()
    weights, beside = layer_weights(SPEC), None if shared is None else shared_experts(shared)
    with MoERuntime(SPEC, weights, buckets=[1, 8], device="cpu") as runtime:
        block = MoEBlock(runtime.layers[0], Router(8, 2), gate, shared=beside)
        got = block(hidden)
        probabilities, chosen = (hidden.to(dtype) @ gate.T).float().softmax(-1).topk(2)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        want = torch.zeros(5, 128)
        w13, w2 = weights.w13.float(), weights.w2.float()
        for token in range(5):
            for share, expert in zip(probabilities[token], chosen[token], strict=True):
                gated, up = (w13[expert] @ hidden[token].float()).chunk(2)
                want[token] += share * (w2[expert] @ (F.silu(gated) * up))
        if beside is not None:
            gated, up = (hidden.float() @ beside.w13.float().T).chunk(2, dim=-1)
            extra = (F.silu(gated) * up) @ beside.w2.float().T
            want += extra if beside.gate is None else (hidden.float() @ beside.gate.float().T).sigmoid() * extra
        assert float(((got.float() - want).norm(dim=1) / want.norm(dim=1)).max()) < 0.02
        again = block(hidden[:1])
        assert got.data_ptr() != again.data_ptr()
        assert torch.equal(bits(block(hidden)), bits(got))
        assert block(hidden[:0]).shape == (0, 128)


def test_ranks_of_a_block_add_up() -> None:
    generator = torch.Generator().manual_seed(2)
    gate, hidden = torch.randn(8, 128, generator=generator) / 11, torch.randn(4, 128, generator=generator).bfloat16()
    bias = torch.linspace(-0.2, 0.2, 8)
    router = Router(8, 2, "sigmoid", groups=4, top_groups=2)
    parts = []
    for ep in (1, 2, 4):
        total = torch.zeros(4, 128)
        for rank in range(ep):
            spec = SPEC.shard(ep=ep, ep_rank=rank)
            first = rank * 8 // ep
            whole = layer_weights(SPEC)
            own = slice(first, first + 8 // ep)
            weights = ExpertWeights.from_bf16(spec, whole.w13[own].contiguous(), whole.w2[own].contiguous(), fmt="bf16")
            with MoERuntime(spec, weights, buckets=[4], device="cpu", path="psum") as runtime:
                total += MoEBlock(runtime.layers[0], router, gate, correction_bias=bias)(hidden).float()
        parts.append(total)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], rtol=0.02, atol=0.02)


def test_a_token_that_is_not_finite_is_nan_alone() -> None:
    gate, hidden = torch.randn(8, 128) / 11, torch.randn(3, 128).bfloat16()
    with MoERuntime(SPEC, layer_weights(SPEC), buckets=[4], device="cpu") as runtime:
        block = MoEBlock(runtime.layers[0], Router(8, 2), gate)
        wanted = block(hidden)
        hidden[1, 5] = float("nan")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BrokenPromise)
            got = block(hidden)
        assert bool(got[1].isnan().all())
        assert torch.equal(bits(got[[0, 2]]), bits(wanted[[0, 2]]))


def test_a_compiled_block_is_one_op() -> None:
    gate, hidden = torch.randn(8, 128) / 11, torch.randn(3, 128).bfloat16()
    seen: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.append([str(node.target) for node in graph.graph.nodes if "graphmoe" in str(node.target)])
        return graph.forward

    with MoERuntime(SPEC, layer_weights(SPEC), buckets=[4], device="cpu") as runtime:
        block = MoEBlock(runtime.layers[0], Router(8, 2), gate, shared=shared_experts(True))
        with torch.no_grad():
            compiled = torch.compile(lambda x: block(x) + 1, backend=backend, fullgraph=True)
            assert torch.equal(compiled(hidden), block(hidden) + 1)
    assert [len(ops) for ops in seen] == [1]


def test_what_does_not_fit_is_refused() -> None:
    gate, hidden = torch.randn(8, 128), torch.randn(3, 128).bfloat16()
    with MoERuntime(SPEC, layer_weights(SPEC), buckets=[2], device="cpu") as runtime:
        layer = runtime.layers[0]
        with pytest.raises(SpecError, match="chooses 3 of 8 experts, the layer has 8 and takes 2"):
            MoEBlock(layer, Router(8, 3), gate)
        for wrong in (gate[:4], gate.half(), gate.T):
            with pytest.raises(InvalidInput, match="gate is"):
                MoEBlock(layer, Router(8, 2), wrong)
        with pytest.raises(InvalidInput, match="correction_bias is"):
            MoEBlock(layer, Router(8, 2), gate, correction_bias=torch.zeros(7))
        with pytest.raises(InvalidInput, match="gate is on meta"):
            MoEBlock(layer, Router(8, 2), gate.to("meta"))
        with pytest.raises(InvalidInput, match=r"shared w13 is torch.bfloat16 \(192, 64\)"):
            MoEBlock(layer, Router(8, 2), gate, shared=shared_experts(False, width=64))
        block = MoEBlock(layer, Router(8, 2), gate)
        for wrong in (hidden.float(), hidden[0], hidden[:, :64]):
            with pytest.raises(InvalidInput, match="hidden is"):
                block(wrong)
        with pytest.raises(BatchTooLarge):
            block(hidden)
        assert block(hidden[:2]).shape == (2, 128)
