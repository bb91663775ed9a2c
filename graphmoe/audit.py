"""Read a captured graph back: which kernels it launches, and with how many threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphmoe.errors import CaptureError, MissingBackend


@dataclass(frozen=True)
class KernelNode:
    """One kernel of a captured graph, in topological order of capture."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]


def kernel_nodes(graph: torch.cuda.CUDAGraph) -> tuple[KernelNode, ...]:
    """Kernels of a graph captured with `keep_graph=True`.

    Raises:
        CaptureError: the graph has a node that is not a kernel; a MoE step is kernels only.
    """
    from cuda.bindings import driver

    raw = driver.CUgraph(graph.raw_cuda_graph())
    _, count = _ok(driver.cuGraphGetNodes(raw, 0))
    nodes, _ = _ok(driver.cuGraphGetNodes(raw, count))
    kernels = []
    for node in nodes[:count]:
        (kind,) = _ok(driver.cuGraphNodeGetType(node))
        if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            raise CaptureError(f"the captured step holds a node that is not a kernel: {kind.name}")
        (params,) = _ok(driver.cuGraphKernelNodeGetParams(node))
        kernels.append(
            KernelNode(_name(params), (params.gridDimX, params.gridDimY, params.gridDimZ), (params.blockDimX, params.blockDimY, params.blockDimZ))
        )
    return tuple(kernels)


def require_cuda_python() -> None:
    """Raise MissingBackend unless captured graphs can be read back."""
    try:
        from cuda.bindings import driver  # noqa: F401
    except ImportError as error:
        raise MissingBackend(f"captured graphs are read back through cuda-python, which does not load: {error}; pip install cuda-python") from error


def _name(params: Any) -> str:
    from cuda.bindings import driver

    if int(params.func):
        (name,) = _ok(driver.cuFuncGetName(params.func))
    else:
        (name,) = _ok(driver.cuKernelGetName(params.kern))
    return name.decode() if isinstance(name, bytes) else str(name)


def _ok(result: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = result
    if int(error) != 0:
        raise CaptureError(f"reading the captured graph failed: {error}")
    return tuple(values)
