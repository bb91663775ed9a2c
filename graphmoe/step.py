"""The sequence of one MoE layer. Eager calls, captured graphs and the CPU all run this one function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from graphmoe.paths.base import BoundPath

Range = Callable[[str], AbstractContextManager[None]]


def step(path: BoundPath, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor) -> None:
    """Run one layer over static tensors of one bucket.

    Args:
        path: the bound path.
        x: bf16 `[T, H]`, static.
        topk_ids: int32 `[T, K]`, local ids, static.
        topk_weights: float32 `[T, K]`, static.
        out: bf16 `[T, H]`, static.
    """
    trace = trace_for(x.device)
    with trace("graphmoe.route"):
        path.route(topk_ids, x)
    with trace("graphmoe.up"):
        path.up(x, topk_ids)
    with trace("graphmoe.down"):
        path.down()
    with trace("graphmoe.combine"):
        path.combine(topk_ids, topk_weights, out)


def trace_for(device: torch.device) -> Range:
    """What marks a named stage in a profile of this device: NVTX ranges on CUDA, nothing on the CPU."""
    return _nvtx_range if device.type == "cuda" else _no_range


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def _no_range(name: str) -> AbstractContextManager[None]:
    return nullcontext()
