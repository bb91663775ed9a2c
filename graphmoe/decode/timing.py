"""What a decode step takes: on the device, in the loop, and which kernels take it."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphmoe.audit.signatures import SIGNATURES
from graphmoe.decode.decoder import GraphedDecoder
from graphmoe.measure import Timing, replay_timing, timing_of

_ATTENTION = {"_attend_kernel", "_weigh_kernel"}
_WARM = 3


@dataclass(frozen=True)
class Shares:
    """Parts of a step's kernel time: experts, attention over the cache, and everything else (projections, norms, routers, logits, sampling)."""

    moe: float
    attention: float
    rest: float


def prompts_of(rows: int, length: int, vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    """Random prompts, the same ones for the same arguments."""
    drawn = random.Random(seed)
    return [[drawn.randrange(vocab_size) for _ in range(length)] for _ in range(rows)]


def graph_timing(decoder: GraphedDecoder, rows: int, position: int, *, repeats: int = 15) -> Timing:
    """Time of one captured step of `rows` sequences around `position`: L2-cold where the model's weights are larger than that cache."""
    with decoder.rehearsal(rows, position) as step:
        for _ in range(_WARM):
            step()
        return replay_timing(step, device=decoder.device, repeats=repeats)


def loop_timing(decoder: GraphedDecoder, prompts: Sequence[Sequence[int]], *, steps: int = 32, repeats: int = 3) -> Timing:
    """Wall time of one step of `generate`: what `steps` more new tokens of each prompt make it take longer, over `steps`."""
    short = 8

    def seconds(new_tokens: int) -> float:
        started = time.perf_counter()
        decoder.generate(prompts, new_tokens, stop_tokens=())
        return time.perf_counter() - started

    seconds(short)
    return timing_of([(seconds(short + steps) - seconds(short)) * 1e6 / steps for _ in range(repeats)])


def shares(decoder: GraphedDecoder, rows: int, position: int, *, steps: int = 5) -> Shares | None:
    """Who takes a step's time, as torch's profiler sees its kernels; None where it sees none: without a GPU, or where the driver shows none."""
    if decoder.device.type != "cuda":
        return None
    with decoder.rehearsal(rows, position) as step:
        step()
        torch.cuda.synchronize(decoder.device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(steps):
                step()
            torch.cuda.synchronize(decoder.device)
    return shares_of([(event.name, event.device_time) for event in profile.events() or ()])


def shares_of(kernels: Sequence[tuple[str, float]]) -> Shares | None:
    """Of launched kernels, each with its name as a profiler prints it and its time; None of none."""
    taken = dict.fromkeys(("moe", "attention", "rest"), 0.0)
    for name, time_taken in kernels:
        words = set(re.findall(r"\w+", name))
        taken["moe" if words & SIGNATURES.keys() else "attention" if words & _ATTENTION else "rest"] += time_taken
    total = sum(taken.values())
    return Shares(**{part: time_taken / total for part, time_taken in taken.items()}) if total else None
