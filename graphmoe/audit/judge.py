"""The proof: every address that a captured graph was given lies in the arena, the weights, or the declared inputs and outputs.

What is proven is where each parameter *begins*, and that it is in memory of this graph. How far a kernel goes from there is the business of guard
bands (`graphmoe verify`) and of compute-sanitizer. Buffers that live at different times share bytes, so a kernel that was given the wrong one of two
that do is not found here: the oracle finds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from graphmoe.audit.graph import GraphDump, KernelNode
from graphmoe.audit.signatures import SIGNATURES, Parameter


class Kind(StrEnum):
    """What an audit can find."""

    FOREIGN_POINTER = "foreign pointer"
    UNPROVEN_PARAMETER = "unproven parameter"
    UNEXPECTED_KERNEL = "unexpected kernel"
    ALLOCATION = "allocation node"
    HOST = "host node"
    COPY = "copy node"
    OTHER = "other node"


_NODES = {"alloc": Kind.ALLOCATION, "free": Kind.ALLOCATION, "host": Kind.HOST, "memcpy": Kind.COPY, "memset": Kind.COPY}


@dataclass(frozen=True)
class Region:
    """Memory that a graph may touch."""

    name: str
    start: int
    nbytes: int

    def holds(self, address: int) -> bool:
        return self.start <= address < self.start + self.nbytes


@dataclass(frozen=True)
class Access:
    """A kernel's parameter that was proven: node `node` reads or writes `region`, from `offset` bytes behind its start on."""

    node: int
    parameter: str
    region: str
    offset: int
    reads: bool
    writes: bool


@dataclass(frozen=True)
class Finding:
    """What is wrong with a node."""

    kind: Kind
    node: int
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: node {self.node}, {self.what}"


@dataclass(frozen=True)
class Audit:
    """One graph's proof. It holds if there are no findings."""

    dump: GraphDump
    accesses: tuple[Access, ...]
    findings: tuple[Finding, ...]


def judge(dump: GraphDump, regions: Sequence[Region], *, signatures: Mapping[str, tuple[Parameter, ...]] = SIGNATURES) -> Audit:
    """Hold a graph against the memory that it may touch.

    Args:
        dump: the graph.
        regions: memory that it may touch; where several hold an address, what the parameter is declared for names it, else the smallest.
        signatures: what each kernel's parameters mean, by short name.
    """
    accesses: list[Access] = []
    findings: list[Finding] = []
    for number, node in enumerate(dump.nodes):
        if node.kind == "empty":
            continue
        if node.kernel is None:
            findings.append(Finding(_NODES.get(node.kind, Kind.OTHER), number, f"a {node.kind} node; a step is kernels only"))
            continue
        declared = signatures.get(node.kernel.short_name)
        if declared is None:
            findings.append(
                Finding(Kind.UNEXPECTED_KERNEL, number, f"{node.kernel.short_name} is no kernel of a step: its parameters are not declared")
            )
            continue
        proven, wrong = _of_kernel(number, node.kernel, declared, regions)
        accesses += proven
        findings += wrong
    return Audit(dump, tuple(accesses), tuple(findings))


def _of_kernel(number: int, kernel: KernelNode, declared: tuple[Parameter, ...], regions: Sequence[Region]) -> tuple[list[Access], list[Finding]]:
    sizes, wanted = [len(value) for value in kernel.parameters], [parameter.nbytes for parameter in declared]
    if sizes != wanted:
        what = f"{kernel.short_name} takes parameters of {sizes} bytes, declared are {wanted}: another version of it than was declared"
        return [], [Finding(Kind.UNPROVEN_PARAMETER, number, what)]
    accesses: list[Access] = []
    findings: list[Finding] = []
    for parameter, value in zip(declared, kernel.parameters, strict=True):
        if not parameter.address and not parameter.null:
            continue
        address = int.from_bytes(value[:8], "little")  # a descriptor begins with its tensor's address
        where = f"{kernel.short_name}'s {parameter.name}"
        if parameter.null:
            if address:
                findings.append(Finding(Kind.FOREIGN_POINTER, number, f"{where} is {address:#x}, expected null"))
            continue
        holding = [region for region in regions if region.holds(address)]
        if not holding:
            findings.append(Finding(Kind.FOREIGN_POINTER, number, f"{where} is {address:#x}, in no memory of this runtime"))
            continue
        # Buffers that live at different times share bytes: the one that the parameter is for names the address.
        expected = [region for region in holding if region.name in parameter.buffers]
        region = min(expected or holding, key=lambda one: (one.start != address, one.nbytes))
        accesses.append(Access(number, parameter.name, region.name, address - region.start, parameter.reads, parameter.writes))
    return accesses, findings
