"""The decode loop in real graphs: the tiny models of the CPU tests, the attention kernel, and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphmoe
from graphmoe import GraphedDecoder, Request, reference
from graphmoe.decode.attention import attend
from tests.tiny_models import SUPPORTED, clear_prompts, tiny_model

pytest.importorskip("transformers")


def model_of(architecture: str, experts: str = "graphmoe", **changes: Any) -> Any:
    graphmoe.register_transformers()
    return tiny_model(architecture, experts=experts, **changes).to("cuda")


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_graphs_give_the_tokens_of_eager_code(architecture: str) -> None:
    prompts = clear_prompts(model_of(architecture, "eager"), (3, 1, 17, 16, 40, 5, 33), 12)
    served = GraphedDecoder(model_of(architecture), [1, 2, 4], 320, prefill_chunk=16, progress=False)
    assert served.generate([prompt.tokens for prompt in prompts], 12) == [prompt.answer for prompt in prompts]
    requests = [Request(prompt.tokens, 12 - place) for place, prompt in enumerate(prompts)]
    assert {each.index: each.tokens for each in served.serve(requests)} == {
        place: prompt.answer[: 12 - place] for place, prompt in enumerate(prompts)
    }
    assert served.report().moves > 0
    print(served.report())


def test_a_graph_has_the_bits_of_the_eager_step_in_the_same_bucket() -> None:
    model, prompts = model_of("Qwen3Moe"), [[1, 2, 3], [4], [5] * 20]
    kept = []
    for capture in (True, False):
        served = GraphedDecoder(model, [4], 128, keep_logits=True, capture=capture, progress=False)
        answers = [served.generate(prompts, 64, temperature=temperature, seed=1) for temperature in (0.0, 1.0)]
        assert served.logits is not None
        kept.append((answers, served.logits.clone()))
    assert kept[0][0] == kept[1][0]
    assert torch.equal(kept[0][1], kept[1][1])


def test_a_served_run_equals_solo_runs_and_memory_stays_flat() -> None:
    served = GraphedDecoder(model_of("Qwen3Moe"), range(1, 65), 64, batch_invariant=True, progress=False)
    generator = torch.Generator().manual_seed(0)

    def drawn(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=generator))

    requests = [
        Request([drawn(31) for _ in range(drawn(30))], drawn(30), temperature=float(place % 3 == 0), seed=2, sequence=place) for place in range(100)
    ]
    first = {each.index: each.tokens for each in served.serve(requests)}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    again = {each.index: each.tokens for each in served.serve(requests[::-1])}
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert [first[place] for place in range(100)] == [again[99 - place] for place in range(100)]
    for place in range(0, 100, 9):
        (solo,) = served.serve([requests[place]])
        assert solo.tokens == first[place]


@pytest.mark.parametrize(("q_heads", "kv_heads", "key_dim", "value_dim"), [(32, 4, 128, 128), (8, 8, 64, 64), (16, 16, 192, 128), (6, 2, 48, 48)])
def test_the_attention_kernel_is_its_twin_and_a_row_has_its_own_bits(q_heads: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
    """What lies beyond a row's length is NaN."""
    batch, length = 5, 1100
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(batch, q_heads, key_dim, generator=generator, device="cuda").bfloat16()
    keys = torch.randn(batch, kv_heads, length, key_dim, generator=generator, device="cuda").bfloat16()
    values = torch.randn(batch, length, kv_heads, value_dim + 8, generator=generator, device="cuda").bfloat16()[..., :value_dim].transpose(1, 2)
    positions = torch.tensor([0, 255, 256, 700, length - 1], device="cuda")
    for row, end in enumerate(positions.tolist()):
        keys[row, :, end + 1 :] = float("nan")
        values[row, :, end + 1 :] = float("nan")
    wanted = torch.empty(batch, q_heads, value_dim, dtype=torch.bfloat16, device="cuda")
    reference.attend(q, keys, values, positions, scale=key_dim**-0.5, out=wanted)
    got = attend(q, keys, values, positions, key_dim**-0.5)
    torch.testing.assert_close(got.float(), wanted.float(), rtol=2e-2, atol=1e-2)
    for row in range(batch):
        alone = attend(*(each[[row]] for each in (q, keys)), values[row : row + 1], positions[[row]], key_dim**-0.5)
        assert torch.equal(alone[0], got[row])
