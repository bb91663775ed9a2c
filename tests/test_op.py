"""A layer's call under torch.compile: one op, the bits of an eager call, nothing inside it traced."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from graphmoe import MoERuntime, MoESpec
from graphmoe.errors import BatchTooLarge, BrokenPromise, InvalidInput, RuntimeClosed
from graphmoe.samples import random_inputs, random_weights, routing

SPEC = MoESpec(8, 2, 128, 128)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def rt() -> Iterator[MoERuntime]:
    with MoERuntime(SPEC, layers=[random_weights(SPEC, "fp8_block", seed=seed) for seed in range(2)], buckets=[1, 4, 8]) as made:
        yield made


def batch(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    x, weights = random_inputs(SPEC, tokens, seed=seed)
    return x, routing("balanced", SPEC, tokens, seed=seed), weights


def two_layers(rt: MoERuntime, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """A residual stream through both layers, with work of the compiler's own around them."""
    for layer in rt.layers:
        x = x + layer(torch.nn.functional.rms_norm(x, (128,)), ids, weights)
    return x * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_loop_is_one_graph_with_the_eager_bits(backend: str, rt: MoERuntime) -> None:
    """In every bucket and beside its borders; the batch size may be symbolic."""
    compiled = torch.compile(two_layers, backend=backend, fullgraph=True)
    with torch.no_grad():
        for tokens in (1, 3, 4, 5, 8):
            inputs = batch(tokens, seed=tokens)
            got = compiled(rt, *inputs)
            assert torch.equal(got, two_layers(rt, *inputs)), tokens
            assert got.untyped_storage().data_ptr() != rt.inputs(8).x.untyped_storage().data_ptr(), "a view of the arena escaped"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_compiled_function_serves_more_layers_than_torch_recompiles_for(backend: str) -> None:
    weights = random_weights(SPEC, "bf16")
    x, ids, router = batch(4)
    with MoERuntime(SPEC, layers=[weights] * 12, buckets=[4]) as rt, torch.no_grad():
        compiled = torch.compile(lambda layer, x: layer(x, ids, router), backend=backend, fullgraph=True)
        inputs = [x + number for number in range(12)]
        got = [compiled(layer, one) for layer, one in zip(rt.layers, inputs, strict=True)]
        assert len({one.data_ptr() for one in got}) == 12
        for layer, one, mine in zip(rt.layers, inputs, got, strict=True):
            assert torch.equal(mine, layer(one, ids, router))


def test_rows_of_a_wider_tensor_and_an_out_that_is_x(rt: MoERuntime) -> None:
    x, ids, weights = batch(4)
    wide = torch.zeros(4, 256).bfloat16()
    wide[:, :128] = x
    want = rt.layers[0](x, ids, weights).clone()
    with torch.no_grad():
        got = torch.compile(lambda x: rt.layers[0](x, ids, weights), backend="aot_eager", fullgraph=True)(wide[:, :128])
        assert torch.equal(got, want)
        assert got.is_contiguous()
        own = x.clone()
        assert torch.equal(torch.compile(lambda x: rt.layers[0](x, ids, weights, out=x), backend="aot_eager", fullgraph=True)(own), want)
        assert torch.equal(own, want)


def test_inductor_keeps_both_calls_apart(rt: MoERuntime) -> None:
    """Both layers share their output buffer; a compiler that reused or reordered memory around the op would mix them."""

    def both(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return rt.layers[0](x, ids, weights), rt.layers[1](x, ids, weights)

    x, ids, weights = batch(4)
    want = [layer(x, ids, weights).clone() for layer in rt.layers]
    with torch.no_grad():
        got = torch.compile(both, fullgraph=True)(x, ids, weights)
    assert all(torch.equal(mine, one) for mine, one in zip(got, want, strict=True))


def test_the_graph_holds_the_op_and_nothing_of_its_inside(rt: MoERuntime) -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    x, ids, weights = batch(4)
    with torch.no_grad():
        torch.compile(lambda x: rt.layers[1](x, ids, weights), backend=backend, fullgraph=True)(x)
    assert [name for name in seen if "graphmoe" in name] == ["graphmoe.layer"]
    assert len(seen) <= 2


def test_out_is_written_and_returned(rt: MoERuntime) -> None:
    x, ids, weights = batch(4)
    out = torch.zeros_like(x)
    with torch.no_grad():
        compiled = torch.compile(lambda x, out: rt.layers[0](x, ids, weights, out=out) + 0, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x, out), out)
    assert torch.equal(out, rt.layers[0](x, ids, weights))


def test_a_runtime_of_one_layer_is_called_itself() -> None:
    with MoERuntime(SPEC, random_weights(SPEC, "bf16"), buckets=[4]) as rt, torch.no_grad():
        x, ids, weights = batch(3)
        want = rt(x, ids, weights).clone()
        assert torch.equal(torch.compile(rt, backend="aot_eager", fullgraph=True)(x, ids, weights), want)


def test_errors_and_warnings_are_those_of_a_call(rt: MoERuntime) -> None:
    compiled = torch.compile(lambda x, ids, weights: rt.layers[0](x, ids, weights), backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        with pytest.raises(BatchTooLarge, match="9 tokens"):
            compiled(*batch(9))
        x, ids, weights = batch(4)
        with pytest.raises(InvalidInput, match=r"weights.to\(torch.float32\)"):
            compiled(x, ids, weights.bfloat16())
        ids[1] = 3
        with pytest.warns(BrokenPromise):
            assert bool(compiled(x, ids, weights)[1].isnan().all())


def test_compiled_code_that_outlives_its_runtime_says_so() -> None:
    rt = MoERuntime(SPEC, random_weights(SPEC, "bf16"), buckets=[4])
    number = rt.layers[0]._core.number
    x, ids, weights = batch(4)
    rt.close()
    with pytest.raises(RuntimeClosed, match="closed"):
        torch.ops.graphmoe.layer(x, ids, weights, torch.empty_like(x), number, 0)
    del rt
    gc.collect()
    with pytest.raises(RuntimeClosed, match="is gone"):
        torch.ops.graphmoe.layer(x, ids, weights, torch.empty_like(x), number, 0)


def test_the_op_is_registered_as_torch_wants_it() -> None:
    with MoERuntime(SPEC, random_weights(SPEC, "bf16"), buckets=[4]) as rt:
        x, ids, weights = batch(4)
        arguments = (x, ids, weights, torch.empty_like(x), rt.layers[0]._core.number, 0)
        torch.library.opcheck(torch.ops.graphmoe.layer.default, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))
