"""What broke the decode loop once, or would break one like it: each must give the right tokens or a clear error, and leave the decoder usable."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphmoe
from graphmoe import GraphedDecoder, Request
from graphmoe.decode.steps import State
from graphmoe.errors import ArenaTooLarge, CallError, CaptureError, InvalidInput, RuntimeClosed, WeightsMismatch
from tests.test_decode import Recalling, recalled
from tests.test_decode import decoder as recalling_decoder
from tests.tiny_models import tiny_model

transformers = pytest.importorskip("transformers")

PROMPTS = [[(place * step) % 32 for place in range(20)] for step in range(1, 7)]


@pytest.fixture(autouse=True)
def registered() -> None:
    graphmoe.register_transformers()


def decoder(model: Any, sizes: Any = (1, 2, 4), length: int = 64, **arguments: Any) -> GraphedDecoder:
    return GraphedDecoder(model, sizes, length, **{"progress": False, "prefill_chunk": 16, **arguments})


def small(seed: int = 0, architecture: str = "Qwen3Moe", **changes: Any) -> Any:
    return tiny_model(architecture, experts="graphmoe", seed=seed, **changes)


# threads


@pytest.fixture
def impatient() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*jobs: Callable[[], object]) -> list[object]:
    """Each in a thread of its own; what they return, or what they raise."""
    results: list[object] = [None] * len(jobs)

    def run(place: int) -> None:
        try:
            results[place] = jobs[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.usefixtures("impatient")
def test_a_decoder_does_not_reach_into_the_forward_passes_of_other_threads() -> None:
    served, other, tokens = decoder(small(1)), small(2), torch.arange(16)[None]
    with torch.no_grad():
        wanted, expected = other(tokens).logits, served.generate(PROMPTS, 4)

        def forward() -> list[Tensor]:
            with torch.no_grad():
                return [other(tokens).logits for _ in range(40)]

        seen, answers = together(forward, lambda: [served.generate(PROMPTS, 4) for _ in range(4)])
    assert isinstance(seen, list), seen
    assert all(torch.equal(logits, wanted) for logits in seen)
    assert answers == [expected] * 4


@pytest.mark.usefixtures("impatient")
def test_a_forward_pass_of_the_decoders_own_model_in_another_thread_is_right_or_refused() -> None:
    model, tokens = small(), torch.arange(16)[None]
    served = decoder(model)
    with torch.no_grad():
        wanted, expected = model(tokens).logits, served.generate(PROMPTS, 4)

    def forward() -> tuple[int, int]:
        right = refused = 0
        for _ in range(100):
            try:
                with torch.no_grad():
                    logits = model(tokens).logits
            except InvalidInput as error:
                assert "while no decoder works on the same model" in str(error)  # noqa: PT017
                refused += 1
            else:
                assert torch.equal(logits, wanted)
                right += 1
        return right, refused

    counted, answers = together(forward, lambda: [served.generate(PROMPTS, 4) for _ in range(6)])
    assert isinstance(counted, tuple), counted
    assert sum(counted) == 100
    assert answers == [expected] * 6


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("shared", [True, False])
def test_decoders_work_in_threads_beside_each_other(shared: bool) -> None:
    models = [small(1)] * 2 if shared else [small(1), small(2)]
    served = [decoder(model) for model in models]
    wanted = [each.generate(PROMPTS, 4) for each in served]
    answers = together(*(lambda each=each: [each.generate(PROMPTS, 4) for _ in range(4)] for each in served))  # type: ignore[misc]
    assert answers == [[each] * 4 for each in wanted]


def test_one_decoder_serves_one_thread_at_a_time() -> None:
    served = recalling_decoder()
    serving = served.serve([Request([1], 3), Request([2], 9)])
    next(serving)
    (error,) = together(lambda: served.generate([[1]], 1))
    assert isinstance(error, CallError)
    (rest,) = together(lambda: list(serving))
    assert [each.tokens for each in rest] == [recalled([2], 9)]  # type: ignore[union-attr]
    assert served.generate([[1]], 3) == [recalled([1], 3)]


# what a model asks of its cache and its attention


def test_attention_that_asks_for_more_is_refused() -> None:
    from graphmoe.integrations.transformers.decoding import _why_not_attend

    module = nn.Module()
    assert _why_not_attend(module, None, {"dropout": 0.0, "sliding_window": None, "is_causal": None, "position_ids": torch.zeros(1)}) is None
    assert _why_not_attend(module, torch.zeros(1), {}) == "its attention has a mask of its own"
    assert _why_not_attend(module, None, {"is_causal": False}) == "its attention is not causal"
    assert _why_not_attend(module, None, {"sliding_window": 16}) == "its attention has sliding_window=16"
    assert _why_not_attend(module, None, {"block_indices": torch.zeros(1)}) == "its attention has block_indices"
    module.is_causal = False  # type: ignore[assignment]
    assert _why_not_attend(module, None, {}) == "its attention is not causal"


_DENSE = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 512, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def dense(name: str, **changes: Any) -> Any:
    config, model = (getattr(transformers, f"{name}{kind}", None) for kind in ("Config", "ForCausalLM"))
    if config is None or model is None:
        pytest.skip(f"this Transformers has no {name}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model(config(**{**_DENSE, **changes})).to(torch.bfloat16).eval()


def test_a_window_that_a_model_keeps_in_its_mask_is_refused() -> None:
    with pytest.raises(InvalidInput, match="mask of its own"):
        decoder(dense("Doge", keep_window_size=8))


def test_a_model_that_asks_for_one_length_of_all_sequences_is_refused() -> None:
    if not hasattr(transformers, "Llama4TextConfig"):
        pytest.skip("this Transformers has no Llama 4")
    config = transformers.Llama4TextConfig(
        **_DENSE, head_dim=16, intermediate_size_mlp=64, num_local_experts=2, num_experts_per_tok=1, no_rope_layers=[0], moe_layers=[],
        layer_types=["full_attention"], attn_temperature_tuning=True,
    )  # fmt: skip
    model = transformers.Llama4ForCausalLM(config).to(torch.bfloat16).eval()
    with pytest.raises(InvalidInput, match="one length of all sequences"):
        decoder(model)


def test_a_table_of_positions_bounds_the_cache() -> None:
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).to(torch.bfloat16).eval()
    with pytest.raises(InvalidInput, match="max_cache_len=100, but the model has a table of 64 positions"):
        decoder(model, length=100)
    prompt = list(range(50))
    wanted = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=14, pad_token_id=0)[0, 50:].tolist()
    assert len(decoder(model, length=64, prefill_chunk=24).generate([prompt], 14)[0]) == len(wanted)


def test_logits_for_more_tokens_than_there_are_embeddings_are_refused() -> None:
    model = dense("Llama")
    model.lm_head = nn.Linear(64, 72, bias=False, dtype=torch.bfloat16)
    with pytest.raises(InvalidInput, match="logits for 72 tokens and embeddings for 64"):
        decoder(model)

    class Wider(Recalling):
        def decode(self, *arguments: Any) -> Tensor:
            return torch.cat([super().decode(*arguments)] * 2, dim=1)

    with pytest.raises(InvalidInput, match=r"logits are \(4, 74\), expected \(4, 37\)"):
        recalling_decoder(model=Wider())


def test_a_forward_pass_that_fails_is_told_as_a_reason() -> None:
    model = small()
    model.lm_head.float()
    with pytest.raises(InvalidInput, match="its forward pass fails with RuntimeError"):
        decoder(model)
    with pytest.raises(InvalidInput, match="weights lie on meta"):
        decoder(small().to("meta"))


def test_what_no_recording_sees_is_found_by_a_replay_from_another_state() -> None:
    class Peeking(Recalling):
        def decode(self, tokens: Tensor, positions: Tensor, live: Tensor, cache: Any) -> Tensor:
            return super().decode(tokens + positions.tolist()[0] % 2, positions, live, cache)

    with pytest.raises(CaptureError, match=r"on the host \(tolist or numpy"):
        recalling_decoder(model=Peeking())
    assert recalling_decoder(model=Peeking(), capture=False).generate([[1]], 2)


def test_dummy_experts_of_a_router_are_no_broken_promise() -> None:
    """LongCat-Flash sends what its identity experts take to expert 0, with weight 0: an expert named twice."""
    if not hasattr(transformers, "LongcatFlashConfig"):
        pytest.skip("this Transformers has no LongCat-Flash")
    config = transformers.LongcatFlashConfig(
        vocab_size=64, hidden_size=64, num_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=8, q_lora_rank=32, kv_lora_rank=32,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, ffn_hidden_size=64, expert_ffn_hidden_size=64, n_routed_experts=8, moe_topk=4,
    )  # fmt: skip
    model = transformers.LongcatFlashForCausalLM(config).to(torch.bfloat16).eval()
    logits = []
    for experts in ("eager", "graphmoe"):
        model.set_experts_implementation(experts)
        with torch.no_grad():
            logits.append(model(torch.arange(50)[None]).logits.float())
    assert bool(logits[1].isfinite().all())
    assert float((logits[0] - logits[1]).norm() / logits[0].norm()) < 0.05


def test_stop_tokens_of_a_model_may_be_a_tensor() -> None:
    model = small()
    answer = decoder(model).generate([[1, 2, 3]], 12)[0]
    model.generation_config.eos_token_id = torch.tensor([answer[0]])
    assert decoder(model).generate([[1, 2, 3]], 12) == [answer[:1]]


# a model that changes


def _replace(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight.clone())


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a weight": (_replace, "1 weights were replaced"),
    "a module": (lambda model: setattr(model.model, "norm", copy.deepcopy(model.model.norm)), "modules were replaced"),
    "one more module": (lambda model: model.add_module("adapter", nn.Identity()), "modules were replaced or added"),
    "training mode": (lambda model: model.model.layers[0].mlp.train(), "training mode now"),
    "a hook": (lambda model: model.model.norm.register_forward_hook(lambda module, given, out: out * 2), "hooks of model.norm"),
    "a hook before": (lambda model: model.lm_head.register_forward_pre_hook(lambda module, given: None), "hooks of lm_head"),
    "other experts": (lambda model: model.set_experts_implementation("eager"), "run in 'eager' now"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "between", "while"])
def test_a_model_that_changed_is_refused_before_anything_is_made_of_two_models(change: str, when: str) -> None:
    model = small()
    served, (apply, words) = decoder(model), CHANGES[change]

    def requests() -> Iterator[Request]:
        yield Request([1, 2, 3], 12)
        if when == "while":
            apply(model)
        yield Request([4, 5], 12)

    if when == "before":
        apply(model)
        with pytest.raises(WeightsMismatch, match=words):
            served.serve(requests())
    else:
        serving = served.serve(requests())
        if when == "between":
            apply(model)
        with pytest.raises(WeightsMismatch, match=words):
            list(serving)


def test_a_decoder_closed_before_its_iterator_began_says_so() -> None:
    served = recalling_decoder()
    serving = served.serve([Request([1], 3)])
    served.close()
    with pytest.raises(RuntimeClosed):
        next(serving)


def test_another_decoder_on_a_model_changes_no_bits_of_the_first_or_of_the_model() -> None:
    model, tokens = small(), torch.arange(20)[None]
    with torch.no_grad():
        logits = model(tokens).logits
    first = decoder(model, keep_logits=True, batch_invariant=True)
    assert first.logits is not None
    wanted, bits = first.generate(PROMPTS, 6), first.logits.clone()
    second = decoder(model, (1,), 32, prefill_chunk=4)
    assert second.generate([[1, 2]], 2)
    assert first.generate(PROMPTS, 6) == wanted
    assert torch.equal(first.logits, bits)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, logits)


# modes and defaults of the caller


@pytest.mark.parametrize("architecture", ["DeepseekV3", "Qwen3Moe"])
def test_autocast_of_the_caller_does_not_matter(architecture: str) -> None:
    model = small(architecture=architecture)
    wanted = decoder(model).generate(PROMPTS, 8)
    for dtype in (torch.bfloat16, torch.float16):
        served = decoder(model)
        with torch.autocast("cpu", dtype):
            assert served.generate(PROMPTS, 8) == wanted
            inside = decoder(model)
            assert inside.generate(PROMPTS, 8) == wanted
        assert inside.generate(PROMPTS, 8) == wanted


def test_the_default_device_of_the_caller_does_not_matter() -> None:
    model = small()
    wanted = decoder(model).generate(PROMPTS, 5)
    with torch.device("meta"):
        served = decoder(model)
        assert served.generate(PROMPTS, 5) == wanted
    assert served.generate(PROMPTS, 5) == wanted


def test_a_decoder_is_not_copied() -> None:
    served = recalling_decoder(capture=False)
    for clone in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(CallError, match="cannot be copied"):
            clone(served)
    assert served.generate([[1]], 3) == [recalled([1], 3)]


# padding


@pytest.mark.parametrize("architecture", ["Qwen3Moe", "DeepseekV3"])
def test_what_padding_computes_reaches_no_real_token(architecture: str) -> None:
    model = small(architecture=architecture)
    wanted = decoder(model).generate([[1, 2, 3], list(range(1, 20))], 3)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = float("nan")
    served = decoder(model)
    for cache in (*served._cache.keys, *served._cache.values):
        cache.fill_(float("nan"))
    answers = {done.index: done for done in served.serve([Request([1, 2, 3], 3), Request(list(range(1, 20)), 3)])}
    for index in (0, 1):
        assert answers[index].tokens == wanted[index] or 0 in wanted[index]


def test_zeros_stand_where_padding_was() -> None:
    class Poisoned(Recalling):
        """Its padding computes NaN."""

        def _kept(self, tokens: Tensor, positions: Tensor) -> Any:
            kept = [(keys.clone(), values.clone()) for keys, values in super()._kept(tokens, positions)]
            if tokens.shape[0] == 1 and tokens.shape[1] > 1:
                for keys, values in kept:
                    keys[:, :, 3:] = float("nan")
                    values[:, :, 3:] = float("nan")
            return kept

    served = recalling_decoder(model=Poisoned())
    assert served.generate([[1, 2, 3, 4]], 1) == [recalled([1, 2, 3, 4], 1)]
    assert all(bool(cache.isfinite().all()) for cache in (*served._cache.keys, *served._cache.values))


# requests


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": 1e39}, "temperature=1e+39"),
        ({"temperature": 10**400}, "temperature=0x"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"seed": 10**5000}, "seed=0x"),
        ({"sequence": -(2**70)}, "has 71 bits"),
        ({"max_new_tokens": 10**5000}, "max_new_tokens=0x"),
        ({"top_k": -(10**5000)}, "top_k=-0x"),
        ({"prompt": [10**5000]}, "span 0x"),
        ({"prompt": iter([1, 2])}, "a prompt is a list"),
        ({"prompt": {1, 2}}, "a prompt is a list"),
        ({"prompt": {1: 2}}, "a prompt is a list"),
        ({"stop_tokens": iter([8])}, "stop_tokens="),
        ({"stop_tokens": ""}, "stop_tokens=''"),
        ({"stop_tokens": {8}}, "stop_tokens={8}"),
    ],
    ids=lambda each: each[:12] if isinstance(each, str) else "-".join(each),
)
def test_what_passes_python_but_no_device_is_refused_and_the_others_go_on(wrong: dict[str, Any], words: str) -> None:
    served = recalling_decoder()
    good = Request([1, 2], 4)
    answers = {done.index: done for done in served.serve([good, Request(**{"prompt": [3], "max_new_tokens": 2, **wrong}), good])}
    assert answers[0].tokens == answers[2].tokens == recalled([1, 2], 4)
    assert isinstance(answers[1].error, InvalidInput)
    assert words in str(answers[1].error)
    assert len(str(answers[1].error)) < 400


def test_seeds_and_top_k_may_be_large() -> None:
    served = recalling_decoder(model=Recalling(spread=1.0))
    for seed in (-(2**63), 2**64 - 1):
        assert len(served.generate([[1]], 3, temperature=3e38, seed=seed, top_k=10**30)[0]) == 3


@pytest.mark.parametrize("value", ["64", 64.0, None, True, 2**60, -1])
def test_sizes_are_ints(value: Any) -> None:
    for name in ("length", "prefill_chunk"):
        with pytest.raises(InvalidInput, match=str(value)):
            recalling_decoder(**{name: value})


@pytest.mark.parametrize("prompts", [None, 5, "ab", b"ab", torch.tensor([1, 2]), [1, 2], [None], [[1.5]], [["a"]]])
def test_prompts_of_another_kind_are_refused(prompts: Any) -> None:
    served = recalling_decoder()
    with pytest.raises(InvalidInput, match="prompt"):
        served.generate(prompts, 1)
    with pytest.raises(InvalidInput, match="on_token"):
        served.generate([[1]], 1, on_token=3)  # type: ignore[arg-type]
    for requests in (None, Request([1], 1), 5):
        with pytest.raises(InvalidInput, match="iterable of requests"):
            served.serve(requests)  # type: ignore[arg-type]
    assert served.generate([[1]], 2) == [recalled([1], 2)]


def test_a_cache_that_does_not_fit_is_told_with_its_size() -> None:
    with pytest.raises(ArenaTooLarge, match=r"of 4 rows of 2147483\d{3} positions takes \d+\.\d GiB"):
        recalling_decoder(length=2**31 - 100, prefill_chunk=16)


# the report


def test_a_pause_of_the_caller_is_not_serving() -> None:
    served = recalling_decoder()

    def slowly() -> Iterator[Request]:
        for prompt in ([1], [], [2]):
            time.sleep(0.2)
            yield Request(prompt, 2)

    serving = served.serve(slowly())
    for done in serving:
        time.sleep(0.2)
        assert 0 < served.report().serve_seconds < 0.2, done
    assert served.report().serve_seconds < 0.2


def test_building_leaves_the_state_of_no_sequence() -> None:
    served = recalling_decoder()
    assert all(not bool(entry.any()) for entry in served._state.per_row())
    assert isinstance(served._state, State)
