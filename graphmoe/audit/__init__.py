"""Audit: a captured graph read back through cuda-python, and the proof that it touches only what it was given.

`graph.py` reads, `signatures.py` declares what each kernel's parameters mean, `judge.py` holds the one against the other.
"""

from graphmoe.audit.graph import Edge, GraphDump, KernelNode, Node, kernel_nodes, read_graph, require_cuda_python
from graphmoe.audit.judge import Access, Audit, Finding, Kind, Region, judge

__all__ = [
    "Access",
    "Audit",
    "Edge",
    "Finding",
    "GraphDump",
    "KernelNode",
    "Kind",
    "Node",
    "Region",
    "judge",
    "kernel_nodes",
    "read_graph",
    "require_cuda_python",
]
