"""Warm a step up, capture it into a CUDA graph, and prove that the graph is what the plan promised."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from graphmoe.audit import KernelNode, kernel_nodes
from graphmoe.errors import CaptureError
from graphmoe.paths.base import BoundPath, Path
from graphmoe.planner import BucketPlan


@dataclass(frozen=True)
class CapturedStep:
    """One instantiated graph of one (layer, bucket).

    Attributes:
        graph: replay it on any stream of its device.
        kernels: what it launches, read back from the graph.
        seconds: capture and instantiation.
        nbytes: device memory that the driver took for it (0 where it fitted into memory already held).
        allocations: how often torch's allocator was asked for device memory during the capture; 0 for a static step.
    """

    graph: torch.cuda.CUDAGraph
    kernels: tuple[KernelNode, ...]
    seconds: float
    nbytes: int
    allocations: int


@contextmanager
def side_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A stream to warm up and capture on, ordered after the current stream's work and before what follows."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield stream
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)


def capture_step(run: Callable[[], object], pool: Any, *, may_allocate: bool = False) -> CapturedStep:
    """Capture `run`, which has been warmed up, on the current (side) stream. A whole model's step `may_allocate` from the pool, a layer's does not.

    A failure ends the capture and drops the graph; nothing is leaked and the next capture works.
    """
    captured = _capture_once(run, pool)
    if captured.allocations and not may_allocate:  # torch counts every thread's; another thread's do not come again
        captured.graph.reset()
        captured = _capture_once(run, pool)
    return captured


def _capture_once(run: Callable[[], object], pool: Any) -> CapturedStep:
    started = time.perf_counter()
    free_before, _ = torch.cuda.mem_get_info()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    ended = False
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        allocations = -_allocations()  # from here: beginning a capture lets torch allocate its random-number state
        run()
        allocations += _allocations()
        graph.capture_end()
        ended = True
        kernels = kernel_nodes(graph)
        graph.instantiate()
        torch.cuda.current_stream().synchronize()
    except BaseException:
        if not ended:
            _end_failed_capture(graph, pool)
        with suppress(Exception):
            graph.reset()
        raise
    free_after, _ = torch.cuda.mem_get_info()
    return CapturedStep(graph, kernels, time.perf_counter() - started, max(0, free_before - free_after), allocations)


def _end_failed_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture wherever it failed. Where the driver has invalidated it, torch's own end raises before it stops allocating to the pool."""
    if torch.cuda.is_current_stream_capturing():
        with suppress(Exception):
            graph.capture_end()
            return
    device = torch.cuda.current_device()
    for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with suppress(Exception):
            undo(device, pool)


def prove(captured: CapturedStep, bound: BoundPath, path: Path, bucket: BucketPlan) -> None:
    """Hold a captured step against its plan.

    Raises:
        CaptureError: it launches another number of kernels, its GEMM tiles do not fit the layout, or capture allocated memory.
    """
    where = f"bucket {bucket.tokens}, {bucket.recipe}"
    if len(captured.kernels) != bound.launches:
        names = ", ".join(kernel.name for kernel in captured.kernels)
        raise CaptureError(f"{where}: the graph launches {len(captured.kernels)} kernels, planned {bound.launches}: {names}")
    gemm_threads = tuple(kernel.threads for kernel in captured.kernels if "gemm" in kernel.name)
    complaint = path.check_blocks(bucket.options, gemm_threads)
    if complaint:
        raise CaptureError(f"{where}: {complaint}")
    if captured.allocations:
        raise CaptureError(
            f"{where}: torch's allocator was asked for device memory {captured.allocations} time(s) during capture; a step may not allocate, "
            "and no other thread may on this device while a runtime is built"
        )


def _allocations() -> int:
    """Allocations of this process on the current device so far.

    (`torch.cuda.memory_snapshot(mempool_id=)` would look into the graph pool itself, but in torch 2.11 calling it again and again corrupts the
    interpreter's heap.)
    """
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])
