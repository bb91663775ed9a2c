"""What a user of Transformers would run instead of `GraphedDecoder`: `generate()`, in the forms it has, timed a decode step."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from graphmoe.errors import InvalidInput
from graphmoe.measure import Timing, timing_of

COMPILED = "compiled"
FORMS = ("grouped_mm", "batched_mm", "eager", COMPILED)
"""Experts implementations over a cache that grows, and `grouped_mm` over a static cache, which `generate()` compiles on a GPU."""
_SHORT = 8


def step_timing(model: Any, form: str, prompts: Tensor, *, steps: int = 32, repeats: int = 3) -> Timing:
    """Time of one decode step: what `steps` more new tokens make `generate()` take longer, over `steps`.

    Args:
        model: a model of Transformers. Its experts and attention implementations are what they were when this returns.
        form: one of `FORMS`.
        prompts: int64 `[B, P]`, no padding.
        steps: decode steps in the difference.
        repeats: differences, of which the median counts.

    Raises:
        InvalidInput: an unknown form.
    """
    if form not in FORMS:
        raise InvalidInput(f"form {form!r} is not one of {', '.join(FORMS)}")
    with _as_it_is_shipped(model, "grouped_mm" if form == COMPILED else form), torch.no_grad():
        cache = _static_cache(model, prompts.shape[1] + _SHORT + steps) if form == COMPILED else None

        def seconds(new_tokens: int) -> float:
            given = {} if cache is None else {_cache_argument(model): cache}
            if cache is not None:
                cache.reset()
            _wait(model.device)
            started = time.perf_counter()
            model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new_tokens, disable_compile=cache is None, **given)
            _wait(model.device)
            return time.perf_counter() - started

        for _ in range(2):
            seconds(_SHORT)  # compiles, chooses kernels
        return timing_of([(seconds(_SHORT + steps) - seconds(_SHORT)) * 1e6 / steps for _ in range(repeats)])


@contextmanager
def _as_it_is_shipped(model: Any, experts: str) -> Iterator[None]:
    """Greedy decoding without an end, in Transformers' own code."""
    from transformers import GenerationConfig

    before = model.generation_config, model.config._experts_implementation
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    model.set_experts_implementation(experts)
    try:
        yield
    finally:
        model.generation_config = before[0]
        model.set_experts_implementation(before[1])
        torch.compiler.reset()


def _static_cache(model: Any, length: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)


def _cache_argument(model: Any) -> str:
    """Transformers 5.25 renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
