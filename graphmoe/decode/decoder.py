"""`GraphedDecoder`: a whole model's decode step captured per batch-size bucket, and the loop that keeps it fed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor

from graphmoe.buckets import BucketLadder
from graphmoe.decode.kv import KVCache
from graphmoe.decode.model import adapt
from graphmoe.decode.report import DecoderReport, StepReport
from graphmoe.decode.requests import Finished, Request, check, key_of
from graphmoe.decode.steps import State, build_steps
from graphmoe.device import device_guard
from graphmoe.errors import CallError, InvalidInput, RuntimeClosed

_SMALLEST_CHUNK = 16
_MOST = 2**31 - 1
_BUSY = "this decoder is serving already: finish or close that iterator first, or put the requests into it"


@dataclass(eq=False)
class _Sequence:
    """A request that is being served, in one row of the batch."""

    index: int
    request: Request
    stop_tokens: frozenset[int]
    prompt_length: int
    row: int
    launched: int = 0
    tokens: list[int] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def length(self) -> int:
        """Positions of its row in use."""
        return self.prompt_length - 1 + self.launched


@dataclass(frozen=True)
class _Launched:
    """A step on its way: who was in it, and where its tokens arrive."""

    sequences: tuple[_Sequence, ...]
    rows: tuple[int, ...]
    tokens: Tensor
    arrived: Any


class GraphedDecoder:
    """Decodes with one CUDA graph a batch-size bucket, from token to token on the device; on a CPU the same ops, recorded, stand in for graphs.

    Sequences come and go between steps. Each has a row of the KV cache; rows move only where that lets the batch run in a smaller bucket.

    Args:
        model: a Transformers model (after `graphmoe.register_transformers()`) or a `graphmoe.decode.DecodeModel`.
        capture_sizes: batch sizes that get a graph; the largest is how many sequences run at once. See `BucketLadder.of`.
        max_cache_len: positions of each row: prompt and new tokens together.
        batch_invariant: run every step in the largest bucket. A sequence's logits then are the same bits whatever shares its batch, because
            attention and dense layers round differently at different batch sizes.
        prefill_chunk: most tokens of a prompt that run at once. A shorter rest is padded to a power of two.
        sampling: whether steps that sample are captured beside the greedy ones.
        keep_logits: keep each step's logits in `logits`, `[rows, vocab_size]`.
        capture: False runs each step eagerly instead, in the same buckets: slow, for comparison.
        progress: show a progress bar while capturing.

    Attributes:
        logits: of the last step, a row a sequence, or None.

    Raises:
        InvalidInput: a model that cannot be run, with the reason.
        CaptureError: its decode step cannot be captured.
        SpecError: capture sizes that are no ladder.
    """

    def __init__(
        self,
        model: Any,
        capture_sizes: BucketLadder | str | Iterable[int] = "vllm",
        max_cache_len: int = 4096,
        *,
        batch_invariant: bool = False,
        prefill_chunk: int = 512,
        sampling: bool = True,
        keep_logits: bool = False,
        capture: bool = True,
        progress: bool = True,
    ) -> None:
        started = time.perf_counter()
        _check_count("max_cache_len", max_cache_len, 2, "a prompt's token and a new one")
        _check_count("prefill_chunk", prefill_chunk, 1, "a token")
        ladder = BucketLadder.of(capture_sizes)
        self.ladder = BucketLadder([ladder.largest]) if batch_invariant else ladder
        self.max_cache_len, self.batch_invariant, self.sampling, self.captured = max_cache_len, batch_invariant, sampling, capture
        chunk = min(prefill_chunk, max_cache_len)
        self._chunks = [*(size for size in (1 << power for power in range(31)) if _SMALLEST_CHUNK <= size < chunk), chunk]
        with torch.inference_mode(False), torch.no_grad(), _no_autocast():
            self._model = adapt(model, sorted({*self.ladder.sizes, *self._chunks}))
        self.device = self._model.device
        if self._model.max_positions is not None and max_cache_len > self._model.max_positions:
            raise InvalidInput(f"max_cache_len={max_cache_len}, but the model has a table of {self._model.max_positions} positions")
        with _computing(self.device):
            length = -(-max_cache_len // chunk) * chunk  # the last chunk of a prompt is padded
            self._cache = KVCache(self._model.kv_layers, self.ladder.largest, length, self._model.kv_dtype, self.device)
            logits = torch.zeros(self.ladder.largest, self._model.vocab_size, device=self.device) if keep_logits else None
            self._state = State(self.ladder.largest, self.device, logits)
            self.logits = logits
            self._steps = build_steps(self._model, self._state, self._cache, self.ladder, sampling=sampling, capture=capture, progress=progress)
            self._results = [_pinned(self.ladder.largest, self.device) for _ in range(3)]
        self._rows: list[_Sequence | None] = [None] * self.ladder.largest
        self._closed = False
        self._busy = Lock()
        self._stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        self._launches = 0
        self._counts = {"tokens": 0, "rows": 0, "moves": 0, "prompt_tokens": 0}
        self._steps_run = dict.fromkeys(self.ladder.sizes, 0)
        self._seconds = {"build": time.perf_counter() - started, "serve": 0.0, "prefill": 0.0}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_tokens: Sequence[int] | None = None,
        on_token: Callable[[int, int], object] | None = None,
    ) -> list[list[int]]:
        """The new tokens of each prompt, in the prompts' order. There may be more prompts than the largest bucket has rows.

        Args:
            prompts: token ids.
            max_new_tokens, temperature, top_k, top_p, seed, stop_tokens: of every prompt, see `Request`.
            on_token: called with (a prompt's index, its next token).

        Raises:
            InvalidInput: a prompt or setting that cannot be served; nothing has run then.
            CallError: a sequence's logits were not finite.
        """
        given = list(prompts) if isinstance(prompts, Iterable) and not isinstance(prompts, (str, bytes, Tensor)) else [0]
        if any(isinstance(prompt, int) for prompt in given):
            raise InvalidInput("prompts is a list of prompts, each a list of token ids")
        if not (on_token is None or callable(on_token)):
            raise InvalidInput(f"on_token={on_token!r} must be callable with a prompt's index and a token")
        callbacks = [None if on_token is None else partial(on_token, index) for index in range(len(given))]
        requests = [
            Request(prompt, max_new_tokens, temperature, top_k, top_p, seed, index, stop_tokens, callbacks[index])
            for index, prompt in enumerate(given)
        ]
        for request in requests:
            check(request, self._model.vocab_size, self.max_cache_len, sampling=self.sampling)
        answers: dict[int, list[int]] = {}
        for finished in self.serve(requests):
            if finished.error is not None:
                raise finished.error
            answers[finished.index] = finished.tokens
        return [answers[index] for index in range(len(requests))]

    def serve(self, requests: Iterable[Request | None]) -> Iterator[Finished]:
        """Serve requests as they come: each joins the running batch as soon as a row is free, and is yielded when it has ended.

        Args:
            requests: asked for the next one whenever a row is free; None says that none has arrived yet. It may take its time only when nothing
                is being served: the running batch waits for it.

        Yields:
            In the order in which they end. A request that cannot be served is yielded with its error; the others go on.

        Raises:
            CallError: another `serve` or `generate` of this decoder has not ended.
            WeightsMismatch: the model's weights were replaced or moved.
        """
        self._check_free()
        if isinstance(requests, Request) or not isinstance(requests, Iterable):
            raise InvalidInput(f"serve takes an iterable of requests, not a {type(requests).__name__}")
        return self._serve(iter(requests))

    def _check_free(self) -> None:
        if self._closed:
            raise RuntimeClosed("this decoder was closed; build a new one")
        if self._busy.locked():
            raise CallError(_BUSY)
        self._model.check_weights()

    def _serve(self, requests: Iterator[Request | None]) -> Iterator[Finished]:
        with self._alone():
            under_way: deque[_Launched] = deque()
            index, more = 0, True
            try:
                while more or under_way or any(self._rows):
                    while more and None in self._rows:
                        try:
                            request = next(requests)
                        except StopIteration:
                            more = False
                            break
                        if request is None:
                            break
                        with self._working():
                            refused = self._admit(index, request)
                        index += 1
                        if refused is not None:
                            yield refused
                    if any(self._rows):
                        with self._working():
                            under_way.append(self._launch())
                    # one step stays on its way while the host looks at the one before
                    while under_way and (len(under_way) > 1 or not any(self._rows)):
                        yield from self._collect(under_way.popleft())
            finally:
                self._rows = [None] * self.ladder.largest
                with self._working():
                    self._state.live.zero_()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nothing else uses the rows meanwhile; another thread may end it."""
        self._check_free()
        if not self._busy.acquire(blocking=False):
            raise CallError(_BUSY)
        try:
            yield
        finally:
            self._busy.release()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """The decoder's own work, on the clock, and ordered after what it did on another stream. Never around a `yield` to the caller."""
        started = time.perf_counter()
        with _computing(self.device):
            if self._stream is not None:
                stream = torch.cuda.current_stream(self.device)
                if stream != self._stream:
                    stream.wait_stream(self._stream)
                    self._stream = stream
            yield
        self._seconds["serve"] += time.perf_counter() - started

    @property
    def vocab_size(self) -> int:
        """Tokens are below it."""
        return self._model.vocab_size

    def report(self) -> DecoderReport:
        """What was built and what it has done so far; `print` it."""
        return DecoderReport(
            device=str(self.device),
            emulated=self.captured and self.device.type != "cuda",
            captured=self.captured,
            batch_invariant=self.batch_invariant,
            layers=len(self._model.kv_layers),
            max_cache_len=self.max_cache_len,
            weight_bytes=self._model.nbytes,
            arena_bytes=self._model.arena_bytes,
            kv_bytes=self._cache.nbytes,
            graph_bytes=sum(step.nbytes for step in self._steps.values()),
            build_seconds=self._seconds["build"],
            serve_seconds=self._seconds["serve"],
            prefill_seconds=self._seconds["prefill"],
            prompt_tokens=self._counts["prompt_tokens"],
            new_tokens=self._counts["tokens"],
            rows_run=self._counts["rows"],
            moves=self._counts["moves"],
            buckets=tuple(self._bucket_report(size) for size in self.ladder.sizes),
        )

    @contextmanager
    def rehearsal(self, rows: int, position: int) -> Iterator[Callable[[], None]]:
        """One greedy step, to be timed: each call runs the captured step of `rows` live sequences, the first call at `position`.

        What it computes means nothing, and it overwrites the cache. Nothing can be served until the `with` block has ended.

        Raises:
            CallError: something is being served; or, from a call, the cache's last position has been passed.
            BatchTooLarge: more rows than the largest bucket.
        """
        bucket, left, state = self.ladder.bucket_for(rows), self.max_cache_len - position, self._state

        def run() -> None:
            nonlocal left
            if left <= 0:
                raise CallError(
                    f"the step at position {position} was rehearsed {self.max_cache_len - position} times: max_cache_len={self.max_cache_len}"
                )
            left -= 1
            self._steps[bucket, False].replay()

        with self._alone(), _computing(self.device):
            try:
                state.tokens.copy_(torch.arange(len(state.tokens), device=self.device) % self._model.vocab_size)
                state.positions.fill_(position)
                state.live[:bucket].copy_(torch.arange(bucket, device=self.device) < rows)
                yield run
            finally:
                state.live.zero_()

    def close(self) -> None:
        """Let go of graphs and cache. Serving afterwards raises RuntimeClosed.

        Raises:
            CallError: something is being served.
        """
        if self._busy.locked():
            raise CallError(_BUSY)
        self._closed = True
        self._steps.clear()
        self._cache.keys.clear()
        self._cache.values.clear()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CallError("a decoder cannot be copied or pickled: its steps write to its own cache; build another one")

    def _bucket_report(self, size: int) -> StepReport:
        steps = [step for (tokens, _), step in self._steps.items() if tokens == size]
        rows = self._model.rows_bound(size)
        kernels = max((step.kernels for step in steps), default=0)
        return StepReport(size, rows, kernels, sum(step.nbytes for step in steps), sum(step.seconds for step in steps), self._steps_run[size])

    def _admit(self, index: int, request: Request) -> Finished | None:
        """Give the request a row and fill its cache, all but its last token: that one goes through the captured step."""
        self._model.check_weights()
        try:
            check(request, self._model.vocab_size, self.max_cache_len, sampling=self.sampling)
        except CallError as error:
            return Finished(index, request, [], "error", error)
        started = time.perf_counter()
        row = self._rows.index(None)
        prompt = list(request.prompt)
        for first in range(0, len(prompt) - 1, self._chunks[-1]):
            piece = prompt[first : min(first + self._chunks[-1], len(prompt) - 1)]
            size = next(size for size in self._chunks if size >= len(piece))
            padded = torch.tensor(piece + piece[-1:] * (size - len(piece)), dtype=torch.int64, device="cpu").to(self.device)
            self._model.prefill(padded, first, len(piece), row, self._cache)
        sequence = index if request.sequence is None else request.sequence
        key, top_k = key_of(request.seed, sequence), min(request.top_k, self._model.vocab_size)
        values = (prompt[-1], len(prompt) - 1, True, request.temperature, top_k, request.top_p, key)
        for entry, value in zip(self._state.per_row(), values, strict=True):
            entry[row].fill_(value)
        stop_tokens = self._model.stop_tokens if request.stop_tokens is None else frozenset(request.stop_tokens)
        self._rows[row] = _Sequence(index, request, stop_tokens, len(prompt), row)
        self._counts["prompt_tokens"] += len(prompt)
        self._seconds["prefill"] += time.perf_counter() - started
        return None

    def _launch(self) -> _Launched:
        """Run one step of everything that is live; its tokens are on their way to the host when this returns."""
        bucket = self.ladder.bucket_for(sum(row is not None for row in self._rows))
        self._compact(bucket)
        live = [sequence for sequence in self._rows if sequence is not None]
        self._steps[bucket, any(sequence.request.temperature for sequence in live)].replay()
        tokens = self._results[self._launches % len(self._results)]
        tokens[:bucket].copy_(self._state.results[:bucket], non_blocking=True)
        arrived = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        launched = _Launched(tuple(live), tuple(sequence.row for sequence in live), tokens, arrived)
        for sequence in live:
            sequence.launched += 1
            if sequence.launched == sequence.request.max_new_tokens:
                self._leave(sequence)
        self._launches += 1
        self._steps_run[bucket] += 1
        self._counts["rows"] += bucket
        return launched

    def _compact(self, bucket: int) -> None:
        """Move what lies beyond the bucket to free rows within it, no more."""
        for source in range(bucket, self.ladder.largest):
            sequence = self._rows[source]
            if sequence is None:
                continue
            target = self._rows.index(None)
            self._cache.move(source, target, sequence.length)
            for entry in self._state.per_row():
                entry[target].copy_(entry[source])
            self._state.live[source].fill_(False)
            self._rows[source], self._rows[target], sequence.row = None, sequence, target
            self._counts["moves"] += 1

    def _leave(self, sequence: _Sequence) -> None:
        """Its row is free, from the next step on."""
        if self._rows[sequence.row] is sequence:
            self._rows[sequence.row] = None
            with _computing(self.device):
                self._state.live[sequence.row].fill_(False)

    def _collect(self, launched: _Launched) -> Iterator[Finished]:
        """Hand a step's tokens to its sequences; those that ended with it."""
        with self._working():
            if launched.arrived is not None:
                launched.arrived.synchronize()
            tokens = launched.tokens.tolist()
        for sequence, row in zip(launched.sequences, launched.rows, strict=True):
            if sequence.finished is not None:
                continue  # it ended one step before; the host learnt it only now
            ended = self._take(sequence, tokens[row])
            if ended is not None:
                sequence.finished = ended
                self._leave(sequence)
                yield ended

    def _take(self, sequence: _Sequence, token: int) -> Finished | None:
        request = sequence.request
        if token < 0:
            error = CallError(
                f"request {sequence.index}: the logits after {len(sequence.tokens)} new tokens are not finite; its weights or activations overflow"
            )
            return Finished(sequence.index, request, sequence.tokens, "error", error)
        sequence.tokens.append(token)
        self._counts["tokens"] += 1
        if request.on_token is not None:
            request.on_token(token)
        reason: Literal["stop", "length"] | None = None
        if token in sequence.stop_tokens:
            reason = "stop"
        elif len(sequence.tokens) == request.max_new_tokens:
            reason = "length"
        return None if reason is None else Finished(sequence.index, request, sequence.tokens, reason)


def _check_count(name: str, value: object, least: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise InvalidInput(f"{name}={value!r} must be an int in [{least}, {_MOST}]: it has to hold {what}")


@contextmanager
def _computing(device: torch.device) -> Iterator[None]:
    """The device is current, and tensors are plain ones whatever mode the caller is in."""
    with torch.inference_mode(False), torch.no_grad(), _no_autocast(), device_guard(device):
        yield


@contextmanager
def _no_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _pinned(size: int, device: torch.device) -> Tensor:
    """On the host, where a copy from `device` arrives without a stop on the way."""
    return torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
