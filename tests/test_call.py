"""A call's tensors: which memory `out` may share with `x`, and that inference mode at build and at call are independent of each other."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from graphmoe import MoERuntime, MoESpec
from graphmoe.call import refuse_shifted_overlap
from graphmoe.errors import InvalidInput
from tests.checks import assert_rows, oracle, random_inputs, random_weights


def rows_at(memory: Tensor, first: int, stride: int = 4) -> Tensor:
    """bf16 `[3, 4]` whose rows start every `stride` elements of `memory` from element `first` on."""
    return memory.as_strided((3, 4), (stride, 1), first)


@pytest.fixture
def memory() -> Tensor:
    return torch.zeros(128, dtype=torch.bfloat16)


def overlap(x: Tensor, out: Tensor) -> None:
    """The check of a chunked call whose ids and router weights lie elsewhere."""
    refuse_shifted_overlap(x, torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2), out)


def test_out_may_not_touch_ids_or_router_weights_of_later_chunks() -> None:
    memory = torch.zeros(64, dtype=torch.float32)
    router, x = memory[:6].view(3, 2), torch.zeros(3, 4, dtype=torch.bfloat16)
    ids, out = memory[6:12].view(torch.int32).view(3, 2), memory.view(torch.bfloat16)
    for first, name in ((0, "topk_weights"), (13, "topk_ids"), (23, "topk_ids")):
        with pytest.raises(InvalidInput, match=f"overlaps {name}"):
            refuse_shifted_overlap(x, ids, router, out[first : first + 12].view(3, 4))
    refuse_shifted_overlap(x, ids, router, out[24:36].view(3, 4))


@pytest.mark.parametrize("stride", [4, 7])
def test_out_may_start_where_x_ends_and_not_one_element_earlier(memory: Tensor, stride: int) -> None:
    extent = 2 * stride + 4
    x = rows_at(memory, 40, stride)
    for apart in (40 + extent, 40 - extent):
        overlap(x, rows_at(memory, apart, stride))
    for overlapping in (40 + extent - 1, 40 - extent + 1, 41, 39):
        with pytest.raises(InvalidInput, match="overlaps x"):
            overlap(x, rows_at(memory, overlapping, stride))


def test_out_may_be_x_in_the_same_strides_alone(memory: Tensor) -> None:
    x = rows_at(memory, 40)
    overlap(x, rows_at(memory, 40))
    for stride in (5, 8):
        with pytest.raises(InvalidInput, match="overlaps x"):
            overlap(x, rows_at(memory, 40, stride))
        with pytest.raises(InvalidInput, match="overlaps x"):
            overlap(rows_at(memory, 40, stride), x)


@pytest.mark.parametrize("called_inside", [False, True])
@pytest.mark.parametrize("built_inside", [False, True])
def test_inference_mode_at_build_and_at_call_are_independent(built_inside: bool, called_inside: bool) -> None:
    spec = MoESpec(4, 2, 128, 128)
    x, router = random_inputs(spec, 3)
    ids = torch.tensor([[0, 1], [2, 3], [3, -1]])
    with torch.inference_mode() if built_inside else nullcontext():
        weights = random_weights(spec, "fp8_block")
        made = MoERuntime(spec, weights, buckets=[4], device="cpu")
    want, out = oracle(x, ids, router, weights), torch.empty_like(x)
    with torch.inference_mode() if called_inside else nullcontext():
        results = [made(x, ids, router), made(x, ids, router, out=out), made.replay(4)]
        made.inputs(4).topk_ids.fill_(-1)
        assert not made.report().promise_broken
        made.clear_flag()
    for y in results:
        assert not y.is_inference()
        assert not y.requires_grad
    assert_rows(out, want, "fp8_block")
    assert_rows(made(x, ids, router), want, "fp8_block")
    results[0].add_(1)  # what a caller may do with a tensor of its own
    made.close()
