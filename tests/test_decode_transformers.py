"""`GraphedDecoder` on tiny models of Transformers: the tokens of their own eager code, and of a solo run to the bit."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import graphmoe
from graphmoe import GraphedDecoder, Request
from graphmoe.errors import InvalidInput, WeightsMismatch
from graphmoe.integrations.transformers import quantize_experts
from tests.tiny_models import SUPPORTED, clear_prompts, tiny_model

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def registered() -> None:
    graphmoe.register_transformers()


def decoder(model: Any, sizes: Any = (1, 2, 4), length: int = 64, **arguments: Any) -> GraphedDecoder:
    return GraphedDecoder(model, sizes, length, **{"progress": False, "prefill_chunk": 16, **arguments})


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_a_growing_and_shrinking_batch_gives_the_tokens_of_eager_code(architecture: str) -> None:
    """Prompts of one token, of a chunk and one more, of several chunks; they come at different times and ask for different lengths."""
    prompts = clear_prompts(tiny_model(architecture), (3, 1, 17, 16, 40, 5, 33), 12)
    model = tiny_model(architecture, experts="graphmoe")
    before = model.config._attn_implementation
    served = decoder(model)

    def arriving() -> Iterator[Request | None]:
        for place, prompt in enumerate(prompts):
            yield from [None] * (place % 3)
            yield Request(prompt.tokens, 12 - place)

    finished = {each.index: each.tokens for each in served.serve(arriving())}
    assert finished == {place: prompt.answer[: 12 - place] for place, prompt in enumerate(prompts)}
    assert served.generate([prompt.tokens for prompt in prompts], 12) == [prompt.answer for prompt in prompts]
    assert served.report().moves > 0
    assert model.config._attn_implementation == before, "the model's own forward passes are what they were"


def test_quantised_experts_decode_as_they_do_eagerly() -> None:
    """A margin that FP8 rounding does not cross is none of random weights: the decoder is held against the same experts in the model's own loop."""
    model = tiny_model("Qwen3Moe", experts="graphmoe", hidden_size=128, moe_intermediate_size=128)
    assert quantize_experts(model) == 2
    prompts = clear_prompts(model, (4, 20, 9), 8)
    assert decoder(model).generate([prompt.tokens for prompt in prompts], 8) == [prompt.answer for prompt in prompts]


def test_a_captured_step_has_the_bits_of_an_eager_one() -> None:
    model = tiny_model("Qwen3Moe", experts="graphmoe")
    prompts = [[1, 2, 3], [4], [5] * 20]
    kept = []
    for capture in (True, False):
        served = decoder(model, keep_logits=True, capture=capture)
        answers = served.generate(prompts, 16)
        assert served.logits is not None
        kept.append((answers, served.logits.clone()))
    assert kept[0][0] == kept[1][0]
    assert torch.equal(kept[0][1], kept[1][1])


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_a_sequence_has_the_bits_of_its_solo_run_whatever_shares_its_batch(architecture: str) -> None:
    served = decoder(tiny_model(architecture, experts="graphmoe"), [6], batch_invariant=True, keep_logits=True)
    seen: dict[int, list[torch.Tensor]] = {0: [], 3: []}

    def watched(row: int) -> Request:
        """Keeps that row's logits whenever the host hears of a token: the device is one step ahead by then, until the row is left."""
        return Request([7, 3, 9], 10, on_token=lambda token: seen[row].append(served.logits[row].clone()))  # type: ignore[index]

    (alone,) = served.serve([watched(0)])
    others = [Request([place] * (place + 1), 30) for place in range(3)]
    finished = {each.index: each for each in served.serve([*others, watched(3), Request([8, 8], 30)])}
    assert finished[3].tokens == alone.tokens
    assert all(torch.equal(left, right) for left, right in zip(seen[0][:8], seen[3][:8], strict=True))
    assert not torch.equal(seen[0][0], seen[0][1])


def test_a_served_run_of_random_requests_equals_solo_runs() -> None:
    """Ladder 1..64, random arrivals, prompts and lengths, some sampled; in batch-invariant mode every sequence is its solo run."""
    count = 500 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 90
    rng = random.Random(11)
    model = tiny_model("Qwen3Moe", experts="graphmoe", num_hidden_layers=1)
    served = decoder(model, range(1, 65), 48, batch_invariant=True)
    requests = [
        Request(
            [rng.randrange(32) for _ in range(rng.randint(1, 24))], rng.randint(1, 24), rng.choice([0.0, 0.0, 1.0]), top_p=0.9, seed=3, sequence=place
        )
        for place in range(count)
    ]

    def arriving() -> Iterator[Request | None]:
        for request in requests:
            yield from [None] * rng.choice([0, 0, 0, 0, 1, 5])
            yield request

    finished = {each.index: each.tokens for each in served.serve(arriving())}
    assert served.report().steps < sum(request.max_new_tokens for request in requests) / 3, "hardly anything ran together"
    for place, request in enumerate(requests if count == 500 else requests[:25]):
        (solo,) = served.serve([request])
        assert finished[place] == solo.tokens, place


def test_two_decoders_of_one_model_do_not_disturb_each_other() -> None:
    model = tiny_model("Mixtral", experts="graphmoe")
    first = decoder(model)
    wanted = first.generate([[1, 2], [3]], 8)
    second = decoder(model, [8])
    second.generate([[1, 2], [3]], 8)
    assert first.generate([[1, 2], [3]], 8) == wanted
    assert first.report().buckets[0].rows > 0


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("GptOss", {}, "sliding_attention"),
        ("Qwen3Next", {}, "linear_attention"),
        ("Mixtral", {"sliding_window": 32}, "sliding window"),
        ("Qwen3Moe", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
        ("Qwen3Moe", {"hidden_act": "gelu"}, "cannot be captured: its activation"),
    ],
)
def test_a_model_that_cannot_be_captured_is_refused_with_its_reason(architecture: str, changes: dict[str, Any], words: str) -> None:
    model = tiny_model(architecture, experts="graphmoe", **changes)
    with pytest.raises(InvalidInput, match=words):
        decoder(model)


def test_models_in_the_wrong_mode_are_refused() -> None:
    with pytest.raises(InvalidInput, match="set_experts_implementation"):
        decoder(tiny_model("Qwen3Moe"))
    with pytest.raises(InvalidInput, match="eval"):
        decoder(tiny_model("Qwen3Moe", experts="graphmoe").train())
    with pytest.raises(InvalidInput, match="language-model head"):
        decoder(tiny_model("Qwen3Moe", experts="graphmoe").model)
    with pytest.raises(InvalidInput, match="float32"):
        decoder(tiny_model("Qwen3Moe", experts="graphmoe", dtype=torch.float32))


def test_our_attention_outside_a_decoder_says_so() -> None:
    model = tiny_model("Qwen3Moe", experts="graphmoe")
    model.config._attn_implementation = "graphmoe"
    with pytest.raises(InvalidInput, match="inside GraphedDecoder only"):
        model(torch.tensor([[1]]))


def test_the_stop_token_of_the_model_ends_a_sequence() -> None:
    model = tiny_model("Qwen3Moe", experts="graphmoe")
    answer = decoder(model).generate([[1, 2, 3]], 12)[0]
    model.generation_config.eos_token_id = [answer[4], 31]
    stopped = decoder(model).generate([[1, 2, 3]], 12)[0]
    assert stopped == answer[: min(answer.index(token) for token in (answer[4], 31) if token in answer) + 1]


def test_weights_may_change_in_place_but_not_move() -> None:
    model = tiny_model("Qwen3Moe", experts="graphmoe")
    served = decoder(model)
    before = served.generate([[1, 2, 3]], 12)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(-1.5)
        model.model.layers[1].mlp.experts.down_proj.mul_(3.0)
    changed = served.generate([[1, 2, 3]], 12)
    assert changed != before
    assert changed == decoder(model).generate([[1, 2, 3]], 12)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with pytest.raises(WeightsMismatch, match=r"lm_head.weight\). Build a new decoder"):
        served.generate([[1, 2, 3]], 12)
    assert decoder(model).generate([[1, 2, 3]], 12) == changed
