"""Captured graphs read back from the driver: every address of every recipe proven, and planted violations found."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import pytest
import torch

from graphmoe import MoERuntime, kernels
from graphmoe.audit import Kind, Region, judge, read_graph
from graphmoe.samples import random_weights
from tests.gpu.cases import CASES, SMALL, Case, weights_of
from tests.gpu.conftest import Table


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_address_of_every_graph_is_proven(case: Case, compiled: None, table: Table) -> None:
    """Four layers, two of each weights, all buckets: kernels only, no address outside, and all that a step must touch is touched."""
    pair = [weights_of(case.shape, case.fmt, seed) for seed in (0, 1)]
    with MoERuntime(case.spec, layers=pair * 2, buckets=case.buckets, path=case.recipe, progress=False, audit=False) as rt:
        started = time.perf_counter()
        audits = rt.audit()
        seconds = time.perf_counter() - started
        assert audits.keys() == {(layer, t) for layer in range(4) for t in case.buckets}
        for key, audit in audits.items():
            assert [str(finding) for finding in audit.findings] == [], key
            touched = {access.region for access in audit.accesses}
            assert touched >= {"topk_ids", "topk_weights", "y", "w13", "w2", "act_rows"}, key
            assert {access.offset for access in audit.accesses if access.region in ("w13", "w2")} == {0}, key
            assert {access.region for access in audit.accesses if access.writes} >= {"y"}, key
            chain = [(edge.source, edge.target) for edge in audit.dump.edges]
            assert chain == [(number, number + 1) for number in range(len(audit.dump.nodes) - 1)], key
            # Our own kernels are launched programmatically, deep_gemm's are not.
            own = ["gemm" not in kernel.short_name for kernel in audit.dump.kernels]
            assert [edge.programmatic for edge in audit.dump.edges] == own[1:], key
            others = judge(audit.dump, rt.regions(1 - key[0] % 2, key[1])).findings
            assert {finding.kind for finding in others} == {Kind.FOREIGN_POINTER}, "another layer's weights passed"
        kernels_of = {len(audit.dump.kernels) for audit in audits.values()}
        table.append(f"audit of {case.name:<48} {len(audits)} graphs, {kernels_of} kernels, {1e3 * seconds / len(audits):.2f} ms a graph, 0 findings")


def captured(*steps: Callable[[], object]) -> torch.cuda.CUDAGraph:
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        for step in steps:
            step()
        graph.capture_end()
    return graph


def test_planted_violations_are_found() -> None:
    """A foreign output, a foreign weight behind a TMA descriptor, copies, an unexpected kernel; and nothing where nothing is planted."""
    tokens, spec = 4, SMALL
    h = spec.hidden_size
    weights = random_weights(spec, "bf16", device="cuda")
    rows, y = (torch.zeros(n, h, device="cuda", dtype=torch.bfloat16) for n in (16, tokens))
    row_of, router = torch.zeros(tokens, 4, device="cuda", dtype=torch.int32), torch.zeros(tokens, 4, device="cuda")
    tiles, members = torch.zeros(2, 3, device="cuda", dtype=torch.int32), torch.zeros(2, 16, device="cuda", dtype=torch.int32)
    x, act = torch.zeros(tokens, h, device="cuda").bfloat16(), torch.zeros(16, spec.intermediate_size, device="cuda").bfloat16()
    own = {"rows": rows, "y": y, "row_of": row_of, "router": router, "tiles": tiles, "members": members, "x": x, "act": act, "w13": weights.w13}
    regions = [Region(name, tensor.data_ptr(), tensor.nbytes) for name, tensor in own.items()]
    foreign_y, foreign_w13 = torch.zeros_like(y), weights.w13.clone()
    host = torch.zeros(tokens, h, dtype=torch.bfloat16, pin_memory=True)

    def combine(out: torch.Tensor) -> Callable[[], None]:
        return lambda: kernels.combine(rows[None], row_of, router, scale=1.0, out=out)

    def gather_up(w13: torch.Tensor) -> Callable[[], None]:
        return lambda: kernels.gather_up(
            x, None, tiles, members, w13, None, block_rows=128, stages=3, warps=4, act=act, act_scales=None, scale_format=None
        )

    plants: list[tuple[Callable[[], object], Kind | None, str]] = [
        (combine(y), None, ""),
        (gather_up(weights.w13), None, ""),
        (combine(foreign_y), Kind.FOREIGN_POINTER, "_combine_kernel's out"),
        (gather_up(foreign_w13), Kind.FOREIGN_POINTER, "_gather_up_kernel's w"),
        (lambda: y.copy_(foreign_y), Kind.COPY, "memcpy"),
        (lambda: y.copy_(host, non_blocking=True), Kind.COPY, "memcpy"),
        (lambda: y.add_(1), Kind.UNEXPECTED_KERNEL, "no kernel of a step"),
    ]
    for step, kind, what in plants:
        findings = judge(read_graph(captured(combine(y), step)), regions).findings
        assert [finding.kind for finding in findings] == ([] if kind is None else [kind] * len(findings)), what
        assert (kind is None) == (findings == ())
        assert all(what in str(finding) for finding in findings)


def test_planted_nodes_that_no_capture_of_ours_makes_are_found() -> None:
    """Host, allocation and memset nodes, put into a graph through the driver."""
    from cuda.bindings import driver

    host_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    flags = torch.zeros(1, dtype=torch.int32, device="cuda")
    counts, ids = torch.zeros(1, 16, dtype=torch.int32, device="cuda"), torch.zeros(1, 4, dtype=torch.int32, device="cuda")
    regions = [Region(name, one.data_ptr(), one.nbytes) for name, one in (("flags", flags), ("counts", counts), ("ids", ids))]

    def planted(kind: str) -> torch.cuda.CUDAGraph:
        graph = captured(lambda: kernels.count(ids, distinct=True, block_counts=counts, flags=flags))
        raw = driver.CUgraph(graph.raw_cuda_graph())
        if kind == "host":
            params = driver.CUDA_HOST_NODE_PARAMS()
            params.fn = driver.CUhostFn(ctypes.cast(host_function, ctypes.c_void_p).value)
            error, *_ = driver.cuGraphAddHostNode(raw, [], 0, params)
        elif kind == "memset":
            params = driver.CUDA_MEMSET_NODE_PARAMS()
            params.dst, params.elementSize, params.width, params.height = flags.data_ptr(), 4, 1, 1
            _, context = driver.cuCtxGetCurrent()
            error, *_ = driver.cuGraphAddMemsetNode(raw, [], 0, params, context)
        else:
            params = driver.CUDA_MEM_ALLOC_NODE_PARAMS()
            params.poolProps.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            params.poolProps.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            params.poolProps.location.id = torch.cuda.current_device()
            params.bytesize = 1 << 20
            error, *_ = driver.cuGraphAddMemAllocNode(raw, [], 0, params)
        assert int(error) == 0, kind
        return graph

    for kind, found in (("host", Kind.HOST), ("memset", Kind.COPY), ("alloc", Kind.ALLOCATION)):
        graph = planted(kind)
        assert [finding.kind for finding in judge(read_graph(graph), regions).findings] == [found]
