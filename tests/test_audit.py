"""Captured graphs read back and held against the memory they may touch, with a stand-in for the driver; `gpu/test_audit.py` has real graphs."""

from __future__ import annotations

import ctypes
import inspect
import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from graphmoe import ExpertWeights, MoERuntime, MoESpec
from graphmoe.audit import Edge, GraphDump, KernelNode, Kind, Node, Region, judge, kernel_nodes, read_graph
from graphmoe.audit import graph as graph_module
from graphmoe.audit.signatures import SIGNATURES, Parameter, parse
from graphmoe.build import Built, _require_proof
from graphmoe.cli import app
from graphmoe.errors import CaptureError, InvalidInput
from graphmoe.samples import random_weights

MANGLED = "_ZN9deep_gemm23sm90_fp8_gemm_1d2d_implILN4cute4UMMA5MajorE0ELj0ELj1536EEEvPfPijjj14CUtensorMap_st"
SPEC = MoESpec(4, 2, 128, 128)


def launched(name: str, addresses: dict[str, int], *, nulls: int = 0) -> KernelNode:
    """A launch of a declared kernel; numbers are 7, what a descriptor holds behind its address is noise."""
    values = []
    for parameter in SIGNATURES[name]:
        number = addresses[parameter.name] if parameter.address else nulls if parameter.null else 7
        values.append(number.to_bytes(8, "little")[: parameter.nbytes].ljust(parameter.nbytes, b"\x5a"))
    return KernelNode(name, (3, 2, 1), (128, 1, 1), 1024, tuple(values))


@st.composite
def proven_graphs(draw: st.DrawFn) -> tuple[GraphDump, list[Region], list[tuple[int, str, str, int]]]:
    """A graph of declared kernels whose addresses all lie in regions that do not touch each other; and what they are."""
    regions, start = [], 1 << 40
    for number in range(draw(st.integers(1, 5))):
        nbytes = draw(st.integers(1, 1 << 20))
        regions.append(Region(f"buffer{number}", start, nbytes))
        start += nbytes + draw(st.integers(1, 1 << 12))
    nodes, wanted = [], []
    for number, name in enumerate(draw(st.lists(st.sampled_from(sorted(SIGNATURES)), min_size=1, max_size=4))):
        addresses = {}
        for parameter in SIGNATURES[name]:
            if parameter.address:
                region = draw(st.sampled_from(regions))
                offset = draw(st.sampled_from([0, region.nbytes - 1, region.nbytes // 2]))
                addresses[parameter.name] = region.start + offset
                wanted.append((number, parameter.name, region.name, offset))
        nodes.append(Node("kernel", launched(name, addresses)))
    return GraphDump(tuple(nodes), ()), regions, wanted


@given(proven_graphs())
def test_addresses_in_declared_memory_are_proven(drawn: Any) -> None:
    dump, regions, wanted = drawn
    audit = judge(dump, regions)
    assert audit.findings == ()
    assert [(one.node, one.parameter, one.region, one.offset) for one in audit.accesses] == wanted
    for access in audit.accesses:
        [parameter] = [one for one in SIGNATURES[dump.kernels[access.node].name] if one.name == access.parameter]
        assert (access.reads, access.writes) == (parameter.reads, parameter.writes)


@given(drawn=proven_graphs(), data=st.data())
def test_every_planted_violation_is_found_and_nothing_else(drawn: Any, data: st.DataObject) -> None:
    dump, regions, _ = drawn
    at = data.draw(st.integers(0, len(dump.nodes) - 1))
    kernel = dump.kernels[at]
    declared = SIGNATURES[kernel.name]
    addresses = [number for number, parameter in enumerate(declared) if parameter.address]
    nulls = [number for number, parameter in enumerate(declared) if parameter.null]

    def with_value(number: int, address: int) -> KernelNode:
        values = list(kernel.parameters)
        values[number] = address.to_bytes(8, "little") + values[number][8:]
        return replace(kernel, parameters=tuple(values))

    region = data.draw(st.sampled_from(regions))
    foreign = data.draw(st.sampled_from([0, region.start - 1, region.start + region.nbytes]))
    plants: list[tuple[Kind, Node]] = [
        (Kind.FOREIGN_POINTER, Node("kernel", with_value(data.draw(st.sampled_from(addresses)), foreign))),
        (Kind.UNPROVEN_PARAMETER, Node("kernel", replace(kernel, parameters=kernel.parameters[:-1]))),
        (Kind.UNPROVEN_PARAMETER, Node("kernel", replace(kernel, parameters=(*kernel.parameters, bytes(4))))),
        (Kind.UNPROVEN_PARAMETER, Node("kernel", replace(kernel, parameters=()))),
        (Kind.UNEXPECTED_KERNEL, Node("kernel", replace(kernel, name="elementwise_kernel"))),
        *((kind, Node(name)) for name, kind in (("alloc", Kind.ALLOCATION), ("free", Kind.ALLOCATION), ("host", Kind.HOST), ("memset", Kind.COPY))),
        (Kind.COPY, Node("memcpy")),
        (Kind.OTHER, Node("CU_GRAPH_NODE_TYPE_CONDITIONAL")),
    ]
    if nulls:
        plants.append((Kind.FOREIGN_POINTER, Node("kernel", with_value(nulls[0], region.start))))
    for kind, node in plants:
        nodes = (*dump.nodes[:at], node, *dump.nodes[at + 1 :])
        [finding] = judge(GraphDump(nodes, ()), regions).findings
        assert (finding.kind, finding.node) == (kind, at)
        assert str(finding).startswith(f"{kind}: node {at}, ")


def test_an_empty_node_is_no_finding_and_the_smallest_region_names_an_address() -> None:
    whole, part = Region("arena", 4096, 4096), Region("tiles", 4608, 512)
    addresses = dict.fromkeys((parameter.name for parameter in SIGNATURES["_act_kernel"] if parameter.address), 4608)
    audit = judge(GraphDump((Node("empty"), Node("kernel", launched("_act_kernel", addresses))), ()), [whole, part])
    assert audit.findings == ()
    assert {access.region for access in audit.accesses} == {"tiles"}


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (MANGLED, "sm90_fp8_gemm_1d2d_impl"),
        ("_ZN9deep_gemm19sm90_bf16_gemm_implILj1EEEvPijjj", "sm90_bf16_gemm_impl"),
        ("_Z6simplePf", "simple"),
        ("_route_kernel", "_route_kernel"),
    ],
)
def test_a_mangled_name_is_shortened_to_the_function(name: str, short: str) -> None:
    assert KernelNode(name, (1, 1, 1), (1, 1, 1)).short_name == short


def test_the_language_of_declarations() -> None:
    assert parse("<a >b/x_rows/y =c @<d/w2 e f:8 g?:8") == (
        Parameter("a", 8, address=True, reads=True, buffers=("a",)),
        Parameter("b", 8, address=True, writes=True, buffers=("b", "x_rows", "y")),
        Parameter("c", 8, address=True, reads=True, writes=True, buffers=("c",)),
        Parameter("d", 128, address=True, reads=True, buffers=("d", "w2")),
        Parameter("e", 4, buffers=("e",)),
        Parameter("f", 8, buffers=("f",)),
        Parameter("g", 8, null=True, buffers=("g",)),
    )


def test_of_buffers_that_share_bytes_the_one_a_parameter_is_for_names_the_address() -> None:
    """The arena places buffers that live at different times over each other; a tiny one at the same start names nothing else."""
    regions = [Region("block_counts", 4096, 64), Region("gate_up", 4096, 1 << 16), Region("act_rows", 4096, 1 << 15), Region("row_of", 1 << 20, 64)]
    addresses = {"gate_up": 4096, "rows": 4096, "scales": 4096, "row_of": 1 << 20}
    audit = judge(GraphDump((Node("kernel", launched("_act_kernel", addresses)),), ()), regions)
    assert [access.region for access in audit.accesses] == ["gate_up", "row_of", "act_rows", "block_counts"]


def test_directions_are_what_the_kernels_do() -> None:
    """Written: what a kernel of a step makes; everything else it is given is read."""
    written = {name: {one.name for one in signature if one.writes} for name, signature in SIGNATURES.items()}
    assert written == {
        "_count_kernel": {"block_counts", "flags"}, "_route_kernel": {"row_of", "groups"}, "_scatter_kernel": {"rows", "scales"},
        "_act_kernel": {"rows", "scales"}, "_combine_kernel": {"out"}, "_gather_up_kernel": {"act", "act_scales"}, "_gather_down_kernel": {"rows"},
        "_gather_up_w4_kernel": {"act", "act_scales"}, "_gather_down_w4_kernel": {"rows"}, "_requantize_per_tensor_kernel": {"out"},
        "_route_tiles_kernel": {"row_of", "members", "tiles", "x_rows", "x_scales", "flags"}, "_gemv_up_kernel": {"act"},
        "_gemv_down_kernel": {"out", "flags"}, "sm90_fp8_gemm_1d2d_impl": {"d"}, "sm90_bf16_gemm_impl": {"d"},
    }  # fmt: skip
    for signature in SIGNATURES.values():
        assert all(one.reads or one.writes for one in signature if one.address)


def test_nothing_lies_in_an_empty_region() -> None:
    assert not Region("empty", 0, 0).holds(0)
    assert [Region("one", 8, 1).holds(address) for address in (7, 8, 9)] == [False, True, False]


def test_declared_names_are_the_kernels_own() -> None:
    """In order, without constants; a TMA descriptor is followed by its tensor's sizes and strides, everything by Triton's scratch."""
    pytest.importorskip("triton")
    from graphmoe import kernels

    steps = (
        "act", "combine", "count", "gather_down", "gather_down_w4", "gather_up", "gather_up_w4", "gemv_down", "gemv_up",
        "requantize_per_tensor", "route", "route_tiles", "scatter",
    )  # fmt: skip
    found = {}
    for name in steps:
        module = sys.modules[getattr(kernels, name).__module__]
        function = getattr(module, f"_{name}_kernel")
        found[f"_{name}_kernel"] = [
            name for name, parameter in inspect.signature(function.fn).parameters.items() if "constexpr" not in str(parameter.annotation)
        ]
    declared = {
        name: [one.name for one in signature if not one.null and not one.name.startswith(("w_row", "w_col"))]
        for name, signature in SIGNATURES.items()
        if name.startswith("_")
    }
    assert found == declared


# --- reading, through a stand-in for cuda.bindings.driver


class Launch(SimpleNamespace):
    """A kernel node's parameters as the driver hands them out; what the array points to is kept alive."""

    def __init__(self, name: str, values: list[bytes], *, library: bool = False) -> None:
        self.kept = [ctypes.create_string_buffer(value, len(value)) for value in values]
        self.array = (ctypes.c_void_p * len(values))(*(ctypes.addressof(one) for one in self.kept))
        super().__init__(
            name=name, values=values, func=0 if library else id(self), kern=id(self) if library else 0, kernelParams=ctypes.addressof(self.array),
            gridDimX=5, gridDimY=4, gridDimZ=1, blockDimX=64, blockDimY=2, blockDimZ=1, sharedMemBytes=2048,
        )  # fmt: skip


class Driver(ModuleType):
    """The driver's functions by their names. A graph of `nodes` (a kind's name, or a Launch) and `edges` (source, target, programmatic)."""

    CUgraph = staticmethod(lambda raw: raw)
    CUgraphDependencyType = SimpleNamespace(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=1)

    def __init__(self, nodes: list[Any], edges: list[tuple[int, int, bool]]) -> None:
        super().__init__("cuda.bindings.driver")
        self.graph_nodes, self.graph_edges, self.fails = nodes, edges, 0
        self.launches = {id(one): one for one in nodes if isinstance(one, Launch)}

    def cuGraphGetNodes(self, _: Any, count: int) -> tuple[Any, ...]:  # noqa: N802
        return self.fails, [100 + number for number in range(len(self.graph_nodes))] if count else [], len(self.graph_nodes)

    def cuGraphGetEdges_v2(self, _: Any, sources: Any, targets: Any, data: Any, count: Any) -> int:  # noqa: N802
        """Of the library itself: it fills arrays."""
        if sources is not None:
            for at, (source, target, programmatic) in enumerate(self.graph_edges):
                sources[at], targets[at], data[at].type = 100 + source, 100 + target, int(programmatic)
        count._obj.value = len(self.graph_edges)
        return 0

    def cuGraphNodeGetType(self, node: int) -> tuple[int, Any]:  # noqa: N802
        one = self.graph_nodes[node - 100]
        return 0, SimpleNamespace(name=f"CU_GRAPH_NODE_TYPE_{'KERNEL' if isinstance(one, Launch) else one}")

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[int, Any]:  # noqa: N802
        return 0, self.graph_nodes[node - 100]

    def cuFuncGetName(self, function: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, self.launches[function].name.encode()

    cuKernelGetName = cuFuncGetName  # noqa: N815

    def cuFuncGetParamInfo(self, function: int, index: int) -> tuple[int, int, int]:  # noqa: N802
        values = self.launches[function].values
        return (0, 0, len(values[index])) if index < len(values) else (1, 0, 0)

    cuKernelGetParamInfo = cuFuncGetParamInfo  # noqa: N815


GRAPH: Any = SimpleNamespace(raw_cuda_graph=lambda: 1)


def install(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings), ("cuda.bindings.driver", driver)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(graph_module, "_library", lambda: driver)


def test_a_graph_is_read_in_the_order_of_its_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Created in another order than run; one kernel is known to the driver as a library's."""
    first, second = Launch("_count_kernel", [b"12345678", b"abcd"]), Launch(MANGLED, [bytes(range(128))], library=True)
    install(Driver([second, "MEMSET", first], [(1, 2, False), (2, 0, True)]), monkeypatch)
    dump = read_graph(GRAPH)
    assert [node.kind for node in dump.nodes] == ["memset", "kernel", "kernel"]
    assert [kernel.short_name for kernel in dump.kernels] == ["_count_kernel", "sm90_fp8_gemm_1d2d_impl"]
    assert [kernel.parameters for kernel in dump.kernels] == [(b"12345678", b"abcd"), (bytes(range(128)),)]
    assert dump.edges == (Edge(0, 1, programmatic=False), Edge(1, 2, programmatic=True))
    assert (dump.kernels[0].grid, dump.kernels[0].block, dump.kernels[0].threads, dump.kernels[0].shared_bytes) == ((5, 4, 1), (64, 2, 1), 128, 2048)


def test_launches_alone_are_read_for_a_step_of_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    install(Driver([Launch("_count_kernel", [b"1234"]), Launch("_act_kernel", [])], []), monkeypatch)
    assert [(kernel.name, kernel.parameters) for kernel in kernel_nodes(GRAPH)] == [("_count_kernel", ()), ("_act_kernel", ())]
    for kind in ("MEM_ALLOC", "HOST", "MEMCPY"):
        install(Driver([Launch("_count_kernel", []), kind], []), monkeypatch)
        with pytest.raises(CaptureError, match="not a kernel"):
            kernel_nodes(GRAPH)


def test_what_cannot_be_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Launch("_act_kernel", [b"12345678"])
    bare.kernelParams = 0
    install(Driver([bare], []), monkeypatch)
    with pytest.raises(CaptureError, match=r"_act_kernel.*cannot be read back"):
        read_graph(GRAPH)
    install(Driver(["EMPTY", "EMPTY"], [(0, 1, False), (1, 0, False)]), monkeypatch)
    with pytest.raises(CaptureError, match="2 of 2 nodes"):
        read_graph(GRAPH)
    driver = Driver(["EMPTY"], [])
    driver.fails = 700
    install(driver, monkeypatch)
    with pytest.raises(CaptureError, match="700"):
        read_graph(GRAPH)


# --- a runtime's memory


@pytest.fixture
def weights() -> ExpertWeights:
    return random_weights(SPEC, "fp8_block")


def test_regions_are_the_static_buffers_the_bucket_and_the_layer(weights: ExpertWeights) -> None:
    first = random_weights(SPEC, "fp8_block", seed=1)
    with MoERuntime(SPEC, layers=[first, weights], buckets=[1, 8], path="psum") as rt:
        assert rt.audit() == {}
        named = {region.name: region for region in rt.regions(1, 8)}
        assert named.keys() == {
            "x", "topk_ids", "topk_weights", "y", "flags", "row_of", "groups", "block_counts", "x_rows", "x_scales", "gate_up", "act_rows",
            "act_scales", "down_rows", "w13", "w2", "w13_scale_inv", "w2_scale_inv",
        }  # fmt: skip
        assert named["w2"].start == weights.w2.data_ptr()
        assert {region.name: region.start for region in rt.regions(0, 8)}["w2"] == first.w2.data_ptr()
        assert named["w2"].nbytes == weights.w2.nbytes
        assert named["x"].nbytes == 8 * 128 * 2
        for layer, bucket in ((2, 8), (-1, 8), (0, 4)):
            with pytest.raises(InvalidInput, match=str(layer if bucket == 8 else bucket)):
                rt.regions(layer, bucket)


# --- the command


class FakeRuntime:
    """Two buckets of `psum` on made-up memory; `foreign` moves one address out of it."""

    foreign = False

    def __init__(self, spec: MoESpec, **_: Any) -> None:
        self._names = sorted({parameter.name for signature in SIGNATURES.values() for parameter in signature if parameter.address})

    def __enter__(self) -> FakeRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def regions(self, layer: int, tokens: int) -> list[Region]:
        return [Region(name, (number + 1) << 20, 1 << 16) for number, name in enumerate(self._names)]

    def audit(self) -> dict[tuple[int, int], Any]:
        regions = self.regions(0, 0)
        addresses = {region.name: region.start + 16 for region in regions}
        kernels = [launched(name, addresses) for name in ("_count_kernel", "_route_kernel", "_scatter_kernel", "_combine_kernel")]
        if self.foreign:
            kernels[1] = launched("_route_kernel", addresses | {"groups": 3})
        dump = GraphDump(tuple(Node("kernel", kernel) for kernel in kernels), tuple(Edge(at, at + 1, at > 0) for at in range(3)))
        return {(0, tokens): judge(dump, regions) for tokens in (1, 64)}

    def report(self) -> Any:
        return SimpleNamespace(buckets=[SimpleNamespace(tokens=tokens, recipe="psum block_e=64") for tokens in (1, 64)])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["graphmoe.cli.inspect"]
    monkeypatch.setattr(module, "measured_gpu", lambda: (torch.device("cpu"), "NVIDIA H200"))
    monkeypatch.setattr(module, "unwritten_weights", lambda *_, **__: None)
    monkeypatch.setattr(module, "MoERuntime", FakeRuntime)


def inspected(*options: str) -> Any:
    return CliRunner().invoke(app, ["inspect", *options])


def test_inspect_prints_every_node_and_writes_both_files(gpu: None, tmp_path: Any) -> None:
    file, picture = tmp_path / "audit.json", tmp_path / "graph.png"
    pytest.importorskip("matplotlib")
    result = inspected("--json", str(file), "--png", str(picture))
    assert result.exit_code == 0, result.output
    assert "bucket 1, psum block_e=64" in result.output
    assert "2 graphs on NVIDIA H200, 30 addresses proven, 0 findings" in result.output
    [line] = [line for line in result.output.splitlines() if "_combine_kernel" in line][:1]
    assert "2 programmatic" in line
    assert "rows, row_of, topk_weights" in line
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = json.loads(file.read_text())
    assert written["schema"] == "graphmoe.audit/1"
    assert [(graph["layer"], graph["bucket"], len(graph["nodes"]), len(graph["accesses"])) for graph in written["graphs"]] == [
        (0, 1, 4, 15),
        (0, 64, 4, 15),
    ]


def test_inspect_fails_on_a_finding(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRuntime, "foreign", True)
    result = inspected()
    assert isinstance(result.exception, CaptureError)
    assert "layer 0, bucket 1: foreign pointer: node 1, _route_kernel's groups is 0x3" in str(result.exception)
    assert result.output.count("foreign pointer: node 1") == 2
    assert "2 findings" in result.output


def test_inspect_without_a_gpu_or_with_no_layer_is_refused() -> None:
    assert "sees no CUDA device" in str(inspected().exception)
    assert "--layers 0" in str(inspected("--layers", "0").exception)


def test_a_graph_that_is_not_proven_refuses_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what was found, where, and the way to look at it; a proven one is marked as such."""
    addresses = {"rows": 4096, "row_of": 8192, "topk_weights": 8192, "out": 1 << 30}
    dump = GraphDump((Node("kernel", launched("_combine_kernel", addresses)), Node("host", None)), ())
    regions = [Region("down_rows", 4096, 64), Region("row_of", 8192, 64)]
    built = Built(plan=None, device=torch.device("cpu"), ops=None, gemm=None, captures=False)  # type: ignore[arg-type]
    monkeypatch.setattr(Built, "audit", lambda self, layer: {(1, 8): judge(dump, regions)})
    with pytest.raises(CaptureError, match=r"layer 1, bucket 8 .* _combine_kernel's out.*2 findings.*audit=False"):
        _require_proof(built)
    assert not built.audited
    monkeypatch.setattr(Built, "audit", lambda self, layer: {(1, 8): judge(GraphDump((), ()), regions)})
    _require_proof(built)
    assert built.audited
