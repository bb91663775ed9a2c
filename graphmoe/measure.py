"""The project's one timer: graph replay, L2-cold by rotating over several layers' weights, median and spread, and a ratio to a measured floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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
        timing = replay_timing(graph.replay, device=stream.device, repeats=repeats)
    torch.cuda.current_stream().wait_stream(stream)
    graph.reset()
    return timing / len(items)


def replay_timing(replay: Callable[[], object], *, device: torch.device, repeats: int = 15) -> Timing:
    """Time of one replay of a graph on the current stream, from event to event; on a CPU wall time."""
    samples = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3)
        else:
            begun = time.perf_counter()
            replay()
            samples.append((time.perf_counter() - begun) * 1e6)
    return timing_of(samples)


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
    return timing_of(samples)


@dataclass(frozen=True)
class Ceilings:
    """What the device can do at most, measured in the same run as what is compared with it.

    Attributes:
        read_bandwidth: bytes a second of a plain reduction over device memory.
        matmul_flops: operations a second of a large dense product in the weights' type.
    """

    read_bandwidth: float
    matmul_flops: float

    @classmethod
    def measure(cls, fmt: str, device: torch.device) -> Ceilings:
        return cls(read_bandwidth(device), matmul_flops(fmt, device))

    def of(self, fmt: str) -> str:
        """`4.39 TB/s read, 1522 TFLOP/s dense fp8_block`."""
        return f"{self.read_bandwidth / 1e12:.2f} TB/s read, {self.matmul_flops / 1e12:.0f} TFLOP/s dense {fmt}"

    def floor_us(self, weights: ExpertWeights, counts: Sequence[int]) -> float:
        """Microseconds that no layer can beat: its active experts' weights read once, or its products computed, whichever takes longer.

        Args:
            weights: the layer's.
            counts: assignments of each local expert.
        """
        spec = weights.spec
        active = sum(count > 0 for count in counts)
        read = weights.nbytes / spec.num_local_experts * active / self.read_bandwidth
        compute = 2 * 3 * spec.hidden_size * spec.intermediate_size * sum(counts) / self.matmul_flops
        return max(read, compute) * 1e6


def read_bandwidth(device: torch.device, *, nbytes: int = 1 << 32, repeats: int = 10) -> float:
    """Bytes a second that a plain reduction over `nbytes` of device memory reads: the ceiling of a memory-bound kernel."""
    data = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
    out = torch.empty((), dtype=torch.float32, device=device)
    return nbytes / _best_seconds(lambda: torch.sum(data, dim=0, out=out), repeats)


def matmul_flops(fmt: str, device: torch.device, *, size: int = 8192, repeats: int = 10) -> float:
    """Operations a second of a dense `size`^3 product: e4m3 with one scale a tensor for FP8 formats, else bf16."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    if fmt == "bf16":
        return 2 * size**3 / _best_seconds(lambda: a @ b, repeats)
    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
    product = partial(torch._scaled_mm, a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return 2 * size**3 / _best_seconds(product, repeats)


def _best_seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    samples = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e-3)
    return min(samples)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timing_of(samples: Sequence[float]) -> Timing:
    """Of at least two samples, in microseconds."""
    quartiles = statistics.quantiles(samples, n=4)
    return Timing(statistics.median(samples), (quartiles[2] - quartiles[0]) / 2)
