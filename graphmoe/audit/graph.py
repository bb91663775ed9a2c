"""Read a captured graph back: its nodes, how they depend on each other, and each kernel's launch with the bytes of its parameters."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

import torch

from graphmoe.errors import CaptureError, MissingBackend

_KINDS = {
    "CU_GRAPH_NODE_TYPE_KERNEL": "kernel",
    "CU_GRAPH_NODE_TYPE_MEMCPY": "memcpy",
    "CU_GRAPH_NODE_TYPE_MEMSET": "memset",
    "CU_GRAPH_NODE_TYPE_HOST": "host",
    "CU_GRAPH_NODE_TYPE_MEM_ALLOC": "alloc",
    "CU_GRAPH_NODE_TYPE_MEM_FREE": "free",
    "CU_GRAPH_NODE_TYPE_EMPTY": "empty",
}
_MOST_PARAMETERS, _INVALID_VALUE = 256, 1


@dataclass(frozen=True)
class KernelNode:
    """One kernel of a captured graph.

    Attributes:
        name: as the driver has it; C++ names are mangled.
        grid, block: programs and threads.
        shared_bytes: dynamic shared memory.
        parameters: the bytes of each parameter, in order; empty where only the launch was read.
    """

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    parameters: tuple[bytes, ...] = ()

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def short_name(self) -> str:
        """The function's own name: of a mangled one the last part before its template arguments."""
        if not self.name.startswith("_Z"):
            return self.name
        rest, found = self.name.removeprefix("_ZN").removeprefix("_Z").lstrip("K"), self.name
        while match := re.match(r"\d+", rest):
            length = int(match[0])
            found, rest = rest[match.end() : match.end() + length], rest[match.end() + length :]
        return found


@dataclass(frozen=True)
class Node:
    """A node: its kind (`"kernel"`, `"memcpy"`, `"memset"`, `"host"`, `"alloc"`, `"free"`, `"empty"`, or the driver's word), and its kernel."""

    kind: str
    kernel: KernelNode | None = None


@dataclass(frozen=True)
class Edge:
    """Node `target` waits for node `source`: for all of it, or, programmatic, at the place in its code where it says so."""

    source: int
    target: int
    programmatic: bool = False


@dataclass(frozen=True)
class GraphDump:
    """Nodes in an order in which none comes before what it waits for, and the edges between their positions."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    @property
    def kernels(self) -> tuple[KernelNode, ...]:
        return tuple(node.kernel for node in self.nodes if node.kernel is not None)


def kernel_nodes(graph: torch.cuda.CUDAGraph) -> tuple[KernelNode, ...]:
    """Launches of a graph captured with `keep_graph=True`, in the order of capture, without their parameters.

    Raises:
        CaptureError: the graph has a node that is not a kernel; a MoE step is kernels only.
    """
    from cuda.bindings import driver

    kernels = []
    for raw in _raw_nodes(driver, graph):
        node = _node(driver, raw, parameters=False)
        if node.kernel is None:
            raise CaptureError(f"the captured step holds a node that is not a kernel: {node.kind}")
        kernels.append(node.kernel)
    return tuple(kernels)


def read_graph(graph: torch.cuda.CUDAGraph) -> GraphDump:
    """Everything of a graph captured with `keep_graph=True`.

    Raises:
        CaptureError: the driver refuses.
    """
    from cuda.bindings import driver

    raw = _raw_nodes(driver, graph)
    place = {int(node): number for number, node in enumerate(raw)}
    edges = [
        Edge(place[source], place[target], kind == int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC))
        for source, target, kind in _raw_edges(graph)
    ]
    order = _in_order(len(raw), edges)
    nodes = tuple(_node(driver, raw[number], parameters=True) for number in order)
    position = {number: at for at, number in enumerate(order)}
    moved = sorted((Edge(position[e.source], position[e.target], e.programmatic) for e in edges), key=lambda edge: (edge.source, edge.target))
    return GraphDump(nodes, tuple(moved))


def require_cuda_python() -> None:
    """Raise MissingBackend unless captured graphs can be read back."""
    try:
        from cuda.bindings import driver  # noqa: F401
    except ImportError as error:
        raise MissingBackend(f"captured graphs are read back through cuda-python, which does not load: {error}; pip install cuda-python") from error


def _raw_nodes(driver: Any, graph: torch.cuda.CUDAGraph) -> list[Any]:
    raw = driver.CUgraph(graph.raw_cuda_graph())
    _, count = _ok(driver.cuGraphGetNodes(raw, 0))
    nodes, _ = _ok(driver.cuGraphGetNodes(raw, count))
    return list(nodes[:count])


class _EdgeData(ctypes.Structure):
    """`CUgraphEdgeData` of cuda.h."""

    _fields_ = (("from_port", ctypes.c_ubyte), ("to_port", ctypes.c_ubyte), ("type", ctypes.c_ubyte), ("reserved", ctypes.c_ubyte * 5))


def _raw_edges(graph: torch.cuda.CUDAGraph) -> list[tuple[int, int, int]]:
    """Source, target and kind, asked of the driver's library itself: cuda-bindings 13.0 returns edge data that it has freed already."""
    query = _library().cuGraphGetEdges_v2
    raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(0)
    _ok((query(raw, None, None, None, ctypes.byref(count)),))
    size = count.value
    sources, targets, data = (ctypes.c_void_p * size)(), (ctypes.c_void_p * size)(), (_EdgeData * size)()
    _ok((query(raw, sources, targets, data, ctypes.byref(count)),))
    return [(int(source or 0), int(target or 0), one.type) for source, target, one in zip(sources, targets, data, strict=True)]


def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CaptureError(f"the driver's library does not load: {error}") from error


def _in_order(count: int, edges: list[Edge]) -> list[int]:
    """Nodes by their number, each behind all that it waits for."""
    waits = [0] * count
    for edge in edges:
        waits[edge.target] += 1
    ready, order = [number for number in range(count) if waits[number] == 0], []
    while ready:
        number = min(ready)
        ready.remove(number)
        order.append(number)
        for edge in edges:
            if edge.source == number:
                waits[edge.target] -= 1
                if waits[edge.target] == 0:
                    ready.append(edge.target)
    if len(order) < count:
        raise CaptureError(f"{count - len(order)} of {count} nodes of the graph wait for each other")
    return order


def _node(driver: Any, raw: Any, *, parameters: bool) -> Node:
    (kind,) = _ok(driver.cuGraphNodeGetType(raw))
    name = _KINDS.get(kind.name, kind.name)
    if name != "kernel":
        return Node(name)
    (launch,) = _ok(driver.cuGraphKernelNodeGetParams(raw))
    grid, block = (launch.gridDimX, launch.gridDimY, launch.gridDimZ), (launch.blockDimX, launch.blockDimY, launch.blockDimZ)
    values = _parameters(driver, launch) if parameters else ()
    return Node(name, KernelNode(_name(driver, launch), grid, block, int(launch.sharedMemBytes), values))


def _parameters(driver: Any, launch: Any) -> tuple[bytes, ...]:
    """The bytes of each parameter: a node keeps an array of pointers to them, and the function knows their sizes."""
    function, query = (launch.func, driver.cuFuncGetParamInfo) if int(launch.func) else (launch.kern, driver.cuKernelGetParamInfo)
    sizes: list[int] = []
    while len(sizes) < _MOST_PARAMETERS:
        error, *found = query(function, len(sizes))
        if int(error) == _INVALID_VALUE:  # one behind the last
            break
        _ok((error,))
        sizes.append(int(found[1]))
    if not sizes:
        return ()
    if not launch.kernelParams:
        raise CaptureError(f"kernel {_name(driver, launch)} was not launched with an array of parameters; they cannot be read back")
    pointers = (ctypes.c_void_p * len(sizes)).from_address(int(launch.kernelParams))
    return tuple(ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True))


def _name(driver: Any, launch: Any) -> str:
    (name,) = _ok(driver.cuFuncGetName(launch.func)) if int(launch.func) else _ok(driver.cuKernelGetName(launch.kern))
    return name.decode() if isinstance(name, bytes) else str(name)


def _ok(result: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = result
    if int(error) != 0:
        raise CaptureError(f"reading the captured graph failed: {error}")
    return tuple(values)
