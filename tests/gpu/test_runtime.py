"""The runtime's contracts on a GPU: memory, staging, streams, nesting, errors, the sticky flag."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch
from torch import Tensor

from graphmoe import ExpertWeights, MoERuntime, Recipe
from graphmoe.errors import BatchTooLarge, BrokenPromise, CaptureError, InvalidInput, RuntimeClosed, WeightsMismatch
from tests.checks import RECIPES, assert_rows, bits, oracle, poison, random_inputs, random_weights, routings
from tests.gpu.cases import SMALL as SPEC
from tests.gpu.conftest import Table

alone = pytest.mark.alone
"""Compares free device memory, which other test processes would change."""


@pytest.fixture(scope="module")
def weights(compiled: None) -> ExpertWeights:
    return random_weights(SPEC, "fp8_block", device="cuda")


@pytest.fixture
def runtime(weights: ExpertWeights) -> Iterator[MoERuntime]:
    with MoERuntime(SPEC, weights, buckets=[1, 2, 4, 8, 16], path="psum", progress=False) as made:
        yield made


@alone
def test_twenty_builds_and_closes_leak_nothing(weights: ExpertWeights, table: Table) -> None:
    free = []
    for build in range(22):
        made = MoERuntime(SPEC, weights, buckets=[1, 2, 4, 8, 16, 32], path=RECIPES[build % len(RECIPES)], progress=False)
        made(*_batch(5))
        made.close()
        del made
        gc.collect()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    table.append(
        f"free memory after builds and closes 2..22: lowest {min(free[1:])}, highest {max(free[1:])} bytes; allocated {torch.cuda.memory_allocated()}"
    )
    # The first round loads each recipe's kernels onto the device.
    assert set(free[len(RECIPES) :]) == {free[len(RECIPES)]}, free


def test_capture_leaves_the_graph_pool_empty(compiled: None, table: Table) -> None:
    """`memory_snapshot(mempool_id=pool)` of a built runtime; in a process of its own, because torch 2.11 may crash some time after that call."""
    script = """if True:
        import torch
        from graphmoe import MoERuntime
        from tests.checks import RECIPES, random_weights
        from tests.gpu.cases import SMALL
        weights = random_weights(SMALL, "fp8_block", device="cuda")
        for recipe in RECIPES:
            runtime = MoERuntime(SMALL, weights, buckets=[1, 8, 32], path=recipe, progress=False)
            print(len(torch.cuda.memory_snapshot(mempool_id=runtime._core.open().pool)), flush=True)
        """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0"] * len(RECIPES), done.stdout + done.stderr
    table.append(f"segments in the graph pool after capture, {len(RECIPES)} recipes: {' '.join(done.stdout.split())}")


def test_hundreds_of_builds_and_closes_under_garbage_collection(weights: ExpertWeights) -> None:
    batch = _batch(5)
    for build in range(300):
        with MoERuntime(SPEC, weights, buckets=[8], path="psum", progress=False) as made:
            made(*batch)
        if build % 7 == 0:
            gc.collect()


def test_calls_allocate_nothing(runtime: MoERuntime) -> None:
    batch = _batch(5)
    runtime(*batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        runtime(*batch)
        runtime.replay(8)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_changed_batches_streams_and_threads(runtime: MoERuntime, weights: ExpertWeights) -> None:
    batches = [_batch(t, seed=t) for t in (1, 3, 16, 2, 8, 5, 13, 4)]
    wants = [oracle(*batch, weights) for batch in batches]
    outs = [torch.empty_like(batch[0]) for batch in batches]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(3):
        for index, batch in enumerate(batches):
            with torch.cuda.stream(streams[index % 3]):
                runtime(*batch, out=outs[index].fill_(0))
        torch.cuda.synchronize()
        for out, want in zip(outs, wants, strict=True):
            assert_rows(out, want, "fp8_block")
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(20):
                with torch.cuda.stream(streams[index]):
                    out = torch.empty_like(batches[index][0])
                    runtime(*batches[index], out=out)
                    streams[index].synchronize()
                assert_rows(out, wants[index], "fp8_block")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_a_first_call_of_any_kind_compiles_nothing(weights: ExpertWeights) -> None:
    from graphmoe.kernels.stage import _compiled

    with MoERuntime(SPEC, weights, buckets=[1, 16], path="psum", progress=False) as made:
        before = set(_compiled)
        for t in (1, 16):
            x, ids, router = _batch(t)
            made(x, ids, router)
            made(x, ids.int(), router.T.contiguous().T)
            made(torch.zeros(t, SPEC.hidden_size + 1, device="cuda", dtype=torch.bfloat16)[:, 1:], ids, router)
        assert set(_compiled) == before


@alone
def test_a_failure_anywhere_in_a_build_leaves_nothing_and_the_next_build_works(weights: ExpertWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphmoe.paths.grouped import BoundGrouped

    def build() -> MoERuntime:
        return MoERuntime(SPEC, weights, buckets=[4, 16], path="psum", progress=False)

    build().close()
    free = _free_memory()
    for stage in ("route", "up", "down", "combine"):
        for call in range(4):  # two warm-ups, then two captures
            with monkeypatch.context() as patch:
                patch.setattr(BoundGrouped, stage, _failing_at(call, getattr(BoundGrouped, stage)))
                with pytest.raises(RuntimeError):
                    build()
            assert _free_memory() == free, (stage, call)
    with build() as made:
        batch = _batch(7)
        assert_rows(made(*batch), oracle(*batch, weights), "fp8_block")


def test_a_build_inside_a_capture_is_refused(weights: ExpertWeights) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(CaptureError, match="build it before"):
        MoERuntime(SPEC, weights, buckets=[4], path="psum", progress=False)


def test_another_threads_allocations_do_not_fail_a_build(weights: ExpertWeights) -> None:
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            torch.empty(1 << 16, device="cuda")
            stop.wait(0.02)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        for _ in range(3):
            MoERuntime(SPEC, weights, buckets=[1, 2, 4, 8], path="psum", progress=False).close()
    finally:
        stop.set()
        thread.join()


def test_the_flag_is_read_and_cleared_in_the_order_of_calls(runtime: MoERuntime) -> None:
    """On whatever streams: a report sees every call made before it, a call after `clear_flag` is not undone by it."""
    x, ids, router = _batch(16)
    broken = ids.clone()
    broken[3, 1] = broken[3, 2]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(20):
            with torch.cuda.stream(streams[0]):
                torch.cuda._sleep(2_000_000)
                runtime(x, broken, router)
            with torch.cuda.stream(streams[1]):
                assert runtime.report().promise_broken
            with torch.cuda.stream(streams[0]):
                torch.cuda._sleep(2_000_000)
                runtime(x, broken, router)
            with torch.cuda.stream(streams[2]):
                runtime.clear_flag()
            with torch.cuda.stream(streams[1]):
                assert not runtime.report().promise_broken
                runtime(x, broken, router)
            with torch.cuda.stream(streams[2]):
                assert runtime.report().promise_broken
                runtime.clear_flag()


def test_an_interrupted_call_is_waited_for(runtime: MoERuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = _batch(4)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()

    def interrupt(*_: object) -> None:
        torch.cuda._sleep(20_000_000)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, torch.cuda.stream(stream):
        patch.setattr(torch.cuda.CUDAGraph, "replay", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runtime(*batch)
    runtime(*batch)
    assert stream.query() or not torch.cuda.current_stream().query(), "the next call waits for what the interrupted one had launched"
    torch.cuda.synchronize()


def test_our_call_inside_a_users_capture_just_records(runtime: MoERuntime, weights: ExpertWeights) -> None:
    x, ids, router = _batch(6)
    out = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runtime(x, ids, router, out=out)
    for seed in (1, 2):
        x2, ids2, router2 = _batch(6, seed=seed)
        x.copy_(x2)
        ids.copy_(ids2)
        router.copy_(router2)
        poison(runtime, -1)
        out.fill_(0)
        graph.replay()
        assert_rows(out, oracle(x2, ids2, router2, weights), "fp8_block")
        assert_rows(runtime(x2, ids2, router2), oracle(x2, ids2, router2, weights), "fp8_block")


def test_the_last_output_may_be_the_next_input(runtime: MoERuntime, weights: ExpertWeights) -> None:
    x, ids, router = _batch(7)
    y = runtime(x, ids, router)
    first = y.clone()
    assert_rows(runtime(y, ids, router), oracle(first, ids, router, weights), "fp8_block")


def test_ids_of_every_kind_give_the_same_bits(runtime: MoERuntime) -> None:
    x, ids, router = _batch(6)
    want = bits(runtime(x, ids, router)).clone()
    assert torch.equal(bits(runtime(x, ids.int(), router)), want)
    assert torch.equal(bits(runtime(x, ids.T.contiguous().T, router.T.contiguous().T)), want)
    padded = torch.zeros(6, 1025, device="cuda", dtype=torch.bfloat16)[:, 1:]
    assert torch.equal(bits(runtime(padded.copy_(x), ids, router)), want)
    one = x[:1].expand(6, -1)
    assert torch.equal(bits(runtime(one, ids[:1].expand(6, -1), router[:1].expand(6, -1)))[0], want[0])


def test_a_broken_promise_is_nan_and_flagged(runtime: MoERuntime, weights: ExpertWeights) -> None:
    x, ids, router = _batch(6)
    good = bits(runtime(x, ids, router)).clone()
    ids[3, 1] = ids[3, 2]
    y = runtime(x, ids, router)
    assert bool(y[3].isnan().all())
    keep = [0, 1, 2, 4, 5]
    assert torch.equal(bits(y)[keep], good[keep])
    torch.cuda.synchronize()
    with pytest.warns(BrokenPromise):  # noqa: PT031 - the copy that one call starts is read by the next
        runtime(x, ids, router)
        torch.cuda.synchronize()
        runtime(x, ids, router)
    assert runtime.report().promise_broken
    runtime.clear_flag()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids[3, 1] = -1
        for _ in range(3):
            runtime(x, ids, router)
            torch.cuda.synchronize()
    assert not runtime.report().promise_broken


def test_errors_leave_the_runtime_usable(runtime: MoERuntime, weights: ExpertWeights) -> None:
    x, ids, router = _batch(6)
    want = bits(runtime(x, ids, router)).clone()
    for bad, error in (
        ((x.float(), ids, router), InvalidInput),
        ((x.cpu(), ids, router), InvalidInput),
        ((x, ids[:, :2], router), InvalidInput),
        ((x.T.contiguous().T, ids, router), InvalidInput),
        (_batch(17), BatchTooLarge),
    ):
        with pytest.raises(error):
            runtime(*bad)
        assert torch.equal(bits(runtime(x, ids, router)), want)
    chunked = MoERuntime(SPEC, weights, buckets=[1, 4], overflow="chunk", path="psum", progress=False)
    batch = _batch(11)
    with pytest.raises(InvalidInput, match="out="):
        chunked(*batch)
    out = torch.empty_like(batch[0])
    assert_rows(chunked(*batch, out=out), oracle(*batch, weights), "fp8_block")
    chunked.close()
    with pytest.raises(RuntimeClosed):
        chunked(*batch, out=out)


def test_a_masked_tile_that_the_gemm_does_not_keep_is_refused_or_right(weights: ExpertWeights) -> None:
    """row_tile=64 is legal only where deep_gemm stores 64-row tiles; otherwise capture must refuse, and the next build works."""
    for t in (1, 16, 64, 200):
        try:
            made = MoERuntime(SPEC, weights, buckets=[t], path=Recipe("masked", row_tile=64), progress=False)
        except CaptureError:
            made = MoERuntime(SPEC, weights, buckets=[t], path="masked", progress=False)
        batch = _batch(t)
        assert_rows(made(*batch), oracle(*batch, weights), "fp8_block")
        made.close()


def test_weights_that_move_are_refused_rebound_and_refreshed(weights: ExpertWeights) -> None:
    """Replaced storage is refused before a replay; a rebind swaps graphs on the same arena; a copy of host weights is renewed on request."""
    batch = _batch(7)
    host, other = random_weights(SPEC, "fp8_block"), random_weights(SPEC, "fp8_block", seed=3, device="cuda")
    with MoERuntime(SPEC, host, device="cuda", buckets=[8], path="gathered", progress=False) as made:
        address = made.inputs(8).x.data_ptr()
        want = oracle(*batch, weights, "gathered")
        assert_rows(made(*batch), oracle(*batch, host.to("cuda"), "gathered"), "fp8_block", recipe="gathered")
        for name, tensor in other.tensors().items():
            host.tensors()[name].copy_(tensor)
        with pytest.raises(WeightsMismatch, match="refresh"):
            made(*batch)
        made.refresh()
        assert_rows(made(*batch), oracle(*batch, other, "gathered"), "fp8_block", recipe="gathered")
        made.rebind(weights)
        assert made.inputs(8).x.data_ptr() == address
        assert_rows(made(*batch), want, "fp8_block", recipe="gathered")
        mine = ExpertWeights(SPEC, "fp8_block", **{name: tensor.clone() for name, tensor in weights.tensors().items()})  # type: ignore[arg-type]
        made.rebind(mine)
        mine.w2.data = mine.w2.data.clone()
        with pytest.raises(WeightsMismatch, match="w2 has moved"):
            made(*batch)


def _failing_at(call: int, original: Callable[..., None]) -> Callable[..., None]:
    """`original` until its `call`-th call, which fails after it ran; inside a capture in a way that makes the driver invalidate that capture."""
    calls = count()

    def fail(*arguments: object) -> None:
        original(*arguments)
        if next(calls) == call:
            if torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()
            raise RuntimeError("injected")

    return fail


def _free_memory() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _batch(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    x, router = random_inputs(SPEC, tokens, seed=seed, device="cuda")
    return x, dict(routings(SPEC, tokens, seed=seed, device="cuda"))["balanced"], router
