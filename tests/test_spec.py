"""A spec holds a layer's numbers and nothing impossible; its shards cover the layer; its local ids are right for every rank."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphmoe import MoESpec, model_names, named_spec
from graphmoe.errors import SpecError, UnsupportedSpec
from tests import strategies

LAYER = MoESpec(num_experts=8, top_k=2, hidden_size=256, intermediate_size=384)
INT_FIELDS = ("num_experts", "top_k", "hidden_size", "intermediate_size", "num_local_experts", "expert_offset")
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)

# E, K, H, I, routed scaling
MODELS = {
    "qwen3-30b-a3b": (128, 8, 2048, 768, 1.0),
    "qwen3-235b-a22b": (128, 8, 4096, 1536, 1.0),
    "deepseek-v3": (256, 8, 7168, 2048, 2.5),
    "kimi-k2": (384, 8, 7168, 2048, 2.827),
    "mixtral-8x7b": (8, 2, 4096, 14336, 1.0),
    "minimax-m2": (256, 8, 3072, 1536, 1.0),
    "glm-4.5-air": (128, 8, 4096, 1408, 1.0),
}


@pytest.mark.parametrize("model", MODELS)
def test_named_models_have_their_published_numbers(model: str) -> None:
    spec = named_spec(model)
    assert (spec.num_experts, spec.top_k, spec.hidden_size, spec.intermediate_size, spec.routed_scaling_factor) == MODELS[model]
    assert (spec.num_local_experts, spec.expert_offset) == (spec.num_experts, 0)
    assert spec.gated
    assert spec.distinct_topk
    assert spec.activation == "silu"


def test_the_named_models_are_those_and_no_more() -> None:
    assert set(model_names()) == set(MODELS)
    with pytest.raises(SpecError, match=r"'gpt-5'.*qwen3-30b-a3b"):
        named_spec("gpt-5")


def test_specs_are_frozen_equal_and_hashable() -> None:
    same = MoESpec(8, 2, 256, 384, num_local_experts=8)
    assert same == LAYER
    assert hash(same) == hash(LAYER)
    with pytest.raises(FrozenInstanceError):
        same.top_k = 3


@pytest.mark.parametrize("name", [field.name for field in fields(MoESpec) if field.name not in ("activation", "gated")])
def test_specs_differ_in_every_field(name: str) -> None:
    base = MoESpec(8, 2, 256, 384, num_local_experts=4, expert_offset=2)
    value = getattr(base, name)
    other = replace(base, **{name: not value if isinstance(value, bool) else value + 1})
    assert other != base
    assert len({base, other}) == 2


@given(spec=strategies.specs(), tokens=st.integers(0, 1 << 40))
def test_assignments_are_those_of_the_bounds(spec: MoESpec, tokens: int) -> None:
    per_token = min(spec.top_k, spec.num_local_experts) if spec.distinct_topk else spec.top_k
    assert spec.max_experts_per_token == per_token
    assert spec.assignments(tokens) == tokens * per_token


@given(tp=st.integers(1, 16), ep=st.integers(1, 16), experts=st.integers(1, 16), columns=st.integers(1, 8), distinct=st.booleans())
def test_shards_cover_every_expert_once_and_split_the_columns(tp: int, ep: int, experts: int, columns: int, distinct: bool) -> None:
    whole = MoESpec(ep * experts, 1, 256, tp * columns, routed_scaling_factor=2.5, distinct_topk=distinct)
    shards = [whole.shard(tp=tp, ep=ep, ep_rank=rank) for rank in range(ep)]
    owned = [expert for shard in shards for expert in range(shard.expert_offset, shard.expert_offset + shard.num_local_experts)]
    assert owned == list(range(whole.num_experts))
    for rank, shard in enumerate(shards):
        assert shard == replace(whole, intermediate_size=columns, num_local_experts=experts, expert_offset=rank * experts)


@given(outer=st.integers(1, 4), inner=st.integers(1, 4), experts=st.integers(1, 4), data=st.data())
def test_a_shard_of_a_shard_is_one_finer_shard(outer: int, inner: int, experts: int, data: st.DataObject) -> None:
    whole = MoESpec(outer * inner * experts, 1, 256, outer * inner)
    rank, sub_rank = data.draw(st.integers(0, outer - 1)), data.draw(st.integers(0, inner - 1))
    twice = whole.shard(tp=outer, ep=outer, ep_rank=rank).shard(tp=inner, ep=inner, ep_rank=sub_rank)
    assert twice == whole.shard(tp=outer * inner, ep=outer * inner, ep_rank=rank * inner + sub_rank)


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ({"tp": 5}, r"tp=5 does not divide intermediate_size=384"),
        ({"tp": 0}, r"tp=0\b"),
        ({"tp": -2}, r"tp=-2\b"),
        ({"ep": 3}, r"ep=3 does not divide num_local_experts=8"),
        ({"ep": 16}, r"ep=16 does not divide"),
        ({"ep": 0}, r"ep=0\b"),
        ({"ep": 4, "ep_rank": 4}, r"ep_rank=4\b"),
        ({"ep": 4, "ep_rank": -1}, r"ep_rank=-1\b"),
        ({"ep_rank": 1}, r"ep_rank=1\b"),
    ],
)
def test_shards_that_do_not_exist_are_refused_by_number(parts: dict[str, int], names: str) -> None:
    with pytest.raises(SpecError, match=names):
        LAYER.shard(**parts)


@given(size=st.integers(1, 64), parts=st.integers(1, 64), block=st.integers(1, 32))
def test_a_shard_of_whole_blocks_covers_what_its_rank_owns(size: int, parts: int, block: int) -> None:
    """The width is the largest cover of any rank, counted rank by rank, and a multiple of the block; with one column a block it is the plain part."""
    total = math.lcm(parts, block) * size
    width = MoESpec(8, 2, 256, total).shard(tp=parts, block=block).intermediate_size
    own = total // parts
    covers = [{column // block for column in (rank * own, (rank + 1) * own - 1)} for rank in range(parts)]
    assert width == block * max(max(blocks) - min(blocks) + 1 for blocks in covers)
    assert MoESpec(8, 2, 256, total).shard(tp=parts).intermediate_size == own


def test_a_shard_of_whole_blocks_is_that_of_the_weights() -> None:
    assert named_spec("qwen3-30b-a3b").shard(tp=4, block=128).intermediate_size == 256
    assert named_spec("glm-4.5-air").shard(tp=2, block=128).intermediate_size == 768
    assert named_spec("qwen3-30b-a3b").shard(tp=4, block=64).intermediate_size == 192
    with pytest.raises(SpecError, match=r"intermediate_size=384 is not a multiple of block=256"):
        LAYER.shard(tp=2, block=256)
    for block in (0, -128, 1.5, True):
        with pytest.raises(SpecError, match=f"block={block!r}"):
            LAYER.shard(tp=2, block=block)


def test_a_number_that_does_not_divide_names_those_that_do() -> None:
    for parts, total, proposed in (({"tp": 5}, 384, "1, 2, 3, 4, 6, 8, 12, 16, ..."), ({"ep": 3}, 8, "1, 2, 4, 8")):
        with pytest.raises(SpecError, match=re.escape(f"={total}; these do: {proposed}") + "$"):
            LAYER.shard(**parts)


@pytest.mark.parametrize(
    "ids", [[1, 2], (1,), 3, None, "1", np.float32([1.0]), torch.tensor([1.0]), np.uint8([1]), torch.tensor([True]), np.int8([1])], ids=repr
)
def test_ids_that_are_no_int_tensor_are_refused(ids: object) -> None:
    with pytest.raises(SpecError, match=r"topk_ids is .*pass .*int32 or int64"):
        LAYER.to_local(ids)


@pytest.mark.parametrize(
    "parts",
    [{"tp": 2.0}, {"tp": True}, {"tp": "2"}, {"ep": 2.0}, {"ep": None}, *({"ep": 2, "ep_rank": rank} for rank in (0.5, True, "1"))],
    ids=repr,
)
def test_shard_counts_that_are_not_ints_are_refused(parts: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        LAYER.shard(**parts)


NOT_INTS = st.one_of(st.booleans(), st.floats(), st.none(), st.text(max_size=3), st.just(2.0), st.just(0.0))


@given(name=st.sampled_from(INT_FIELDS), value=NOT_INTS)
def test_numbers_that_are_not_ints_are_refused(name: str, value: object) -> None:
    """`True` counts as 1 in Python, `False` and 0.0 as the 0 that means "all experts"."""
    with pytest.raises(SpecError):
        replace(MoESpec(8, 2, 256, 384, num_local_experts=8), **{name: value})


@pytest.mark.parametrize("value", [False, 0.0], ids=repr)
def test_only_the_int_zero_means_all_experts(value: object) -> None:
    """The edge of the test above, which it may not draw."""
    with pytest.raises(SpecError, match="num_local_experts"):
        MoESpec(8, 2, 256, 384, num_local_experts=value)


@given(name=st.sampled_from(INT_FIELDS), value=st.integers(max_value=-1))
def test_negative_numbers_are_refused_by_name_and_value(name: str, value: int) -> None:
    with pytest.raises(SpecError, match=f"{name}={value}"):
        replace(LAYER, **{name: value})


@given(name=st.sampled_from(INT_FIELDS), value=st.integers(min_value=(1 << 20) + 1))
def test_absurdly_large_numbers_are_refused_by_name_and_value(name: str, value: int) -> None:
    with pytest.raises(SpecError, match=f"{name}={value}"):
        replace(LAYER, **{name: value})


@pytest.mark.parametrize("name", ["num_experts", "top_k", "hidden_size", "intermediate_size"])
def test_zero_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name}=0"):
        replace(LAYER, **{name: 0})


def test_local_experts_must_lie_within_the_layer() -> None:
    for local, offset in ((9, 0), (4, 5), (1, 8)):
        with pytest.raises(SpecError, match=rf"\[{offset}, {offset + local}\).*num_experts=8"):
            MoESpec(8, 2, 256, 384, num_local_experts=local, expert_offset=offset)
    with pytest.raises(SpecError, match="num_local_experts=0"):
        MoESpec(8, 2, 256, 384, expert_offset=4)
    assert MoESpec(8, 2, 256, 384).num_local_experts == 8


def test_more_distinct_experts_than_there_are_is_refused_and_the_way_out_works() -> None:
    with pytest.raises(SpecError, match=r"top_k=9.*num_experts=8.*distinct_topk=False"):
        MoESpec(8, 9, 256, 384)
    assert MoESpec(8, 9, 256, 384, distinct_topk=False).max_experts_per_token == 9
    assert MoESpec(16, 9, 256, 384, num_local_experts=8).max_experts_per_token == 8


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf"), "2.5", None, 1j, True, 10**400, 1e39], ids=lambda value: repr(value)[:8]
)
def test_the_scaling_factor_must_be_a_finite_number(value: object) -> None:
    """1e39 is infinite in float32, in which the routed sum is scaled."""
    with pytest.raises(SpecError, match="routed_scaling_factor"):
        replace(LAYER, routed_scaling_factor=value)


@pytest.mark.parametrize("name", ["gated", "distinct_topk"])
@pytest.mark.parametrize("value", [1, None, "no"], ids=repr)
def test_promises_are_bools(name: str, value: object) -> None:
    """The string "no" is true in Python."""
    with pytest.raises(SpecError, match=name):
        replace(LAYER, **{name: value})


def test_layers_that_exist_but_are_not_supported_say_what_is() -> None:
    with pytest.raises(UnsupportedSpec, match=r"activation='gelu'.*'silu'"):
        replace(LAYER, activation="gelu")
    with pytest.raises(UnsupportedSpec, match=r"gated=False"):
        replace(LAYER, gated=False)


DTYPES = (np.int32, np.int64, torch.int32, torch.int64)


def _ids(values: list[int], shape: tuple[int, ...], dtype: object) -> np.ndarray | torch.Tensor:
    return torch.tensor(values, dtype=dtype).reshape(shape) if isinstance(dtype, torch.dtype) else np.array(values, dtype=dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(spec=strategies.specs(), data=st.data())
def test_local_ids_are_global_ids_less_the_offset_or_minus_one(dtype: object, spec: MoESpec, data: st.DataObject) -> None:
    """Sentinels of every kind, with offsets that overflow int32 when they are subtracted from one."""
    edges = [-1, INT_MIN, INT_MAX, spec.num_experts, spec.expert_offset - 1, spec.expert_offset + spec.num_local_experts]
    shape = data.draw(st.sampled_from([(12,), (4, 3), (2, 2, 3), (0, 3)]))
    count = int(np.prod(shape))
    values = data.draw(st.lists(st.one_of(st.integers(-2, spec.num_experts + 1), st.sampled_from(edges)), min_size=count, max_size=count))
    ids = _ids(values, shape, dtype)
    local = spec.to_local(ids)
    assert type(local) is type(ids)
    assert local.dtype == ids.dtype == dtype
    assert tuple(local.shape) == shape
    here = range(spec.expert_offset, spec.expert_offset + spec.num_local_experts)
    assert local.reshape(-1).tolist() == [value - spec.expert_offset if value in here else -1 for value in values]
    assert ids.reshape(-1).tolist() == values, "the caller's ids were changed"


@pytest.mark.parametrize("dtype", [np.int64, torch.int64], ids=str)
def test_64_bit_sentinels_are_not_local(dtype: object) -> None:
    spec = MoESpec(8, 2, 256, 384, num_local_experts=4, expert_offset=4)
    ids = _ids([2**63 - 1, -(2**63), 2**32 + 5, 5 - 2**32, 5], (5,), dtype)
    assert spec.to_local(ids).tolist() == [-1, -1, -1, -1, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_each_global_id_is_local_on_exactly_one_rank(ep: int, dtype: object) -> None:
    ids = _ids(list(range(8)), (8,), dtype)
    local = np.array([np.asarray(LAYER.shard(ep=ep, ep_rank=rank).to_local(ids)) for rank in range(ep)])
    assert ((local >= 0).sum(axis=0) == 1).all()
    assert local.max(axis=0).tolist() == [expert % (8 // ep) for expert in range(8)]
