"""The decode step of every bucket, captured: from the last tokens to the next, wholly on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from graphmoe.buckets import BucketLadder
from graphmoe.capture import capture_step, side_stream
from graphmoe.decode.kv import KVCache
from graphmoe.decode.model import DecodeModel
from graphmoe.decode.recording import Recording
from graphmoe.decode.sampling import greedy, sample
from graphmoe.errors import CaptureError, GraphMoEError, InvalidInput


class State:
    """What a step reads and advances, one entry a row, all on the device.

    Attributes:
        tokens: int64, the last token of each row.
        positions: int64, where its keys and values go.
        live: bool; a step advances these rows only.
        temperature, top_k, top_p, key: each row's sampling, see `sampling.sample`.
        results: int64, what the last step chose; -1: its logits were not finite.
        logits: `[rows, V]` of the last step, or None.
    """

    def __init__(self, rows: int, device: torch.device, logits: Tensor | None) -> None:
        self.tokens, self.positions, self.top_k, self.key, self.results = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(5))
        self.live = torch.zeros(rows, dtype=torch.bool, device=device)
        self.temperature, self.top_p = (torch.zeros(rows, dtype=torch.float32, device=device) for _ in range(2))
        self.logits = logits

    def per_row(self) -> tuple[Tensor, ...]:
        """What belongs to a sequence and moves with it."""
        return self.tokens, self.positions, self.live, self.temperature, self.top_k, self.top_p, self.key


@dataclass(frozen=True)
class Step:
    """A captured step of one bucket. `kernels` counts its launches (on a CPU: its ATen ops)."""

    replay: Callable[[], object]
    kernels: int
    seconds: float
    nbytes: int


def build_steps(
    model: DecodeModel, state: State, cache: KVCache, ladder: BucketLadder, *, sampling: bool, capture: bool, progress: bool
) -> dict[tuple[int, bool], Step]:
    """A step for every (bucket, whether it samples), the largest first: all graphs share one pool, and the smaller ones fit into it.

    Raises:
        CaptureError: the model's step cannot be captured.
    """
    pool = torch.cuda.graph_pool_handle() if capture and model.device.type == "cuda" else None
    wanted = [(tokens, sampled) for tokens in reversed(ladder.sizes) for sampled in ((False, True) if sampling else (False,))]
    console = Console(stderr=True)
    shown = track(wanted, "capturing decode steps", console=console, transient=True, disable=not (progress and console.is_terminal))
    return {(tokens, sampled): _build(model, state, cache, tokens, sampled, pool, capture) for tokens, sampled in shown}


def _step(model: DecodeModel, state: State, cache: KVCache, rows: int, sampled: bool) -> Callable[[], Tensor]:
    tokens, positions, live, temperature, top_k, top_p, key = (entry[:rows] for entry in state.per_row())

    def run() -> Tensor:
        with torch.no_grad():
            logits = model.decode(tokens, positions, live, cache)
            if logits.shape != (rows, model.vocab_size):
                raise InvalidInput(f"the model's logits are {tuple(logits.shape)}, expected {(rows, model.vocab_size)}: [rows, vocab_size]")
            if state.logits is not None:
                state.logits[:rows].copy_(logits)
            chosen = sample(logits, temperature, top_k, top_p, key, positions) if sampled else greedy(logits)
            state.results[:rows].copy_(chosen)
            tokens.copy_(torch.where(live, chosen.clamp(min=0), tokens))
            positions.add_(live)
            return logits

    return run


def _build(model: DecodeModel, state: State, cache: KVCache, rows: int, sampled: bool, pool: Any, capture: bool) -> Step:
    run, device, vocab_size = _step(model, state, cache, rows, sampled), model.device, model.vocab_size
    started = time.perf_counter()
    try:
        if not capture:
            run()
            return Step(run, 0, time.perf_counter() - started, 0)
        if device.type != "cuda":
            recording = Recording(run)
            _prove(recording, run, state, vocab_size)
            return Step(recording.replay, len(recording), time.perf_counter() - started, 0)
        with side_stream(device) as stream:
            run()  # libraries choose and compile their kernels
            run()
            stream.synchronize()
            captured = capture_step(run, pool, may_allocate=True)
        return Step(captured.graph.replay, len(captured.kernels), time.perf_counter() - started, captured.nbytes)
    except (GraphMoEError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model's own code raises
        raise CaptureError(f"the decode step of {rows} rows failed with {type(error).__name__}: {error}") from error


def _prove(recording: Recording, run: Callable[[], Tensor], state: State, vocab_size: int) -> None:
    """Replay and run from one state that is not the recorded one.

    Raises:
        CaptureError: they differ, so the step's Python has read a tensor's value, by a way that no recording sees (`tolist`, `numpy`).
    """
    place = torch.arange(len(state.tokens), device=state.tokens.device)

    def outcome(step: Callable[[], Tensor]) -> list[Tensor]:
        state.tokens.copy_((place + 1) % vocab_size)
        state.positions.copy_((place + 1) % 2)
        state.live.copy_(place % 2 == 0)
        state.temperature.fill_(1.0)
        state.top_p.fill_(1.0)
        return [each.clone() for each in (step(), state.results, state.tokens)]

    replayed, ran = outcome(recording.replay), outcome(run)
    for entry in state.per_row():
        entry.zero_()
    if not all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in zip(replayed, ran, strict=True)):
        raise CaptureError("the step reads tensors' values on the host (tolist or numpy, say): a graph would replay what they were at capture")
