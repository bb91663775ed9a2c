"""The project's one timer: graph replay, L2-cold by rotating over several layers' weights, median and spread, and a ratio to a measured floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphmoe.weights import ExpertWeights


@dataclass(frozen=True)
class Timing:
    """Microseconds of one item: the median of the repeats, and their half range between the quartiles."""

    median_us: float
    spread_us: float

    def __truediv__(self, items: int) -> Timing:
        return Timing(self.median_us / items, self.spread_us / items)

    def __str__(self) -> str:
        return f"{self.median_us:.1f}"


def graph_timing(items: Sequence[Callable[[], object]], *, repeats: int = 15) -> Timing:
    """Time of one item when all of `items` run in order inside one CUDA graph.

    Give one item a layer, with enough layers that their weights together exceed the L2 cache: each replay then reads every weight from memory.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for item in items:
                item()
        finally:
            graph.capture_end()
        for _ in range(2):
            graph.replay()
        samples = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / len(items))
    torch.cuda.current_stream().wait_stream(stream)
    graph.reset()
    return _timing(samples)


def call_timing(call: Callable[[], object], *, device: torch.device, repeats: int = 5, calls: int = 20) -> Timing:
    """Wall time of one call from Python, the device kept busy by `calls` calls in a row and waited for at their end."""
    samples = []
    for _ in range(repeats):
        _synchronise(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        _synchronise(device)
        samples.append((time.perf_counter() - start) * 1e6 / calls)
    return _timing(samples)


def read_bandwidth(device: torch.device, *, nbytes: int = 1 << 32, repeats: int = 10) -> float:
    """Bytes a second that a plain reduction over `nbytes` of device memory reads: the ceiling of a memory-bound kernel."""
    data = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
    out = torch.empty((), dtype=torch.float32, device=device)
    torch.sum(data, dim=0, out=out)
    samples = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.sum(data, dim=0, out=out)
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e-3)
    return nbytes / min(samples)


def floor_us(weights: ExpertWeights, active_experts: int, bandwidth: float) -> float:
    """Microseconds to read the weights of the experts that a batch touches, at `bandwidth` bytes a second: no layer is faster at decode sizes."""
    return weights.nbytes / weights.spec.num_local_experts * active_experts / bandwidth * 1e6


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timing(samples: list[float]) -> Timing:
    quartiles = statistics.quantiles(samples, n=4)
    return Timing(statistics.median(samples), (quartiles[2] - quartiles[0]) / 2)
