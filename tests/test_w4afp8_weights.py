"""Expert weights of format w4afp8: made, saved, loaded by the names that checkpoints use, cut, and refused. Checkpoints are also written by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from graphmoe import ExpertWeights, MoERuntime, MoESpec, Recipe, convert, plan
from graphmoe.cli import app
from graphmoe.convert import convert_checkpoint
from graphmoe.errors import BadSetting, CheckpointError, UnknownRecipe, UnsupportedShape, WeightsError, WeightsMismatch
from graphmoe.formats.w4afp8 import dequantize_weight, pack, quantize_weight
from graphmoe.paths import get_path
from graphmoe.reference import moe_layer, row_errors
from tests.checks import POISONS, assert_rows, oracle, poison, random_inputs, random_weights, routings
from tests.test_ue8m0 import LiveBytes
from tests.test_weights import INDEX, assert_same, distinct_parts

SPEC = MoESpec(num_experts=4, top_k=2, hidden_size=384, intermediate_size=256)
PROJECTIONS = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))


def random_int4(spec: MoESpec = SPEC, *, group: int = 128, seed: int = 0, inputs: bool = True) -> ExpertWeights:
    """Every nibble, scales of both signs, an input scale for each expert and half."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for rows, columns in ((2 * spec.intermediate_size, spec.hidden_size), (spec.hidden_size, spec.intermediate_size)):
        parts.append(torch.randint(-128, 128, (spec.num_local_experts, rows, columns // 2), generator=generator, dtype=torch.int8))
        parts.append(torch.randn(spec.num_local_experts, rows, columns // group, generator=generator))
    scales = [torch.rand(shape, generator=generator) + 0.1 for shape in ((spec.num_local_experts, 2), (spec.num_local_experts,))]
    return ExpertWeights.from_int4(spec, *parts, **dict(zip(("w13_input_scale", "w2_input_scale"), scales if inputs else (None, None), strict=True)))


def key(expert: int, projection: str, suffix: str = "weight") -> str:
    return f"model.layers.0.mlp.experts.{expert}.{projection}.{suffix}"


def stored(
    folder: Path, spec: MoESpec = SPEC, *, group: int = 128, suffix: str = "weight", scale_dtype: torch.dtype = torch.float32, inputs: str = ""
) -> dict[str, Tensor]:
    """A checkpoint without graphmoe. Every group is one pair of values (even, odd), with a scale of its own; `inputs` says which name they have."""
    tensors = {}
    for e in range(spec.num_experts):
        for p, names in enumerate(PROJECTIONS):
            rows, columns = (spec.intermediate_size, spec.hidden_size) if p < 2 else (spec.hidden_size, spec.intermediate_size)
            even, odd = (e + p) % 16, (11 + 3 * e + p) % 16
            tensors[key(e, names[0], suffix)] = torch.full((rows, columns // 2), even | odd << 4, dtype=torch.uint8).view(torch.int8)
            scale = (torch.arange(columns // group) + 1) * 2.0 ** (torch.arange(rows) % 5)[:, None] * (-1) ** p
            tensors[key(e, names[0], "weight_scale_inv")] = scale.to(scale_dtype)
            if inputs:
                value = torch.tensor([0.25 * (1 + e + 10 * p)]).bfloat16()
                tensors[key(e, names["gate" not in inputs], "input_scale")] = value[0] if inputs.endswith("()") else value
    save_checkpoint(folder, tensors)
    return tensors


def save_checkpoint(folder: Path, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    save_file(tensors, folder / "model.safetensors")


def meant(tensors: dict[str, Tensor], spec: MoESpec, suffix: str = "weight") -> list[Tensor]:
    """float32 `w13`, `w2` of such a checkpoint, nibble by nibble."""
    values = {}
    for e in range(spec.num_experts):
        for projection, _ in PROJECTIONS:
            packed = tensors[key(e, projection, suffix)].int() & 0xFF
            nibbles = torch.stack([packed % 16, packed // 16], dim=-1).flatten(-2)
            scale = tensors[key(e, projection, "weight_scale_inv")].float()
            values[e, projection] = torch.where(nibbles > 7, nibbles - 16, nibbles) * scale.repeat_interleave(nibbles.shape[1] // scale.shape[1], 1)
    experts = range(spec.num_experts)
    w13 = torch.stack([torch.cat([values[e, "gate_proj"], values[e, "up_proj"]]) for e in experts])
    return [w13, torch.stack([values[e, "down_proj"] for e in experts])]


# made


def test_quantised_weights_stay_close_to_every_part_of_the_original() -> None:
    w13, w2 = distinct_parts(SPEC)
    weights = ExpertWeights.from_bf16(SPEC, w13, w2, fmt="w4afp8")
    assert weights.nbytes < 0.3 * (w13.nbytes + w2.nbytes)
    assert {name: tensor.dtype for name, tensor in weights.tensors().items()} == {
        "w13": torch.int8, "w2": torch.int8, "w13_scale_inv": torch.bfloat16, "w2_scale_inv": torch.bfloat16,
    }  # fmt: skip
    for mine, want in zip(weights.dequantize(), (w13, w2), strict=True):
        assert bool(((mine - want.float()).abs() <= want.float().abs() / 6.9).all())
    packed, scale = quantize_weight(w13[2])
    assert torch.equal(weights.w13[2], packed)
    assert torch.equal(weights.w13_scale_inv[2].float(), scale)


@pytest.mark.parametrize("group", [128, 64, 32])
def test_int4_tensors_are_used_in_place_and_mean_nibble_times_scale(group: int) -> None:
    made = random_int4(group=group)
    again = ExpertWeights.from_int4(SPEC, made.w13, made.w13_scale_inv, made.w2, made.w2_scale_inv)
    assert [again.tensors()[name].data_ptr() for name in ("w13", "w13_scale_inv", "w2", "w2_scale_inv")] == [
        made.tensors()[name].data_ptr() for name in ("w13", "w13_scale_inv", "w2", "w2_scale_inv")
    ]
    assert again.origins.keys() == {"w13", "w13_scale_inv", "w2", "w2_scale_inv"}
    w13, w2 = again.dequantize()
    for e, row, column in ((0, 0, 0), (1, 5, 300), (3, 511, 383)):
        nibble = (int(made.w13[e, row, column // 2]) >> 4 * (column % 2)) & 0xF
        assert w13[e, row, column] == (nibble - 16 if nibble > 7 else nibble) * made.w13_scale_inv[e, row, column // group].float()
    assert torch.equal(w2, dequantize_weight(made.w2, made.w2_scale_inv))


def test_input_scales_are_reduced_to_the_largest() -> None:
    made = random_int4()
    weights = ExpertWeights.from_int4(
        SPEC, made.w13, made.w13_scale_inv, made.w2, made.w2_scale_inv,
        w13_input_scale=torch.tensor([[0.5, 0.25], [3.0, 1.0]]), w2_input_scale=torch.tensor([0.5, 0.75]).bfloat16(),
    )  # fmt: skip
    assert (float(weights.w13_input_scale), float(weights.w2_input_scale)) == (3.0, 0.75)
    assert weights.w13_input_scale.dtype == torch.float32
    assert weights.w13_input_scale.shape == ()


def test_moving_moves_every_tensor() -> None:
    moved = random_int4().to("meta")
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}
    assert len(moved.tensors()) == 6


# saved and loaded


@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize("group", [128, 64, 32])
def test_a_layer_comes_back_bit_for_bit(group: int, inputs: bool, tmp_path: Path) -> None:
    weights = random_int4(group=group, inputs=inputs)
    path = weights.save(tmp_path, 3)
    assert_same(ExpertWeights.load(tmp_path, SPEC, 3), weights)
    tensors = load_file(path)
    names = {f"model.layers.3.mlp.experts.1.{projection}.{name}" for projection, _ in PROJECTIONS for name in ("weight", "weight_scale_inv")}
    names |= {f"model.layers.3.mlp.experts.1.{projection}.input_scale" for projection, _ in PROJECTIONS if inputs}
    assert {name for name in tensors if ".experts.1." in name} == names
    up = tensors["model.layers.3.mlp.experts.1.up_proj.weight"]
    assert (up.dtype, up.shape) == (torch.int8, (256, 192))
    assert torch.equal(up, weights.w13[1, 256:])
    scale = tensors["model.layers.3.mlp.experts.1.up_proj.weight_scale_inv"]
    assert (scale.dtype, scale.shape) == (torch.float32, (256, 384 // group))
    assert torch.equal(scale, weights.w13_scale_inv[1, 256:].float())


@pytest.mark.parametrize(
    ("suffix", "group", "scale_dtype", "inputs"),
    [
        ("weight", 128, torch.float32, ""),
        ("weight", 128, torch.bfloat16, "w1"),
        ("weight", 64, torch.float16, "gate"),
        ("weight_packed", 128, torch.float32, "gate ()"),
        ("weight_packed", 32, torch.bfloat16, ""),
    ],
)
def test_a_checkpoint_written_elsewhere_is_read_by_its_names(suffix: str, group: int, scale_dtype: torch.dtype, inputs: str, tmp_path: Path) -> None:
    tensors = stored(tmp_path, group=group, suffix=suffix, scale_dtype=scale_dtype, inputs=inputs)
    weights = ExpertWeights.load(tmp_path, SPEC)
    assert weights.fmt == "w4afp8"
    for mine, want in zip(weights.dequantize(), meant(tensors, SPEC, suffix), strict=True):
        assert torch.equal(mine, want)
    if inputs:
        assert (float(weights.w13_input_scale), float(weights.w2_input_scale)) == (0.25 * 14, 0.25 * 24)
    else:
        assert weights.w13_input_scale is weights.w2_input_scale is None


def test_fused_experts_are_read_too(tmp_path: Path) -> None:
    weights = random_int4(inputs=False)
    prefix = "model.layers.0.mlp.experts."
    fused = {"gate_up_proj": weights.w13, "down_proj": weights.w2}
    scales = {"gate_up_proj_scale_inv": weights.w13_scale_inv.float(), "down_proj_scale_inv": weights.w2_scale_inv.float()}
    save_checkpoint(tmp_path, {prefix + name: tensor for name, tensor in (fused | scales).items()})
    assert_same(ExpertWeights.load(tmp_path, SPEC), weights)


def test_ranks_read_their_own_experts_and_agree_on_the_input_scale(tmp_path: Path) -> None:
    """A token is rounded once and sent to experts of several ranks."""
    whole = random_int4()
    stored(tmp_path / "own", inputs="w1")
    whole.save(tmp_path / "same")
    for rank in range(2):
        part = SPEC.shard(ep=2, ep_rank=rank)
        mine = ExpertWeights.load(tmp_path / "same", part)
        assert torch.equal(mine.w13, whole.w13[2 * rank : 2 * rank + 2])
        assert torch.equal(mine.w2_scale_inv, whole.w2_scale_inv[2 * rank : 2 * rank + 2])
        mine.save(tmp_path / f"rank {rank}")
        assert_same(ExpertWeights.load(tmp_path / f"rank {rank}", part), mine)
        own = ExpertWeights.load(tmp_path / "own", part)
        assert (float(own.w13_input_scale), float(own.w2_input_scale)) == (0.25 * 14, 0.25 * 24)


@pytest.mark.parametrize("group", [128, 32])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_shards_hold_their_part_in_whole_groups_and_zeros(tp: int, group: int, tmp_path: Path) -> None:
    whole = random_int4(group=group)
    whole.save(tmp_path)
    own = SPEC.intermediate_size // tp
    gate_up, down = whole.dequantize()
    for rank in range(tp):
        cut = whole.shard(tp, rank)
        assert_same(ExpertWeights.load(tmp_path, SPEC, tp=tp, tp_rank=rank), cut)
        assert cut.spec.intermediate_size == 128
        base = rank * own // 128 * 128
        wanted = torch.zeros(4, 256, 384)
        mine, mine_down = cut.dequantize()
        for half in (0, 1):
            wanted[:, 128 * half + rank * own - base :][:, :own] = gate_up[:, 256 * half + rank * own :][:, :own]
        assert torch.equal(mine, wanted)
        wanted_down = torch.zeros(4, 384, 128)
        wanted_down[:, :, rank * own - base :][:, :, :own] = down[:, :, rank * own :][:, :, :own]
        assert torch.equal(mine_down, wanted_down)
    with pytest.raises(WeightsMismatch, match="a shard of tp="):
        cut.save(tmp_path / "shard")


def test_a_shard_that_would_cut_a_byte_is_refused(tmp_path: Path) -> None:
    spec = MoESpec(1, 1, 128, 128)
    weights = random_int4(spec)
    weights.save(tmp_path)
    for make in (lambda: weights.shard(128, 3), lambda: ExpertWeights.load(tmp_path, spec, tp=128, tp_rank=3)):
        with pytest.raises(WeightsMismatch, match="columns 3 to 3, but 2 columns are stored in one byte"):
            make()
    assert weights.shard(64, 1).dequantize()[1][0, 0, 2:4].tolist() == weights.dequantize()[1][0, 0, 2:4].tolist()


def test_loading_takes_the_result_and_one_projection_with_its_shard(tmp_path: Path) -> None:
    weights = random_int4()
    weights.save(tmp_path)
    one = weights.w2[0].nbytes + weights.w2_scale_inv[0].nbytes * 2  # its packed bytes, and its scales in float32
    with LiveBytes([]) as live:
        ExpertWeights.load(tmp_path, SPEC)
    assert live.peak - weights.nbytes - 2 * one < 4096


# refused


def broken(tensors: dict[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    """Tensors by a short name, `up_proj_weight` of expert 1; None removes one."""
    made = dict(tensors)
    for short, tensor in changes.items():
        projection, suffix = short.split("_proj_")
        name = key(1, f"{projection}_proj", suffix)
        made.pop(name, None)
        if tensor is not None:
            made[name] = tensor
    return made


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"up_proj_weight": torch.zeros(256, 192)}, "experts.1.up_proj.weight is F32, not I8"),
        ({"up_proj_weight": torch.zeros(256, 384, dtype=torch.int8)}, r"up_proj.weight is \(256, 384\), not \(256, 192\)"),
        ({"up_proj_weight_scale_inv": torch.ones(256, 6)}, r"up_proj.weight_scale_inv is \(256, 6\), not \(256, 3\) \(one for 32, 64, 128 columns"),
        ({"up_proj_weight_scale_inv": torch.ones(2, 3)}, r"up_proj.weight_scale_inv is \(2, 3\), not \(256, 3\)"),
        ({"up_proj_weight_scale_inv": torch.ones(256, 3).to(torch.float8_e8m0fnu)}, "is F8_E8M0, not F32 or BF16 or F16"),
        ({"up_proj_weight_scale_inv": torch.full((256, 3), torch.nan)}, "scale_inv holds a scale that is NaN, infinite or beyond bfloat16"),
        ({"up_proj_weight_scale_inv": torch.full((256, 3), -3.4e38)}, "scale_inv holds a scale that is NaN, infinite or beyond bfloat16"),
        ({"up_proj_weight_scale_inv": None}, "up_proj.weight_scale_inv missing"),
        ({"down_proj_weight": None}, "down_proj.weight missing"),
        ({"down_proj_input_scale": None}, "down_proj.input_scale missing"),
        ({"down_proj_input_scale": torch.ones(2)}, r"down_proj.input_scale is F32 \(2,\), not F32 or BF16 or F16 \(1,\)"),
        ({"down_proj_input_scale": torch.ones(1).int()}, "down_proj.input_scale is I32"),
        ({"down_proj_input_scale": torch.tensor([0.0])}, "down_proj.input_scale is 0.0, not finite and positive"),
        ({"down_proj_input_scale": torch.tensor([torch.nan])}, "down_proj.input_scale is nan, not finite and positive"),
        ({"down_proj_weight_packed": torch.ones(384, 128, dtype=torch.int8)}, "weight_packed.* missing.*experts.0.down_proj.weight.* not part of"),
        ({"gate_proj_bias": torch.ones(3)}, "gate_proj.bias not part of such a layer"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_named(changes: dict[str, Tensor | None], part: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, broken(stored(tmp_path, inputs="gate"), **changes))
    with pytest.raises(CheckpointError, match=part):
        ExpertWeights.load(tmp_path, SPEC)


def test_groups_that_the_format_has_not_are_refused_with_those_it_has(tmp_path: Path) -> None:
    stored(tmp_path, group=16)
    with pytest.raises(CheckpointError, match=r"is \(256, 24\), not \(256, 3\) \(one for 32, 64, 128 columns\)"):
        ExpertWeights.load(tmp_path, SPEC)
    made = random_int4()
    with pytest.raises(UnsupportedShape, match="24 scales for 384 columns make no group size"):
        ExpertWeights.from_int4(SPEC, made.w13, torch.ones(4, 512, 24), made.w2, made.w2_scale_inv)
    with pytest.raises(WeightsMismatch, match=r"w2_scale_inv is \(4, 384, 4\), the spec needs \(4, 384, 2\)"):
        ExpertWeights.from_int4(SPEC, made.w13, made.w13_scale_inv, made.w2, torch.ones(4, 384, 4))


def test_int32_packings_are_refused_by_their_dtype(tmp_path: Path) -> None:
    tensors = stored(tmp_path, suffix="weight_packed")
    save_checkpoint(tmp_path, {name: tensor.view(torch.int32) if "packed" in name else tensor for name, tensor in tensors.items()})
    with pytest.raises(CheckpointError, match=r"gate_proj.weight_packed is \(256, 48\), not \(256, 192\)"):
        ExpertWeights.load(tmp_path, SPEC)


def test_input_scales_beside_other_formats_are_not_theirs(tmp_path: Path) -> None:
    w13, w2 = distinct_parts(SPEC)
    path = ExpertWeights.from_bf16(SPEC, w13, w2).save(tmp_path)
    (tmp_path / INDEX).unlink()
    save_file({**load_file(path), key(0, "gate_proj", "input_scale"): torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"gate_proj\.input_scale not part of such a layer"):
        ExpertWeights.load(tmp_path, SPEC)


def test_tensors_that_do_not_fit_are_refused() -> None:
    made = random_int4()
    parts = (made.w13, made.w13_scale_inv, made.w2, made.w2_scale_inv)
    with pytest.raises(WeightsMismatch, match=r"w13 is \(4, 512, 384\), the spec needs \(4, 512, 192\)"):
        ExpertWeights.from_int4(SPEC, made.w13.repeat(1, 1, 2), *parts[1:])
    with pytest.raises(WeightsMismatch, match=r"w2 is torch\.uint8, expected torch\.int8"):
        ExpertWeights.from_int4(SPEC, *parts[:2], made.w2.view(torch.uint8), made.w2_scale_inv)
    with pytest.raises(WeightsMismatch, match=r"w2_scale_inv is torch\.int64, expected a floating dtype"):
        ExpertWeights.from_int4(SPEC, *parts[:3], made.w2_scale_inv.long())
    for bad in (torch.nan, -torch.inf, 3.4e38):
        with pytest.raises(WeightsMismatch, match="w2_scale_inv holds a scale that is NaN or infinite"):
            ExpertWeights.from_int4(SPEC, *parts[:3], torch.full((4, 384, 2), bad))
    with pytest.raises(WeightsMismatch, match="give both, or none"):
        ExpertWeights.from_int4(SPEC, *parts, w2_input_scale=torch.ones(4))
    with pytest.raises(WeightsError, match="must be finite and positive"):
        ExpertWeights.from_int4(SPEC, *parts, w13_input_scale=torch.ones(4), w2_input_scale=torch.zeros(4))
    with pytest.raises(WeightsMismatch, match="w13_input_scale is -1"):
        replace(made, w13_input_scale=torch.tensor(-1.0))
    with pytest.raises(WeightsMismatch, match=r"w13_input_scale is \(1,\), the spec needs \(\)"):
        replace(made, w13_input_scale=torch.ones(1))
    plain = ExpertWeights.from_bf16(SPEC, *distinct_parts(SPEC))
    with pytest.raises(WeightsMismatch, match="activations of format 'fp8_block' have scales of their own"):
        replace(plain, w13_input_scale=torch.ones(()), w2_input_scale=torch.ones(()))
    with pytest.raises(UnsupportedShape, match="hidden_size=192 is not a multiple of 128, which format 'w4afp8' needs"):
        ExpertWeights.from_bf16(MoESpec(1, 1, 192, 128), torch.ones(1, 256, 192), torch.ones(1, 192, 128), fmt="w4afp8")


def test_no_way_leads_from_one_quantisation_to_the_other_but_through_floats() -> None:
    int4, fp8 = random_int4(), ExpertWeights.from_bf16(SPEC, *distinct_parts(SPEC))
    with pytest.raises(WeightsMismatch, match=r"'w4afp8' cannot be requantised to 'ue8m0'.*from_bf16\(spec, \*weights.dequantize\(\), fmt='ue8m0'"):
        int4.requantize("ue8m0")
    with pytest.raises(WeightsMismatch, match="'fp8_block' cannot be requantised to 'w4afp8'"):
        fp8.requantize("w4afp8")
    assert int4.requantize("w4afp8") is int4
    with pytest.raises(WeightsMismatch, match="'w4afp8' is not a block FP8 format"):
        ExpertWeights.from_fp8(SPEC, *(fp8.tensors()[name] for name in ("w13", "w13_scale_inv", "w2", "w2_scale_inv")), fmt="w4afp8")
    assert ExpertWeights.from_bf16(SPEC, *fp8.dequantize(), fmt="w4afp8").fmt == "w4afp8"


def test_a_runtime_runs_them_on_a_copy_that_it_refreshes() -> None:
    weights = random_int4()
    spec = weights.spec
    x, ids, router = torch.randn(2, spec.hidden_size).bfloat16(), torch.tensor([[0, 1]] * 2)[:, : spec.top_k], torch.full((2, spec.top_k), 0.5)
    with MoERuntime(spec, weights, buckets=[2], device="cpu") as runtime:
        assert runtime.plan.buckets[0].recipe.path == "gathered_w4"
        before = runtime(x, ids, router).clone()
        assert runtime._core.open().weights[0].w13.dtype == torch.uint8
        assert weights.w2_scale_inv is not None
        weights.w2_scale_inv.mul_(2.0)
        with pytest.raises(WeightsMismatch, match="refresh"):
            runtime(x, ids, router)
        runtime.refresh(0)
        assert torch.equal(runtime(x, ids, router), before * 2)
        with pytest.raises(WeightsMismatch, match="packed for kernels"):
            runtime._core.open().weights[0].dequantize()


@pytest.mark.parametrize("up_rows", [64, 128])
@pytest.mark.parametrize("per_tensor", [0, 1])
def test_activations_have_scales_of_their_own_or_the_ones_of_the_checkpoint(per_tensor: int, up_rows: int) -> None:
    """Against the oracle that rounds likewise, on changing routings over poisoned scratch; and how far each is from one that rounds nothing."""
    plain = random_weights(SPEC, "w4afp8")
    hidden = 30.0  # more than SwiGLU of unit gain reaches
    weights = replace(plain, w13_input_scale=torch.tensor(5.0 / 448), w2_input_scale=torch.tensor(hidden / 448))
    recipe, worst, far = Recipe("gathered_w4", per_tensor=per_tensor, up_rows=up_rows), 0.0, 0.0
    with MoERuntime(SPEC, weights, buckets=[1, 9], path=recipe, device="cpu") as runtime:
        for name, ids in routings(SPEC, 9, seed=1):
            x, router = random_inputs(SPEC, 9, seed=2)
            poison(runtime, POISONS[len(name) % 3])
            y = runtime(x, ids, router)
            worst = max(worst, assert_rows(y, oracle(x, ids, router, weights, recipe), "w4afp8", name, recipe=recipe))
            far = max(far, float(row_errors(y, moe_layer(x, ids, router, weights, rounding=None)).max()))
        assert runtime.report().buckets[0].kernels == 4 + per_tensor
    assert worst < 0.01
    assert 0.01 < far < 0.12
    with pytest.raises(UnsupportedShape, match="these have none"):
        MoERuntime(SPEC, plain, buckets=[1], path=Recipe("gathered_w4", per_tensor=1), device="cpu")


def test_a_checkpoint_scale_that_is_too_small_saturates_and_shows() -> None:
    """The layer is what the checkpoint says, not what would be better."""
    weights = replace(random_weights(SPEC, "w4afp8"), w13_input_scale=torch.tensor(1.0 / 448), w2_input_scale=torch.tensor(3.0 / 448))
    x, router = random_inputs(SPEC, 4)
    ids = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]])
    recipe = Recipe("gathered_w4", per_tensor=1)
    with MoERuntime(SPEC, weights, buckets=[4], path=recipe, device="cpu") as runtime:
        y = runtime(x, ids, router)
    assert_rows(y, oracle(x, ids, router, weights, recipe), "w4afp8", recipe=recipe)
    assert float(row_errors(y, moe_layer(x, ids, router, weights, rounding=None)).min()) > 0.1


@pytest.mark.parametrize("path", ["psum", "masked", "gathered", "direct"])
def test_other_paths_name_the_one_that_runs_them(path: str) -> None:
    weights = random_int4()
    with pytest.raises(UnsupportedShape, match="take 'gathered_w4'"):
        MoERuntime(weights.spec, weights, buckets=[1], device="cpu", path=path)
    with pytest.raises(UnsupportedShape, match="take 'masked', 'compact', 'psum', 'gathered', 'direct'"):
        plan(weights.spec, [1], fmt="fp8_block", arch="sm90", recipes="gathered_w4")


def test_what_fills_the_registers_is_refused_or_gets_more_warps() -> None:
    options = get_path("gathered_w4").options(Recipe("gathered_w4", tile=64))
    assert (options["up_warps"], options["down_warps"]) == (8, 8)
    for wrong in ({"up_warps": 4}, {"down_warps": 4}):
        with pytest.raises(UnknownRecipe, match="than 4 warps can hold"):
            get_path("gathered_w4").options(Recipe("gathered_w4", tile=64, **wrong))
    assert get_path("gathered_w4").options(Recipe("gathered_w4", tile=64, up_warps=4, up_rows=64))["up_warps"] == 4


def test_pack_is_what_the_checkpoint_holds(tmp_path: Path) -> None:
    """Gate is 1, 2, 1, 2...: written by hand, packed by graphmoe, and read back as such."""
    tensors = stored(tmp_path)
    tensors[key(0, "gate_proj")] = pack(torch.tensor([1, 2], dtype=torch.int8).repeat(256, 192))
    tensors[key(0, "gate_proj", "weight_scale_inv")] = torch.ones(256, 3)
    save_checkpoint(tmp_path, tensors)
    assert bool((tensors[key(0, "gate_proj")] == 0x21).all())
    assert ExpertWeights.load(tmp_path, SPEC).dequantize()[0][0, 0, :4].tolist() == [1, 2, 1, 2]


# converted


def files_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("clip_search", [False, True])
@pytest.mark.parametrize("source", ["bf16", "fp8_block", "ue8m0"])
def test_a_converted_layer_is_what_its_values_quantise_to(source: str, clip_search: bool, tmp_path: Path) -> None:
    original = random_weights(SPEC, source)
    original.save(tmp_path / "a")
    [file] = convert_checkpoint(tmp_path / "a", tmp_path / "b", "w4afp8", clip_search=clip_search)
    converted = ExpertWeights.load(tmp_path / "b", SPEC)
    for name, values in zip(("w13", "w2"), original.dequantize(), strict=True):
        packed, scale = quantize_weight(values, clip_search=clip_search)
        assert torch.equal(converted.tensors()[name], packed)
        assert torch.equal(converted.tensors()[f"{name}_scale_inv"].float(), scale)
    if not clip_search:
        assert_same(converted, ExpertWeights.from_bf16(SPEC, *original.dequantize(), fmt="w4afp8"))
    errors = {error.key: error.relative_error for error in file.errors}
    gate, mine = original.dequantize()[0][1, :256], converted.dequantize()[0][1, :256]
    assert errors[key(1, "gate_proj")] == pytest.approx(float((mine - gate).norm() / gate.norm()), rel=1e-4)
    assert len(errors) == 12


def test_the_clipping_search_makes_every_tensors_error_smaller(tmp_path: Path) -> None:
    random_weights(SPEC, "bf16").save(tmp_path / "a")
    plain, searched = (convert_checkpoint(tmp_path / "a", tmp_path / str(clip), "w4afp8", clip_search=clip)[0].errors for clip in (False, True))
    for before, after in zip(plain, searched, strict=True):
        assert 0.7 * before.relative_error < after.relative_error < 0.97 * before.relative_error


def test_a_run_with_the_search_does_not_keep_what_one_without_it_made(tmp_path: Path) -> None:
    random_weights(SPEC, "bf16").save(tmp_path / "a")
    found = [convert_checkpoint(tmp_path / "a", tmp_path / "b", "w4afp8", clip_search=clip)[0].found for clip in (False, False, True, True, False)]
    assert found == [False, True, False, True, False]


def test_other_weights_of_block_fp8_stay_as_they_are(tmp_path: Path) -> None:
    """Whatever the dtype of their scales; only experts are in the report."""
    random_weights(SPEC, "fp8_block").save(tmp_path / "a")
    attention = {"model.layers.0.self_attn.o_proj.weight": torch.randn(200, 130).to(torch.float8_e4m3fn), "model.norm.weight": torch.ones(9)}
    attention["model.layers.0.self_attn.o_proj.weight_scale_inv"] = torch.rand(2, 2)
    save_file(attention, tmp_path / "a" / "other.safetensors")
    (tmp_path / "a" / INDEX).unlink()
    (tmp_path / "a" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}))
    files = convert_checkpoint(tmp_path / "a", tmp_path / "b", "w4afp8")
    assert [(file.name, len(file.errors)) for file in files] == [("model-layer-00000.safetensors", 12), ("other.safetensors", 0)]
    made = files_of(tmp_path / "b")
    for name, tensor in attention.items():
        assert made[name].dtype == tensor.dtype
        assert torch.equal(made[name].view(torch.uint8), tensor.view(torch.uint8))
    stated = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert (stated["quant_method"], stated["group_size"], stated["weight_block_size"]) == ("w4afp8", 128, [128, 128])
    again = convert_checkpoint(tmp_path / "a", tmp_path / "b", "w4afp8")
    assert [file.found for file in again] == [True, True]
    assert [file.errors for file in again] == [file.errors for file in files]


@pytest.mark.parametrize("source", ["bf16", "fp8_block"])
def test_fused_experts_convert_and_load(source: str, tmp_path: Path) -> None:
    weights, prefix = random_weights(SPEC, source), "model.layers.0.mlp.experts."
    tensors = {f"{prefix}gate_up_proj": weights.w13, f"{prefix}down_proj": weights.w2}
    if source == "fp8_block":
        tensors |= {f"{prefix}gate_up_proj_scale_inv": weights.w13_scale_inv, f"{prefix}down_proj_scale_inv": weights.w2_scale_inv}
    save_checkpoint(tmp_path / "a", tensors)
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "w4afp8")
    assert_same(ExpertWeights.load(tmp_path / "b", SPEC), ExpertWeights.from_bf16(SPEC, *weights.dequantize(), fmt="w4afp8"))


@pytest.mark.parametrize("target", ["w4afp8", "bf16"])
def test_int4_experts_are_refused_as_a_source(target: str, tmp_path: Path) -> None:
    random_int4().save(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"down_proj\.weight is I8 with a scale, not F8_E4M3.*nothing written"):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", target)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_experts_that_are_not_finite_are_not_converted(bad: float, tmp_path: Path) -> None:
    weights = random_weights(SPEC, "bf16")
    weights.w2[1, 5, 7] = bad
    weights.save(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"NaN or infinity in model\.layers\.0\.mlp\.experts\.1\.down_proj\.weight"):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", "w4afp8")


def test_the_command_prints_errors_per_layer(tmp_path: Path) -> None:
    random_weights(SPEC, "bf16").save(tmp_path / "a")
    arguments = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--format"]
    result = CliRunner().invoke(app, [*arguments, "w4afp8", "--clip-search"])
    assert result.exit_code == 0, result.output
    assert "Weights now w4afp8: relative error per tensor" in result.output
    [row] = [line.split() for line in result.output.splitlines() if line.startswith("│")]
    assert row[1:4:2] == ["0", "12"]
    assert 0.08 < float(row[5]) < 0.11
    with pytest.raises(BadSetting, match="clip_search belongs to 'w4afp8', not to 'bf16'"):
        CliRunner().invoke(app, [*arguments, "bf16", "--clip-search"], catch_exceptions=False, standalone_mode=False)


@pytest.mark.parametrize("clip_search", [False, True])
def test_converting_takes_the_memory_of_a_piece(clip_search: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "PIECE", 1)
    peaks = []
    for experts in (1, 6):
        source = random_weights(MoESpec(experts, 1, 384, 256), "fp8_block").save(tmp_path / f"source {experts}")
        with LiveBytes([]) as live:
            convert_checkpoint(source.parent, tmp_path / f"target {experts}", "w4afp8", clip_search=clip_search)
        assert live.peak < convert.peak_bytes(384) // 2 + source.stat().st_size
        peaks.append(live.peak)
    assert peaks[1] - peaks[0] < 4096
