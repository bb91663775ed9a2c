"""What is asked of a decoder, and what comes back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from graphmoe.errors import CallError, InvalidInput

_KEY_BITS = 64
_LARGEST = 3.4028234663852886e38  # of float32, which holds a row's settings on the device
_LONGEST_SHOWN = 60


@dataclass(frozen=True)
class Request:
    """One sequence.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: at least 1.
        temperature: 0 is greedy.
        top_k: sample among so many of the likeliest tokens; 0 means all.
        top_p: sample among the fewest of the likeliest tokens whose probabilities reach it; in (0, 1], 1 means all.
        seed: of the random numbers, at most 64 bits. The draw at a position depends on (seed, sequence, position) alone, whatever else is served.
        sequence: the sequence's number in that; None: its place among the requests of this call.
        stop_tokens: tokens that end the sequence (the last of its tokens is one of them then); None: the model's own.
        on_token: called with each token as soon as the host has it. What it raises ends the whole call, not this request alone.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    sequence: int | None = None
    stop_tokens: Sequence[int] | None = None
    on_token: Callable[[int], object] | None = None


@dataclass(frozen=True)
class Finished:
    """What became of a request.

    Attributes:
        index: its place among the requests of the call.
        request: as it was given.
        tokens: the new tokens.
        reason: `"stop"`, `"length"`, or `"error"`: it could not be served, or not to its end.
        error: why not.
    """

    index: int
    request: Request
    tokens: list[int]
    reason: Literal["stop", "length", "error"]
    error: CallError | None = None


def check(request: Request, vocab_size: int, max_cache_len: int, *, sampling: bool) -> None:
    """Raises InvalidInput, with the numbers, for a request that cannot be served. It only looks: an iterator would be used up, and is refused."""
    if not isinstance(request, Request):
        raise InvalidInput(f"a request is a graphmoe.Request, not a {type(request).__name__}")
    prompt = request.prompt
    if not _are_tokens(prompt):
        raise InvalidInput(
            f"a prompt is a list of token ids (ints), not {type(prompt).__name__} {_shown(prompt)}: run your tokenizer first, "
            "and call .tolist() on a tensor"
        )
    for name, value in (("max_new_tokens", request.max_new_tokens), ("top_k", request.top_k), ("seed", request.seed)):
        if not _is_int(value):
            raise InvalidInput(f"{name}={_shown(value)} must be an int")
    for name, number in (("temperature", request.temperature), ("top_p", request.top_p)):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise InvalidInput(f"{name}={_shown(number)} must be a number")
    if not (request.sequence is None or _is_int(request.sequence)):
        raise InvalidInput(f"sequence={_shown(request.sequence)} must be an int or None")
    if not (request.stop_tokens is None or _are_tokens(request.stop_tokens)):
        raise InvalidInput(f"stop_tokens={_shown(request.stop_tokens)} must be a list of token ids or None")
    if not (request.on_token is None or callable(request.on_token)):
        raise InvalidInput(f"on_token={_shown(request.on_token)} must be callable with a token")
    if not prompt:
        raise InvalidInput("a prompt needs at least one token; an empty one can be the model's begin-of-sequence token")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise InvalidInput(f"a prompt's tokens must lie in 0..{vocab_size - 1}, this one's span {_shown(min(prompt))}..{_shown(max(prompt))}")
    if request.max_new_tokens < 1:
        raise InvalidInput(f"max_new_tokens={_shown(request.max_new_tokens)} must be at least 1")
    if len(prompt) + request.max_new_tokens > max_cache_len:
        raise InvalidInput(
            f"{len(prompt)} prompt tokens + max_new_tokens={_shown(request.max_new_tokens)} exceed max_cache_len={max_cache_len}: shorten one, or "
            "build the decoder with a longer cache"
        )
    if not 0 <= request.temperature <= _LARGEST:
        raise InvalidInput(f"temperature={_shown(request.temperature)} must be a number in [0, {_LARGEST:.3g}] (0 is greedy)")
    if request.top_k < 0:
        raise InvalidInput(f"top_k={_shown(request.top_k)} must be at least 0 (0 means all tokens)")
    if not 0 < request.top_p <= 1:
        raise InvalidInput(f"top_p={_shown(request.top_p)} must lie in (0, 1]")
    for name, value in (("seed", request.seed), ("sequence", request.sequence or 0)):
        if value.bit_length() > _KEY_BITS:
            raise InvalidInput(f"{name}={_shown(value)} has {value.bit_length()} bits; give at most {_KEY_BITS}")
    if request.temperature and not sampling:
        raise InvalidInput(f"temperature={_shown(request.temperature)}, but this decoder was built with sampling=False")


def _are_tokens(values: object) -> bool:
    """A sequence in an order of its own that can be read again and again, of ints."""
    return isinstance(values, Sequence) and not isinstance(values, str) and all(_is_int(value) for value in values)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """Short, also where Python refuses to print so many digits."""
    text = f"{value:#x}" if isinstance(value, int) and value.bit_length() > _KEY_BITS else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def key_of(seed: int, sequence: int) -> int:
    """Where a sequence's random numbers start: 64 bits of a hash of (seed, sequence), as a signed int."""
    return int.from_bytes(hashlib.blake2b(f"{seed},{sequence}".encode(), digest_size=8).digest(), "little", signed=True)
