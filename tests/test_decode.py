"""The decode loop with a model whose every token says what its cache held, sampling, and the recording that stands in for a graph."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphmoe import GraphedDecoder, Request, reference
from graphmoe.decode import LayerKV
from graphmoe.decode.kv import KVCache
from graphmoe.decode.recording import Recording
from graphmoe.decode.requests import key_of
from graphmoe.decode.sampling import greedy, sample, uniform24
from graphmoe.errors import CallError, CaptureError, InvalidInput, RuntimeClosed

VOCAB = 37


class Recalling:
    """Its next token is a hash of every token at its position in the row's cache; keys hold the tokens, values their positions."""

    def __init__(self, stop_tokens: frozenset[int] = frozenset(), poison: int | None = None, spread: float = 0.0) -> None:
        self.device, self.vocab_size, self.stop_tokens, self.nbytes = torch.device("cpu"), VOCAB, stop_tokens, 0
        self.kv_dtype, self.kv_layers = torch.float32, [LayerKV(1, 1, 1, 1), LayerKV(2, 1, 1, 3)]
        self.arena_bytes, self.max_positions, self.poison, self.spread = 0, None, poison, spread

    def check_weights(self) -> None:
        pass

    def rows_bound(self, tokens: int) -> int:
        return 0

    def decode(self, tokens: Tensor, positions: Tensor, live: Tensor, cache: KVCache) -> Tensor:
        kept = self._kept(tokens.view(-1, 1), positions.view(-1, 1))
        seen = [cache.append(layer, *pair, positions) for layer, pair in enumerate(kept)]
        length = torch.arange(cache.length)
        inside = length <= positions[:, None]
        keys, values = seen[1][0][:, 1, :, 0], seen[1][1][:, 0, :, 2]
        hashed = torch.where(inside, (keys + 1) * (values + 3) * 7, 0).sum(-1).long() % VOCAB
        logits = (torch.arange(VOCAB) == hashed[:, None]).float() * (8.0 if self.spread else 1.0)
        if self.spread:
            logits = logits + self.spread * torch.arange(VOCAB) / VOCAB
        if self.poison is not None:
            logits = torch.where((tokens == self.poison)[:, None], float("nan"), logits)
        return logits

    def prefill(self, tokens: Tensor, first: int, count: int, row: int, cache: KVCache) -> None:
        for layer, pair in enumerate(self._kept(tokens[None], (first + torch.arange(len(tokens)))[None])):
            cache.extend(layer, *pair, row, first, count)

    def _kept(self, tokens: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        batch, count = tokens.shape
        token, position = tokens.float().view(batch, 1, count, 1), positions.float().view(batch, 1, count, 1)
        return [(token, position), (token.expand(-1, 2, -1, -1), position.expand(-1, -1, -1, 3))]


def recalled(prompt: list[int], new_tokens: int) -> list[int]:
    """What `Recalling` says, without a cache."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(sum((token + 1) * (place + 3) * 7 for place, token in enumerate(tokens)) % VOCAB)
    return tokens[len(prompt) :]


def decoder(sizes: Iterable[int] = (1, 2, 4), length: int = 48, **arguments: object) -> GraphedDecoder:
    model = arguments.pop("model", None) or Recalling()
    return GraphedDecoder(model, sizes, length, **{"progress": False, "prefill_chunk": 8, **arguments})


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)


@given(
    st.lists(st.tuples(prompts, st.integers(1, 20), st.integers(0, 3)), max_size=14), st.booleans(), st.sampled_from([(1,), (1, 2, 4), (3, 8), (5,)])
)
def test_every_sequence_gets_its_own_tokens_whatever_comes_and_goes(
    wanted: list[tuple[list[int], int, int]], fixed: bool, sizes: tuple[int, ...]
) -> None:
    """Random prompts, lengths, arrivals and ladders: rows move, are left and taken again, and each token depends on the whole row."""

    def arriving() -> Iterator[Request | None]:
        for prompt, new_tokens, pause in wanted:
            yield from [None] * pause
            yield Request(prompt, new_tokens)

    served = decoder(sizes, batch_invariant=fixed, sampling=False)
    finished = {each.index: each for each in served.serve(arriving())}
    assert sorted(finished) == list(range(len(wanted)))
    for index, (prompt, new_tokens, _) in enumerate(wanted):
        assert finished[index].tokens == recalled(prompt, new_tokens)
        assert finished[index].reason == "length"
    report = served.report()
    assert report.new_tokens == sum(new_tokens for _, new_tokens, _ in wanted)
    assert not (fixed and report.moves)


def test_a_batch_that_shrinks_moves_no_more_rows_than_it_must() -> None:
    served = decoder((2, 4, 8))
    answers = served.generate([[1], [2], [3], [4], [5], [6], [7], [8]], 3)
    assert served.report().moves == 0, "all ended at once"
    assert answers == [recalled([token], 3) for token in range(1, 9)]
    lengths = [9, 2, 2, 2, 2, 2, 2, 9]
    finished = sorted(served.serve(Request([token], length) for token, length in enumerate(lengths)), key=lambda each: each.index)
    assert [each.tokens for each in finished] == [recalled([token], length) for token, length in enumerate(lengths)]
    assert served.report().moves == 1, "only the last row lies beyond the bucket of 2"


def test_stop_tokens_end_a_sequence_and_belong_to_it() -> None:
    answer = recalled([3, 1, 4], 12)
    stop = answer[5]
    first = answer.index(stop) + 1
    own = decoder(model=Recalling(stop_tokens=frozenset({stop})))
    assert own.generate([[3, 1, 4]], 12) == [answer[:first]]
    assert own.generate([[3, 1, 4]], 12, stop_tokens=[]) == [answer]
    (finished,) = decoder().serve([Request([3, 1, 4], 12, stop_tokens=[stop])])
    assert (finished.tokens, finished.reason) == (answer[:first], "stop")


def test_tokens_are_streamed_as_they_come() -> None:
    heard: list[tuple[int, int]] = []
    answers = decoder((2,)).generate([[1], [2], [3]], 5, on_token=lambda index, token: heard.append((index, token)))
    assert [[token for index, token in heard if index == wanted] for wanted in range(3)] == answers
    assert [index for index, _ in heard[:4]] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("Hello"), "run your tokenizer"),
        (Request([]), "at least one token"),
        (Request([VOCAB]), "0..36"),
        (Request([-1]), "-1"),
        (Request([1.5]), "token ids"),  # type: ignore[list-item]
        (Request([1], 0), "max_new_tokens=0"),
        (Request([1] * 40, 9), "max_cache_len=48"),
        (Request([1], 2, temperature=-1.0), "temperature=-1.0"),
        (Request([1], 2, temperature=float("nan")), "temperature=nan"),
        (Request([1], 2, top_k=-1), "top_k=-1"),
        (Request([1], 2.0), "max_new_tokens=2.0"),  # type: ignore[arg-type]
        (Request([1], 2, temperature="hot"), "temperature='hot'"),  # type: ignore[arg-type]
        (Request([1], 2, seed=None), "seed=None"),  # type: ignore[arg-type]
        (Request([1], 2, sequence="a"), "sequence='a'"),  # type: ignore[arg-type]
        (Request([1], 2, stop_tokens=3), "stop_tokens=3"),  # type: ignore[arg-type]
        (Request([1], 2, on_token=3), "on_token=3"),  # type: ignore[arg-type]
        (Request(torch.tensor([1, 2]), 2), "tolist"),  # type: ignore[arg-type]
        ([1, 2], "graphmoe.Request, not a list"),
        (Request([1], 2, top_p=0.0), "top_p=0.0"),
    ],
)
def test_a_request_that_cannot_be_served_gets_its_error_and_the_others_go_on(request_: Request, words: str) -> None:
    served = decoder()
    finished = {each.index: each for each in served.serve([Request([1], 4), request_, Request([2], 4)])}
    assert [finished[index].tokens for index in (0, 2)] == [recalled([1], 4), recalled([2], 4)]
    assert finished[1].reason == "error"
    assert isinstance(finished[1].error, InvalidInput)
    assert words in str(finished[1].error)


def test_generate_checks_everything_before_anything_runs() -> None:
    served = decoder()
    for wrong in ([[1], []], "text", [1, 2]):
        with pytest.raises(InvalidInput):
            served.generate(wrong, 4)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="sampling=False"):
        decoder(sampling=False).generate([[1]], 4, temperature=1.0)
    assert served.report().steps == 0
    assert served.generate([], 4) == []


def test_logits_that_are_not_finite_end_their_sequence_alone() -> None:
    answer = recalled([1, 2], 10)
    poison = next(token for token in answer if token not in recalled([9], 10) and token != 9)
    served = decoder(model=Recalling(poison=poison))
    bad, good = sorted(served.serve([Request([1, 2], 10), Request([9], 10)]), key=lambda each: each.index)
    assert good.tokens == recalled([9], 10)
    assert bad.reason == "error"
    assert "not finite" in str(bad.error)
    assert bad.tokens == answer[: answer.index(poison) + 1]
    with pytest.raises(CallError, match="not finite"):
        served.generate([[1, 2]], 10)
    assert served.generate([[9]], 10) == [recalled([9], 10)]


def test_a_loop_that_is_left_early_leaves_a_decoder_that_works() -> None:
    served = decoder()
    first = served.serve([Request([1], 3), Request([2], 30)])
    assert next(first).index == 0
    with pytest.raises(CallError, match="serving already"):
        served.serve([])
    with pytest.raises(CallError, match="serving"):
        served.close()
    first.close()
    with pytest.raises(ZeroDivisionError):
        served.generate([[1], [2]], 9, on_token=lambda index, token: 1 // 0)
    assert served.generate([[5], [6, 7]], 9) == [recalled([5], 9), recalled([6, 7], 9)]
    served.close()
    with pytest.raises(RuntimeClosed):
        served.generate([[1]], 1)


def test_the_inference_mode_of_the_caller_does_not_matter() -> None:
    with torch.inference_mode():
        served = decoder()
        inside = served.generate([[1], [2, 3]], 9)
    assert inside == served.generate([[1], [2, 3]], 9) == [recalled([1], 9), recalled([2, 3], 9)]


def test_impossible_decoders_are_refused() -> None:
    for wrong, words in (({"length": 1}, "max_cache_len=1"), ({"prefill_chunk": 0}, "prefill_chunk=0"), ({"model": object()}, "object")):
        with pytest.raises(InvalidInput, match=words):
            decoder(**wrong)


def test_serving_leaves_no_tensors_behind() -> None:
    served = decoder((1, 4))

    def tensors() -> int:
        gc.collect()
        return sum(type(each) is Tensor for each in gc.get_objects())

    served.generate([[1]] * 5, 9, temperature=1.0)
    before = tensors()
    for _ in range(3):
        served.generate([[1]] * 9, 9, temperature=1.0)
    assert tensors() == before


def test_the_report_counts_what_happened() -> None:
    served = decoder((1, 4))
    served.generate([[1, 2, 3]] * 2, 5)
    report = served.report()
    assert (report.prompt_tokens, report.new_tokens, report.steps, report.rows_run) == (6, 10, 5, 20)
    assert report.kv_bytes == 4 * 48 * 4 * (1 + 1 + 2 + 3)
    text = str(report)
    assert "2 layers on cpu" in text
    assert "50% of their rows" in text


# Sampling


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(0, 5), st.floats(0.05, 1.0), st.floats(0.2, 3.0))
def test_a_draw_is_among_the_likeliest_and_depends_on_its_row_alone(seed: int, rows: int, top_k: int, top_p: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 11, generator=generator)
    key = torch.tensor([key_of(seed, row) for row in range(rows)])
    positions = torch.randint(0, 999, (rows,), generator=generator)
    settings_ = (torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p))
    drawn = sample(logits, *settings_, key, positions)
    alone = [sample(logits[[row]], *(each[[row]] for each in (*settings_, key, positions))) for row in range(rows)]
    assert drawn.tolist() == torch.cat(alone).tolist()
    for row in range(rows):
        chances = (logits[row] / temperature).softmax(-1).sort(descending=True, stable=True)
        kept = chances.values[:top_k] if top_k else chances.values
        kept = kept / kept.sum()
        allowed = int((kept.cumsum(0) - kept < top_p - 1e-6).sum())
        allowed += int((kept.cumsum(0)[allowed - 1] - top_p).abs() < 1e-5)  # a tie with top_p may round either way
        assert drawn[row] in chances.indices[:allowed].tolist()


@pytest.mark.parametrize(("temperature", "top_p"), [(1e-45, 1.0), (1e-30, 0.5), (1.0, 1e-30), (3e38, 1e-12), (1e-6, 1e-12)])
def test_settings_at_their_ends_take_the_likeliest(temperature: float, top_p: float) -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 100
    one, place = torch.ones(64), torch.arange(64)
    drawn = sample(logits, one * temperature, place * 0, one * top_p, place * 77, place)
    assert drawn.tolist() == logits.argmax(-1).tolist()


def test_a_prompt_list_may_be_any_iterable_and_a_request_comes_back_as_it_was() -> None:
    assert decoder().generate((prompt for prompt in ([1], [2])), 3) == [recalled([1], 3), recalled([2], 3)]  # type: ignore[arg-type]
    request = Request([1, 2], 3, top_k=2**80, temperature=1.0)
    (finished,) = decoder().serve([request])
    assert finished.request is request


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    draws = 40_000
    one = torch.ones(draws)
    drawn = sample(logits.expand(draws, -1), one * 0.8, one.long() * 4, one, torch.full((draws,), key_of(7, 3)), torch.arange(draws))
    kept = (logits / 0.8).masked_fill(logits == -1.0, float("-inf")).softmax(-1)
    measured = torch.bincount(drawn, minlength=5) / draws
    assert torch.all((measured - kept).abs() <= 5 * (kept * (1 - kept) / draws).sqrt())
    assert measured[3] == 0


def test_temperature_zero_is_greedy_and_bad_logits_are_marked() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, float("nan"), 2.0], [float("inf"), 0.0, 1.0], [float("-inf"), 0.0, -1.0]])
    zeros = torch.zeros(4)
    assert greedy(logits).tolist() == [1, -1, -1, 1]
    for temperature in (zeros, zeros + 1):
        drawn = sample(logits, temperature, zeros.long(), zeros + 1, zeros.long(), torch.arange(4))
        assert drawn[1:3].tolist() == [-1, -1]
        assert drawn[3] in (1, 2)
    assert sample(logits, zeros, zeros.long(), zeros + 1, zeros.long(), torch.arange(4)).tolist() == greedy(logits).tolist()


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_random_numbers_are_those_of_splitmix64(key: int, position: int) -> None:
    mask = 2**64 - 1
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    assert uniform24(torch.tensor([key]), torch.tensor([position])).tolist() == [(z ^ (z >> 31)) >> 40]


def test_a_seed_gives_the_same_tokens_in_every_bucket_row_and_order() -> None:
    wanted = [Request([token], 12, temperature=1.3, top_p=0.9, seed=5, sequence=token) for token in range(9)]
    answers = []
    for sizes, order in (((1,), 1), ((1, 2, 4), -1), ((16,), 1)):
        finished = decoder(sizes, model=Recalling(spread=6.0)).serve(wanted[::order])
        answers.append({each.request.sequence: each.tokens for each in finished})
    assert answers[0] == answers[1] == answers[2]
    assert any(answers[0][token] != recalled([token], 12) for token in range(9)), "nothing was drawn but the likeliest"
    other = decoder(model=Recalling(spread=6.0)).generate([[token] for token in range(9)], 12, temperature=1.3, top_p=0.9, seed=6)
    assert other != [answers[0][token] for token in range(9)]


# Recording


def test_a_recording_freezes_what_python_decided() -> None:
    total, source, calls = torch.zeros(3), torch.ones(3), []

    def run() -> None:
        calls.append(1)
        view = total.view(3, 1)
        view += (source * len(calls)).view(3, 1)
        total[0] = source.sum()

    recording = Recording(run)
    source.fill_(2.0)
    recording.replay()
    recording.replay()
    assert len(calls) == 1
    assert total.tolist() == [6.0, 5.0, 5.0]


@given(st.integers(0, 2**31))
@settings(max_examples=20)
def test_a_recording_replays_a_network_to_the_bit(seed: int) -> None:
    torch.manual_seed(seed)
    network = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.SiLU(), torch.nn.Linear(8, 4))
    x, out = torch.randn(5, 6), torch.empty(5, 4)

    def run() -> None:
        with torch.no_grad():
            order = x.sort(dim=0).indices
            out.copy_(network(x.gather(0, order)).softmax(-1))

    recording = Recording(run)
    for _ in range(2):
        x.copy_(torch.randn(5, 6))
        recording.replay()
        again = out.clone()
        run()
        assert torch.equal(again, out)


@pytest.mark.parametrize(
    "read", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: int(x.argmax()), lambda x: bool((x > 0).all())]
)
def test_what_reads_back_to_the_host_cannot_be_recorded(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(CaptureError, match="host"):
        Recording(lambda: read(torch.ones(3)) and None)


# Attention


@given(
    st.integers(1, 3), st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1)]), st.sampled_from([(16, 16), (24, 16), (8, 8)]),
    st.lists(st.integers(0, 299), min_size=3, max_size=3), st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=8)
def test_the_attention_kernel_is_its_twin(batch: int, heads: tuple[int, int], dims: tuple[int, int], ends: list[int], seed: int) -> None:
    """In Triton's interpreter. What lies beyond a row's length is NaN; values lie in memory as latent attention expands them."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernel is compiled here; tests/gpu compares it")
    from graphmoe.kernels.attend import attend, splits

    generator = torch.Generator().manual_seed(seed)
    (q_heads, kv_heads), (key_dim, value_dim), length = heads, dims, 300
    q = torch.randn(batch, q_heads, key_dim, generator=generator)
    keys = torch.randn(batch, kv_heads, length, key_dim, generator=generator)
    values = torch.randn(batch, length, kv_heads, value_dim + 5, generator=generator)[..., :value_dim].transpose(1, 2)
    positions = torch.tensor(ends[:batch])
    for row, end in enumerate(ends[:batch]):
        keys[row, :, end + 1 :] = float("nan")
        values[row, :, end + 1 :] = float("nan")
    wanted, got = torch.empty(batch, q_heads, value_dim), torch.full((batch, q_heads, value_dim), float("nan"))
    reference.attend(q, keys, values, positions, scale=0.3, out=wanted)
    partial, lse = torch.full((batch, q_heads, splits(length), value_dim), float("nan")), torch.full((batch, q_heads, splits(length)), float("nan"))
    attend(q, keys, values, positions, scale=0.3, partial=partial, lse=lse, out=got)
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


def test_offsets_of_heads_and_positions_pass_32_bits() -> None:
    """Of two heads the second begins 2^31 elements behind the first, and so do positions from 128 on. Memory that is not touched is not taken."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernel is compiled here")
    from graphmoe.kernels.attend import attend

    dim, length = 16, 130
    q, positions = torch.randn(1, 2, dim).half(), torch.tensor([length - 1])
    by_head = torch.empty(2, 1 << 31, dtype=torch.float16)[:, : length * dim].view(1, 2, length, dim)
    by_position = torch.empty(length, 1 << 24, dtype=torch.float16).view(1, length, -1)[..., : 2 * dim].view(1, length, 2, dim).transpose(1, 2)
    for keys, values in ((by_head, by_head), (by_position, by_position)):
        keys.copy_(torch.randn(keys.shape))
        wanted = torch.empty(1, 2, dim, dtype=torch.float16)
        reference.attend(q, keys, values, positions, scale=0.25, out=wanted)
        partial, lse = torch.empty(1, 2, 1, dim), torch.empty(1, 2, 1)
        got = torch.empty_like(wanted)
        attend(q, keys, values, positions, scale=0.25, partial=partial, lse=lse, out=got)
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_a_nan_among_the_keys_in_use_is_not_hidden() -> None:
    keys, values = torch.zeros(1, 1, 8, 16), torch.ones(1, 1, 8, 16)
    keys[0, 0, 2] = float("nan")
    for position in (1, 2):
        result = torch.empty(1, 1, 16)
        reference.attend(torch.ones(1, 1, 16), keys, values, torch.tensor([position]), scale=1.0, out=result)
        assert bool(result.isnan().all()) == (position == 2)


def test_rows_of_a_cache_move_only_what_is_in_use() -> None:
    cache = KVCache([LayerKV(1, 2, 1, 2)], 2, 6, torch.float32, torch.device("cpu"))
    cache.keys[0][0] = 1.0
    cache.move(0, 1, 4)
    assert cache.keys[0][1, 0, :, 0].tolist() == [1.0] * 4 + [0.0] * 2


def test_random_arrivals_fill_the_rows_that_are_free() -> None:
    """The loop asks for a request only when it has a row for it."""
    asked, done, most = [0], [0], [0]
    rng = random.Random(0)

    def arriving() -> Iterator[Request]:
        for _ in range(40):
            asked[0] += 1
            most[0] = max(most[0], asked[0] - done[0])
            yield Request([1], rng.randint(1, 9))

    for _ in decoder((1, 4)).serve(arriving()):
        done[0] += 1
    assert (asked[0], done[0]) == (40, 40)
    assert most[0] <= 4 + 4, "4 rows, and what has ended but was not collected yet"
