"""The runtime's contracts on the CPU: staging, views, buckets, chunks, errors that leave it usable, threads, report, close."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from graphmoe import BucketLadder, ExpertWeights, MoERuntime, MoESpec, Recipe
from graphmoe import build as build_module
from graphmoe.audit import require_cuda_python
from graphmoe.build import Built, warm_stage
from graphmoe.errors import (
    ArenaTooLarge,
    BatchTooLarge,
    BrokenPromise,
    CallError,
    GraphMoEError,
    InvalidInput,
    MissingBackend,
    RuntimeClosed,
    UnknownRecipe,
    UnsupportedShape,
    WeightsMismatch,
)
from graphmoe.paths import PATHS, get_path
from tests.checks import FP8_OF, assert_rows, bits, built_of, oracle, poison, random_inputs, random_weights, routings

SPEC = MoESpec(6, 3, 256, 128, routed_scaling_factor=1.5)
Batch = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    return random_weights(SPEC, "fp8_block")


@pytest.fixture
def runtime(weights: ExpertWeights) -> Iterator[MoERuntime]:
    with MoERuntime(SPEC, weights, buckets=[1, 2, 4, 8], device="cpu", path="psum") as made:
        yield made


@pytest.mark.parametrize("path", sorted(PATHS))
def test_the_default_device_of_the_caller_does_not_matter(path: str, weights: ExpertWeights) -> None:
    x, ids, router = batch(3)
    experts = weights if FP8_OF[path] == weights.fmt else random_weights(SPEC, FP8_OF[path])
    with MoERuntime(SPEC, experts, buckets=[4], device="cpu", path=path) as plain:
        wanted = plain(x, ids, router).clone()
    with torch.device("meta"), MoERuntime(SPEC, experts, buckets=[4], device="cpu", path=path) as made:
        assert torch.equal(made(x, ids, router), wanted)
        assert not made.report().promise_broken


def batch(tokens: int, seed: int = 0, spec: MoESpec = SPEC) -> Batch:
    x, router = random_inputs(spec, tokens, seed=seed)
    return x, dict(routings(spec, tokens, seed=seed))["balanced"], router


def test_a_decode_loop_with_changing_batches(runtime: MoERuntime, weights: ExpertWeights) -> None:
    for step, tokens in enumerate((8, 7, 7, 3, 0, 1, 5, 2, 8)):
        x, ids, router = batch(tokens, seed=step)
        poison(runtime, -1)
        assert_rows(runtime(x, ids, router), oracle(x, ids, router, weights), "fp8_block")


def test_the_output_is_a_view_that_out_copies(runtime: MoERuntime) -> None:
    first, second = batch(4, seed=1), batch(4, seed=2)
    y = runtime(*first)
    kept = torch.full_like(first[0], 9.0)
    assert runtime(*first, out=kept) is kept
    assert torch.equal(bits(y), bits(kept))
    again = runtime(*second)
    assert again.data_ptr() == y.data_ptr()
    assert not torch.equal(bits(kept), bits(again))


def test_static_inputs_and_output_lie_at_one_place_in_every_bucket(runtime: MoERuntime) -> None:
    for name in ("x", "topk_ids", "topk_weights"):
        assert len({getattr(runtime.inputs(t), name).data_ptr() for t in (1, 2, 4, 8)}) == 1
    assert len({runtime.replay(t).data_ptr() for t in (1, 2, 4, 8)}) == 1


def test_the_last_output_may_be_the_next_input(runtime: MoERuntime, weights: ExpertWeights) -> None:
    x, ids, router = batch(5)
    y = runtime(x, ids, router)
    kept = y.clone()
    assert_rows(runtime(y, ids, router), oracle(kept, ids, router, weights), "fp8_block")


def test_lent_inputs_and_replay_equal_a_call(runtime: MoERuntime) -> None:
    x, ids, router = batch(4)
    want = bits(runtime(x, ids, router)).clone()
    inputs = runtime.inputs(4)
    inputs.x.copy_(x)
    inputs.topk_ids.copy_(ids)
    inputs.topk_weights.copy_(router)
    poison(runtime, -1)
    assert torch.equal(bits(runtime.replay(4)), want)
    with pytest.raises(InvalidInput, match=r"3 is not a bucket.*\[1, 2, 4, 8\]"):
        runtime.inputs(3)
    with pytest.raises(InvalidInput, match="not a bucket"):
        runtime.replay(16)


@pytest.mark.parametrize("path", PATHS)
def test_a_replay_before_any_input_is_written_touches_no_expert(path: str, weights: ExpertWeights) -> None:
    experts = weights if FP8_OF[path] == weights.fmt else random_weights(SPEC, FP8_OF[path])
    with MoERuntime(SPEC, experts, buckets=[4], device="cpu", path=path) as fresh:
        assert bool((fresh.replay(4) == 0).all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_every_kind_give_the_same_bits(runtime: MoERuntime, dtype: torch.dtype) -> None:
    x, ids, router = batch(6)
    want = bits(runtime(x, ids, router)).clone()
    ids = ids.to(dtype)
    strided = torch.full((6, 6), 99, dtype=dtype)[:, ::2]
    for other in (ids, ids.T.contiguous().T, strided.copy_(ids)):
        assert torch.equal(bits(runtime(x, other, router)), want)
    shifted = torch.zeros(6, SPEC.hidden_size + 3, dtype=torch.bfloat16)[:, 3:].copy_(x)
    assert torch.equal(bits(runtime(shifted, ids, router.T.contiguous().T)), want)
    expanded = bits(runtime(x[:1].expand(6, -1), ids[:1].expand(6, -1), router[:1].expand(6, -1)))
    assert torch.equal(expanded, want[:1].expand(6, -1))


def test_an_id_beyond_int32_is_a_sentinel_not_an_expert(runtime: MoERuntime, weights: ExpertWeights) -> None:
    x, ids, router = batch(4)
    far, away = ids.clone(), ids.clone()
    far[:, 0] = ids[:, 0] + (1 << 32)
    away[:, 0] = -1
    want = bits(runtime(x, away, router)).clone()
    assert torch.equal(bits(runtime(x, far, router)), want)


def test_a_token_has_the_same_bits_in_one_bucket_whatever_its_company(runtime: MoERuntime) -> None:
    x, ids, router = batch(8)
    want = bits(runtime(x, ids, router)).clone()
    for seed in range(1, 4):
        x2, ids2, router2 = batch(8, seed=seed)
        x2[:3], ids2[:3], router2[:3] = x[:3], ids[:3], router[:3]
        assert torch.equal(bits(runtime(x2, ids2, router2))[:3], want[:3])
    assert torch.equal(bits(runtime(x, ids, router)), want)


@pytest.mark.parametrize("path", ["psum", "gathered", "direct"])
def test_several_layers_share_one_arena(path: str, weights: ExpertWeights) -> None:
    other = random_weights(SPEC, "fp8_block", seed=1)
    with (
        MoERuntime(SPEC, layers=[weights, other], buckets=[1, 4], device="cpu", path=path) as both,
        MoERuntime(SPEC, weights, buckets=[1, 4], path=path) as one,
    ):
        assert both.report().arena_bytes == one.report().arena_bytes == both.plan.arena_bytes
        data = batch(3)
        for index, mine in enumerate((weights, other)):
            assert_rows(both.layers[index](*data), oracle(*data, mine, path), "fp8_block", recipe=path)
        with pytest.raises(CallError, match=r"rt\.layers\[i\]"):
            both(*data)
        with pytest.raises(CallError, match=r"rt\.layers\[i\]"):
            both.replay(1)
        both.layers[1](*data)
        assert_rows(both.layers[0].replay(4)[:3], oracle(*data, weights, path), "fp8_block", recipe=path)


@pytest.mark.parametrize("path", ["psum", "gathered", "direct"])
def test_in_place_updates_of_weights_show_in_the_next_call(path: str) -> None:
    mine, other = random_weights(SPEC, "fp8_block"), random_weights(SPEC, "fp8_block", seed=9)
    data = batch(4)
    with MoERuntime(SPEC, mine, buckets=[4], device="cpu", path=path) as made:
        made(*data)
        for name, tensor in mine.tensors().items():
            tensor.copy_(other.tensors()[name])
        assert_rows(made(*data), oracle(*data, other, path), "fp8_block", recipe=path)


def test_chunks_of_the_largest_bucket(weights: ExpertWeights) -> None:
    with MoERuntime(SPEC, weights, buckets=[1, 4], overflow="chunk", device="cpu", path="psum") as chunked:
        data = batch(11)
        with pytest.raises(InvalidInput, match=r"11 tokens run in 3 chunks.*out="):
            chunked(*data)
        out = torch.full_like(data[0], torch.nan)
        assert chunked(*data, out=out) is out
        assert_rows(out, oracle(*data, weights), "fp8_block")
        want = bits(out).clone()
        x = data[0].clone()
        chunked(x, *data[1:], out=x)
        assert torch.equal(bits(x), want)
        memory = torch.zeros(12, SPEC.hidden_size, dtype=torch.bfloat16)
        memory[:11] = data[0]
        with pytest.raises(InvalidInput, match="overlaps"):
            chunked(memory[:11], *data[1:], out=memory[1:])
        assert_rows(chunked(*batch(3)), oracle(*batch(3), weights), "fp8_block")
    ladder = BucketLadder([2], overflow="chunk")
    with MoERuntime(SPEC, weights, buckets=ladder, device="cpu") as kept:
        assert kept.plan.ladder.overflow == "chunk"


def test_errors_name_numbers_and_leave_the_runtime_usable(runtime: MoERuntime) -> None:
    x, ids, router = batch(6)
    want = bits(runtime(x, ids, router)).clone()
    nine = batch(9)
    cases: list[tuple[tuple, dict, type[GraphMoEError], str]] = [
        ((x[0], ids, router), {}, InvalidInput, r"\[t, 256\]"),
        ((x[:, :128], ids, router), {}, InvalidInput, r"\(6, 128\).*256"),
        ((x.float(), ids, router), {}, InvalidInput, "bfloat16"),
        ((x.T.contiguous().T, ids, router), {}, InvalidInput, "contiguous"),
        ((x, ids[:5], router), {}, InvalidInput, r"topk_ids is \(5, 3\), expected \(6, 3\)"),
        ((x, ids[:, :2], router), {}, InvalidInput, r"\(6, 2\)"),
        ((x, ids.float(), router), {}, InvalidInput, "int32 or torch.int64"),
        ((x, ids, router.bfloat16()), {}, InvalidInput, "float32"),
        ((x, ids, router[:, :1]), {}, InvalidInput, "topk_weights"),
        ((x.to("meta"), ids, router), {}, InvalidInput, "meta"),
        ((x, ids, router), {"out": torch.empty(5, 256, dtype=torch.bfloat16)}, InvalidInput, "out"),
        ((x, ids, router), {"out": torch.empty(6, 256)}, InvalidInput, "out"),
        (nine, {}, BatchTooLarge, "9 tokens exceed the largest bucket 8"),
    ]
    for arguments, options, error, message in cases:
        with pytest.raises(error, match=message):
            runtime(*arguments, **options)
        assert torch.equal(bits(runtime(x, ids, router)), want)


def test_views_of_lent_buffers_are_refused_unless_they_are_the_buffer(runtime: MoERuntime) -> None:
    x, ids, router = batch(3)
    want = bits(runtime(x, ids, router)).clone()
    inputs, y = runtime.inputs(8), runtime.replay(8)

    def fill() -> None:
        inputs.x[:3], inputs.topk_ids[:3], inputs.topk_weights[:3] = x, ids.int(), router

    fill()
    assert torch.equal(bits(runtime(inputs.x[:3], inputs.topk_ids[:3], inputs.topk_weights[:3])), want), "the buffers themselves"
    flat_ids = inputs.topk_ids.flatten()
    for bad in (
        (inputs.x[1:4], ids, router),
        (inputs.x[:6:2], ids, router),
        (inputs.x.flatten()[1 : 1 + 3 * SPEC.hidden_size].view(3, -1), ids, router),
        (x, inputs.topk_ids[2:5], router),
        (x, flat_ids[:12:4].view(3, 1).expand(3, 3), router),
        (x, ids, inputs.topk_weights[1:4]),
    ):
        with pytest.raises(InvalidInput, match=r"own buffers.*clone"):
            runtime(*bad)
    with pytest.raises(InvalidInput, match=r"out is a view.*own buffers"):
        runtime(x, ids, router, out=y[1:4])
    assert torch.equal(bits(runtime(x, ids, router, out=y[:3])), want), "out may be y itself"
    y[4:7] = x
    assert torch.equal(bits(runtime(y[4:7], ids, router)), want), "any rows of the last y may be the next x"
    assert torch.equal(bits(runtime(x, ids, router, out=inputs.x[:3])), want), "out may be the next static input"


def test_a_chunked_call_refuses_every_view_of_the_runtimes_buffers(weights: ExpertWeights) -> None:
    """Later chunks would read what earlier ones overwrote: the last y, the static inputs."""
    with MoERuntime(SPEC, weights, buckets=[1, 4], overflow="chunk", device="cpu") as chunked:
        x, ids, router = batch(11)
        out = torch.empty_like(x)
        want = bits(chunked(x, ids, router, out=out)).clone()
        y, inputs = chunked(*batch(4)), chunked.inputs(4)
        for bad in (
            (y[:1].expand(11, -1), ids, router),
            (inputs.x[:1].expand(11, -1), ids, router),
            (x, inputs.topk_ids[:1].expand(11, -1), router),
            (x, ids, inputs.topk_weights[:1].expand(11, -1)),
        ):
            with pytest.raises(InvalidInput, match="own buffers"):
                chunked(*bad, out=out)
        assert torch.equal(bits(chunked(x, ids, router, out=out)), want)


def test_a_close_that_comes_during_a_use_is_an_error_of_ours(runtime: MoERuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a call (a signal handler) it is refused; from another thread it waits for a report to finish."""
    data = batch(3)
    want = bits(runtime(*data)).clone()
    core, original = runtime._core, runtime._core._replay
    refused = []

    def interrupted(*arguments: object) -> Tensor:
        with pytest.raises(CallError, match="inside a call"):
            runtime.close()
        refused.append(True)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(core, "_replay", interrupted)
    assert torch.equal(bits(runtime(*data)), want)
    assert refused == [True]
    monkeypatch.undo()
    closer = threading.Thread(target=runtime.close)

    def read_while_closing() -> bool:
        closer.start()
        closer.join(0.2)
        assert closer.is_alive(), "close waits for the report"
        return False

    monkeypatch.setattr(core, "read_flag", read_while_closing)
    assert len(runtime.report().buckets) == 4
    closer.join()
    with pytest.raises(RuntimeClosed):
        runtime(*data)


def test_a_build_that_fails_while_it_allocates_keeps_no_arena(weights: ExpertWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref] = []
    arena = build_module.Arena

    def remembered(*arguments: object) -> object:
        made = arena(*arguments)  # type: ignore[arg-type]
        kept.append(weakref.ref(made))
        return made

    def fail(*_: object) -> None:
        raise MemoryError("pinned memory")

    monkeypatch.setattr(build_module, "Arena", remembered)
    monkeypatch.setattr(build_module, "StickyFlag", fail)
    try:
        MoERuntime(SPEC, weights, buckets=[4], device="cpu")
    except MemoryError:
        assert kept[0]() is None


def test_an_out_that_cannot_hold_the_rows_is_refused_before_anything_runs(runtime: MoERuntime) -> None:
    x, ids, router = batch(4)
    want = bits(runtime(x, ids, router)).clone()
    h = SPEC.hidden_size
    for out in (torch.empty(1, h).bfloat16().expand(4, h), torch.empty(h, 4).bfloat16().T, torch.empty(3 + h).bfloat16().as_strided((4, h), (1, 1))):
        with pytest.raises(InvalidInput, match="out has strides"):
            runtime(x, ids, router, out=out)
    with torch.inference_mode():
        made_inside = torch.zeros_like(x)
    with pytest.raises(InvalidInput, match="inference mode"):
        runtime(x, ids, router, out=made_inside)
    with torch.inference_mode():
        assert torch.equal(bits(runtime(x, ids, router, out=made_inside)), want)
    assert torch.equal(bits(runtime(x, ids, router)), want)


def test_a_dropped_runtime_is_freed_at_once(weights: ExpertWeights) -> None:
    """Without a garbage collection: nothing in it refers to itself in a circle."""
    made = MoERuntime(SPEC, weights, buckets=[1, 4], device="cpu")
    made(*batch(2))
    arena = weakref.ref(built_of(made).arena)
    gc.disable()
    try:
        layer = made.layers[0]
        del made
        layer(*batch(2))
        assert arena() is not None, "a layer that is kept keeps working"
        del layer
        assert arena() is None
    finally:
        gc.enable()


def test_a_failed_build_keeps_neither_arena_nor_copies_of_weights(weights: ExpertWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref] = []

    bind = build_module._bind

    def fail(built: Built, given: ExpertWeights) -> None:
        bind(built, given)
        kept.extend([weakref.ref(built.arena), weakref.ref(built.weights[0])])
        raise RuntimeError("in the middle")

    monkeypatch.setattr(build_module, "_bind", fail)
    copies = replace(weights)
    monkeypatch.setattr(ExpertWeights, "prepared", lambda self, arch: replace(copies))
    try:
        MoERuntime(SPEC, weights, buckets=[4], device="cpu")
    except RuntimeError:
        assert [reference() for reference in kept] == [None, None], "while the error is still handled"
    assert len(kept) == 2


def test_a_layer_that_is_added_runs_like_one_that_was_built_in(weights: ExpertWeights) -> None:
    """On the same arena, with its own weights, also after another was refused."""
    other = ExpertWeights.from_bf16(SPEC, *(-part for part in weights.dequantize()))
    given = batch(3)
    with MoERuntime(SPEC, layers=[weights, other], buckets=[4], path="psum") as whole, MoERuntime(SPEC, weights, buckets=[4], path="psum") as grown:
        bytes_before = grown.report().arena_bytes
        with pytest.raises(WeightsMismatch, match=r"hidden_size.*|format"):
            grown.add_layer(ExpertWeights.from_bf16(SPEC, *weights.dequantize(), fmt="bf16"))
        added = grown.add_layer(other)
        assert grown.layers[-1] is added
        assert grown.report().layers == 2
        assert grown.report().arena_bytes == bytes_before
        for layer in range(2):
            assert torch.equal(grown.layers[layer](*given), whole.layers[layer](*given))
        assert not torch.equal(grown.layers[0](*given).clone(), added(*given))


def test_a_layer_that_cannot_be_bound_is_not_added(weights: ExpertWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    with MoERuntime(SPEC, weights, buckets=[1, 4]) as rt:
        want = rt(*batch(3)).clone()
        calls = iter(range(10))

        def fail_at_the_second_bucket(name: str) -> object:
            if next(calls) == 1:
                raise RuntimeError("in the middle")
            return get_path(name)

        monkeypatch.setattr(build_module, "get_path", fail_at_the_second_bucket)
        with pytest.raises(RuntimeError, match="in the middle"):
            rt.add_layer(weights)
        assert len(rt.layers) == 1
        assert [len(bucket.bound) for bucket in built_of(rt).buckets.values()] == [1, 1]
        assert len(built_of(rt).watches) == len(built_of(rt).weights) == 1
        assert torch.equal(rt(*batch(3)), want)


def test_the_warning_repeats_even_if_graphmoe_was_imported_under_other_filters(runtime: MoERuntime) -> None:
    x, ids, router = batch(3)
    ids[1, 0] = ids[1, 1]
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        for _ in range(2):
            runtime(x, ids, router)
            runtime.clear_flag()
    assert [warning.category for warning in seen] == [BrokenPromise] * 2
    assert seen[0].filename == __file__


def test_cuda_python_that_is_absent_is_a_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingBackend, match="pip install cuda-python"):
        require_cuda_python()


def test_what_cannot_be_built_says_why(weights: ExpertWeights) -> None:
    def build(spec: MoESpec = SPEC, given: ExpertWeights | None = weights, **options: object) -> MoERuntime:
        return MoERuntime(spec, given, **({"buckets": [1, 8], "device": "cpu"} | options))  # type: ignore[arg-type]

    with pytest.raises(WeightsMismatch, match="hidden_size=256"):
        build(MoESpec(6, 3, 128, 128))
    with pytest.raises(WeightsMismatch, match="not both"):
        build(layers=[weights])
    with pytest.raises(WeightsMismatch, match="neither"):
        build(given=None)
    with pytest.raises(WeightsMismatch, match="no layer"):
        build(given=None, layers=[])
    with pytest.raises(WeightsMismatch, match="share a format"):
        build(given=None, layers=[weights, random_weights(SPEC, "bf16")])
    with pytest.raises(ArenaTooLarge, match="max_arena_bytes"):
        build(max_arena_bytes=1000)
    with pytest.raises(UnknownRecipe, match="known: masked, compact, psum"):
        build(path="nowhere")
    with pytest.raises(UnknownRecipe, match=r"block_e in \(64, 128\), not 96"):
        build(path=Recipe("compact", block_e=96))
    with pytest.raises(UnsupportedShape, match="intermediate_size=96"):
        random_weights(MoESpec(6, 3, 256, 96), "fp8_block")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInput, match="no CUDA device"):
            build(device="cuda")
    with pytest.raises(InvalidInput, match="meta"):
        build(device="meta")


def test_a_recipe_a_bucket(weights: ExpertWeights) -> None:
    recipes = {1: Recipe("compact", block_e=64), 4: Recipe("masked", row_tile=64)}
    with MoERuntime(SPEC, weights, buckets=[1, 4, 8, 16], path=recipes | {16: "direct"}, device="cpu") as mixed:
        compact, masked, auto, direct = (bucket.recipe for bucket in mixed.plan.buckets)
        assert [compact, masked] == list(recipes.values())
        assert (auto.path, dict(auto.options)["tile"], direct.path) == ("gathered", 16, "direct")
        for tokens, recipe in ((1, compact), (3, masked), (8, auto), (16, direct)):
            data = batch(tokens)
            assert_rows(mixed(*data), oracle(*data, weights, recipe), "fp8_block", recipe=recipe)


def test_close_is_final_and_harmless_twice(weights: ExpertWeights) -> None:
    made = MoERuntime(SPEC, weights, buckets=[1, 4], device="cpu")
    made(*batch(2))
    made.close()
    made.close()
    for use in (lambda: made(*batch(2)), lambda: made.replay(1), lambda: made.inputs(1), made.report, made.clear_flag):
        with pytest.raises(RuntimeClosed, match="closed"):
            use()


def test_the_flag_warns_once_and_can_be_cleared(runtime: MoERuntime) -> None:
    x, ids, router = batch(3)
    broken = ids.clone()
    broken[1, 0] = broken[1, 1]
    with pytest.warns(BrokenPromise, match="distinct_topk"):
        runtime(x, broken, router)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runtime(x, broken, router)
        runtime(x, ids, router)
    assert runtime.report().promise_broken, "the flag is sticky: a good call does not lower it"
    assert "promise broken: yes" in str(runtime.report())
    runtime.clear_flag()
    assert not runtime.report().promise_broken
    with pytest.warns(BrokenPromise):
        runtime(x, broken, router)


@pytest.mark.parametrize("path", PATHS)
def test_duplicates_are_summed_where_the_spec_allows_them(path: str) -> None:
    spec = MoESpec(4, 3, 128, 128, distinct_topk=False)
    fmt = "bf16" if FP8_OF[path] == "fp8_block" else FP8_OF[path]
    weights = random_weights(spec, fmt)
    x, router = random_inputs(spec, 5)
    ids = torch.tensor([[0, 0, 0], [1, 1, 2], [3, -1, 3], [2, 2, 2], [0, 1, 2]])
    with MoERuntime(spec, weights, buckets=[5], device="cpu", path=path) as made:
        assert_rows(made(x, ids, router), oracle(x, ids, router, weights, path), fmt, recipe=path)
        assert not made.report().promise_broken


def test_two_threads_on_one_runtime_are_serialised(runtime: MoERuntime, weights: ExpertWeights) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            data = batch(3 + seed, seed=seed)
            want = oracle(*data, weights)
            for _ in range(10):
                assert_rows(runtime(*data, out=torch.empty_like(data[0])), want, "fp8_block")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_gradients_and_inference_mode_do_not_matter(weights: ExpertWeights) -> None:
    data = batch(3)
    want = oracle(*data, weights)
    with torch.inference_mode(), MoERuntime(SPEC, weights, buckets=[4], device="cpu", path="psum") as made:
        assert_rows(made(*data), want, "fp8_block")
    with MoERuntime(SPEC, weights, buckets=[4], device="cpu", path="psum") as made:
        y = made(data[0].clone().requires_grad_(), *data[1:])
        assert not y.requires_grad
        with torch.inference_mode():
            assert_rows(made(*data), want, "fp8_block")
        assert_rows(made(*data), want, "fp8_block")


def test_guard_bands_stay_untouched(weights: ExpertWeights) -> None:
    with MoERuntime(SPEC, weights, buckets=[1, 8], device="cpu", path="compact", guard_bytes=64) as made:
        for tokens in (1, 8, 5):
            bucket = made.plan.bucket(tokens)
            poison(made, -1)
            built_of(made).arena.fill_guards(bucket)
            data = batch(tokens)
            assert_rows(made(*data), oracle(*data, weights), "fp8_block")
            assert built_of(made).arena.broken_guards(bucket) == []


def test_report_and_log_say_what_was_decided(weights: ExpertWeights, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody asked for a path, and no profile is of a CPU: 8 * 3 / 6 = 4 rows an expert in the second bucket."""
    with caplog.at_level(logging.DEBUG, logger="graphmoe"), MoERuntime(SPEC, weights, buckets=[1, 8, 128], device="cpu") as made:
        report = made.report()
    assert [bucket.tokens for bucket in report.buckets] == [1, 8, 128]
    assert [bucket.rows for bucket in report.buckets] == [bucket.rows for bucket in made.plan.buckets]
    assert [bucket.kernels for bucket in report.buckets] == [2, 4, 7]
    assert report.emulated
    assert report.fingerprint == made.plan.fingerprint
    text = " ".join(str(report).split())
    for recipe, rule in (("direct", "at most 4 tokens"), ("gathered", "4 rows an expert, at most 12"), ("psum block_e=64", "psum with block_e 64")):
        assert recipe in text
        assert f"auto: no profile, {rule}" in text
        assert recipe in caplog.text
    assert "graphs emulated" in text
    assert "built 1 layer(s) x 3 bucket(s)" in caplog.text


def test_deep_gemm_that_is_absent_is_a_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphmoe.gemm import deep_gemm

    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(MissingBackend, match=r"pip install 'graphmoe\[hopper\]'"):
        deep_gemm.DeepGemm("fp8_block", torch.device("cuda", 0))


def test_every_variant_of_stage_is_warmed_up(runtime: MoERuntime) -> None:
    """Aligned rows with int32 and int64 ids are what real calls have; none may compile in a decode loop."""
    seen = []

    class Recorder:
        def stage(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, **static: Tensor) -> None:
            seen.append((x.data_ptr() % 8 == 0 and x.stride(0) % 4 == 0, topk_ids.dtype))

    built = built_of(runtime)
    built.ops = Recorder()  # type: ignore[assignment]
    warm_stage(built)
    assert set(seen) == {(wide, dtype) for wide in (True, False) for dtype in (torch.int32, torch.int64)}
