"""Expert weights: made from tensors, saved, loaded, and refused. Checkpoints are also written and read here without graphmoe, by name."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphmoe import ExpertWeights, MoESpec
from graphmoe.checkpoint import CheckpointReader, TensorFile, write_tensors
from graphmoe.errors import CheckpointError, InvalidInput, UnsupportedShape, WeightsError, WeightsMismatch
from tests.checks import random_weights

ROOT = Path(__file__).resolve().parents[1]
SPEC = MoESpec(num_experts=4, top_k=2, hidden_size=384, intermediate_size=128)
"""2I, H and I differ, and so do their numbers of 128-blocks: a transposed or swapped part does not fit."""
SMALL = MoESpec(num_experts=4, top_k=2, hidden_size=128, intermediate_size=128)
INDEX = "model.safetensors.index.json"
FORMATS = ("fp8_block", "bf16")
PROJECTIONS = ("gate", "up", "down")
by_format = pytest.mark.parametrize("fmt", FORMATS)


def key(layer: int, expert: int, projection: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"


def raw(tensor: Tensor) -> Tensor:
    return (tensor if tensor.dim() else tensor[None]).contiguous().view(torch.uint8)


def assert_same(mine: ExpertWeights, want: ExpertWeights) -> None:
    """Bit for bit, in every tensor."""
    assert mine.fmt == want.fmt
    assert mine.tensors().keys() == want.tensors().keys()
    for name, tensor in want.tensors().items():
        assert mine.tensors()[name].dtype == tensor.dtype
        assert torch.equal(raw(mine.tensors()[name]), raw(tensor)), name


def part_of(weights: ExpertWeights, spec: MoESpec) -> ExpertWeights:
    """The experts of `spec`, cut out of full weights by hand."""
    cut = slice(spec.expert_offset, spec.expert_offset + spec.num_local_experts)
    return ExpertWeights(spec, weights.fmt, **{name: tensor[cut] for name, tensor in weights.tensors().items()})


def distinct_parts(spec: MoESpec) -> tuple[Tensor, Tensor]:
    """bf16 `w13`, `w2` in which every (expert, projection) has a range of its own: a power of 4 apart, gate negative."""
    generator = torch.Generator().manual_seed(5)
    e, h, i = spec.num_local_experts, spec.hidden_size, spec.intermediate_size

    def draw(rows: int, columns: int, first: int) -> Tensor:
        size = 4.0 ** (3 * torch.arange(e) + first - 6)
        return ((torch.rand(e, rows, columns, generator=generator) + 1) * size[:, None, None]).bfloat16()

    return torch.cat([-draw(i, h, 0), draw(i, h, 1)], dim=1), draw(h, i, 2)


def write_by_hand(folder: Path, spec: MoESpec, *, quantised: bool, layer: int = 0, scale_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A checkpoint file without graphmoe: all elements of a projection are one number, its scale (if any) a power of two."""
    tensors: dict[str, Tensor] = {}
    for e in range(spec.num_experts):
        for p, (rows, columns) in enumerate([(spec.intermediate_size, spec.hidden_size)] * 2 + [(spec.hidden_size, spec.intermediate_size)]):
            name = key(layer, e, PROJECTIONS[p])
            tensors[name] = torch.full((rows, columns), float(4 + 3 * e + p)).to(torch.float8_e4m3fn if quantised else torch.bfloat16)
            if quantised:
                tensors[name + "_scale_inv"] = torch.full((rows // 128, columns // 128), 2.0 ** (p - 9)).to(scale_dtype)
    folder.mkdir(exist_ok=True, parents=True)
    save_file(tensors, folder / f"layer-{layer}.safetensors")
    return tensors


def saved(folder: Path, fmt: str = "fp8_block", spec: MoESpec = SPEC, layer: int = 0) -> tuple[Path, dict[str, Tensor]]:
    """A saved layer without its index, so that a test can rewrite the one file."""
    path = random_weights(spec, fmt).save(folder, layer)
    (folder / INDEX).unlink()
    return path, load_file(path)


def stored_bytes(folder: Path) -> dict[str, int]:
    """Bytes of every tensor that the index names, read from the file that it names."""
    sizes = {}
    for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items():
        with safe_open(folder / file, framework="pt") as handle:
            assert name in handle.keys(), f"the index says {file} holds {name}, which it does not"  # noqa: SIM118 - a handle is no dict
            sizes[name] = handle.get_tensor(name).nbytes
    return sizes


# made from tensors


def test_quantised_weights_stay_close_to_every_part_of_the_original():
    """Ranges a power of 4 apart: a scale of another expert, or of the other half of w13, would be off by 4 or more."""
    w13, w2 = distinct_parts(SPEC)
    weights = ExpertWeights.from_bf16(SPEC, w13, w2)
    assert weights.fmt == "fp8_block"
    for mine, want in zip(weights.dequantize(), (w13, w2), strict=True):
        assert mine.dtype == torch.float32
        assert bool(((mine - want.float()).abs() <= want.float().abs() / 15.9).all())


def test_float32_weights_are_taken_too():
    w13, w2 = (tensor.float() for tensor in distinct_parts(SPEC))
    assert_same(ExpertWeights.from_bf16(SPEC, w13, w2), ExpertWeights.from_bf16(SPEC, w13.bfloat16(), w2.bfloat16()))
    kept = ExpertWeights.from_bf16(SPEC, w13 + 1e-4, w2, fmt="bf16")
    assert kept.w13.dtype == torch.bfloat16
    assert torch.equal(kept.w13, (w13 + 1e-4).bfloat16())


def test_bf16_weights_are_used_in_place():
    w13, w2 = distinct_parts(SPEC)
    weights = ExpertWeights.from_bf16(SPEC, w13, w2, fmt="bf16")
    assert (weights.w13.data_ptr(), weights.w2.data_ptr()) == (w13.data_ptr(), w2.data_ptr())
    assert weights.w13_scale_inv is None
    assert weights.w2_scale_inv is None
    for mine, want in zip(weights.dequantize(), (w13, w2), strict=True):
        assert torch.equal(mine, want.float())


@by_format
def test_strided_tensors_give_the_same_weights(fmt):
    w13, w2 = distinct_parts(SPEC)
    strided = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (w13, w2)]
    assert not strided[0].is_contiguous()
    made = ExpertWeights.from_bf16(SPEC, *strided, fmt=fmt)
    assert_same(made, ExpertWeights.from_bf16(SPEC, w13, w2, fmt=fmt))
    assert all(tensor.is_contiguous() for tensor in made.tensors().values())


def test_fp8_tensors_are_used_in_place_and_mean_payload_times_scale():
    made = random_weights(SPEC, "fp8_block", seed=3)
    payload13, scale13, payload2, scale2 = made.w13, made.w13_scale_inv, made.w2, made.w2_scale_inv
    weights = ExpertWeights.from_fp8(SPEC, payload13, scale13, payload2, scale2)
    assert [tensor.data_ptr() for tensor in weights.tensors().values()] == [tensor.data_ptr() for tensor in made.tensors().values()]
    w13, w2 = weights.dequantize()
    for e, row, column in ((0, 0, 0), (1, 127, 383), (2, 128, 128), (3, 255, 127)):
        assert w13[e, row, column] == payload13[e, row, column].float() * scale13[e, row // 128, column // 128]
    for e, row, column in ((0, 0, 0), (1, 383, 127), (2, 128, 64), (3, 127, 5)):
        assert w2[e, row, column] == payload2[e, row, column].float() * scale2[e, row // 128, 0]


@by_format
def test_the_history_of_parameters_is_not_kept(fmt):
    made = random_weights(SPEC, fmt).tensors()
    parameters = {name: torch.nn.Parameter(tensor, requires_grad=tensor.dtype != torch.float8_e4m3fn) for name, tensor in made.items()}
    weights = ExpertWeights.from_bf16(SPEC, **parameters, fmt=fmt) if fmt == "bf16" else ExpertWeights.from_fp8(SPEC, **parameters)
    for name, tensor in weights.tensors().items():
        assert type(tensor) is Tensor, name
        assert not tensor.requires_grad, name
        assert tensor.data_ptr() == made[name].data_ptr(), name


def test_fp8_tensors_without_data_are_taken_by_their_shapes():
    weights = ExpertWeights.from_fp8(SPEC, **{name: tensor.to("meta") for name, tensor in random_weights(SPEC, "fp8_block").tensors().items()})
    assert weights.device.type == "meta"


def test_scales_of_another_float_dtype_become_float32():
    made = random_weights(SPEC, "fp8_block")
    scale13, scale2 = made.w13_scale_inv.bfloat16(), made.w2_scale_inv.half()
    weights = ExpertWeights.from_fp8(SPEC, made.w13, scale13, made.w2, scale2)
    assert weights.w13_scale_inv.dtype == weights.w2_scale_inv.dtype == torch.float32
    assert torch.equal(weights.w13_scale_inv, scale13.float())
    assert torch.equal(weights.w2_scale_inv, scale2.float())


@pytest.mark.parametrize("device", ["cuda", "mps", "nowhere", "cuda:99", None], ids=str)
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(device, tmp_path):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has that device")
    weights = random_weights(SMALL, "fp8_block")
    with pytest.raises(InvalidInput, match=f"device {device}|device '{device}'"):
        weights.to(device)
    with pytest.raises(InvalidInput, match=f"device {device}|device '{device}'"):
        ExpertWeights.load(tmp_path / "absent", SMALL, device=device)


@by_format
def test_moving_moves_every_tensor(fmt):
    weights = random_weights(SPEC, fmt)
    assert weights.to("cpu") is weights
    moved = weights.to("meta")
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}
    assert moved.device.type == "meta"
    assert moved.tensors().keys() == weights.tensors().keys()
    e, h, i = 4, 384, 128
    assert weights.nbytes == 3 * e * h * i * (2 if fmt == "bf16" else 1) + (0 if fmt == "bf16" else 3 * e * (h // 128) * (i // 128) * 4)


# save and load


@by_format
def test_a_layer_comes_back_bit_for_bit(fmt, tmp_path):
    weights = random_weights(SPEC, fmt, seed=7)
    path = weights.save(tmp_path, layer=3)
    assert path.parent == tmp_path
    loaded = ExpertWeights.load(tmp_path, SPEC, layer=3)
    assert_same(loaded, weights)
    assert loaded.spec == SPEC
    assert {file for file in os.listdir(tmp_path) if not file.startswith(".")} == {path.name, INDEX}


@by_format
def test_names_and_halves_are_those_of_hugging_face(fmt, tmp_path):
    """Read without graphmoe, so a swap of gate and up (or of experts) that `load` would undo is seen."""
    w13, w2 = distinct_parts(SPEC)
    path = ExpertWeights.from_bf16(SPEC, w13, w2, fmt=fmt).save(tmp_path, layer=2)
    tensors = load_file(path)
    scales = ("", "_scale_inv") if fmt == "fp8_block" else ("",)
    assert tensors.keys() == {key(2, e, projection) + suffix for e in range(4) for projection in PROJECTIONS for suffix in scales}
    for e in range(4):
        for projection, want in (("gate", w13[e, :128]), ("up", w13[e, 128:]), ("down", w2[e])):
            stored = tensors[key(2, e, projection)]
            assert stored.shape == want.shape
            assert stored.dtype == (torch.bfloat16 if fmt == "bf16" else torch.float8_e4m3fn)
            values = stored.float()
            if fmt == "fp8_block":
                scale = tensors[key(2, e, projection) + "_scale_inv"]
                assert scale.dtype == torch.float32
                assert scale.shape == (want.shape[0] // 128, want.shape[1] // 128)
                values = values * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            torch.testing.assert_close(values, want.float(), rtol=0.063, atol=0.0)


@pytest.mark.parametrize("quantised", [True, False])
def test_a_checkpoint_written_elsewhere_is_read_by_its_names(quantised, tmp_path):
    write_by_hand(tmp_path, SPEC, quantised=quantised)
    weights = ExpertWeights.load(tmp_path, SPEC)
    assert weights.fmt == ("fp8_block" if quantised else "bf16")
    w13, w2 = weights.dequantize()
    for e in range(4):
        for p, part in enumerate((w13[e, :128], w13[e, 128:], w2[e])):
            assert bool((part == (4 + 3 * e + p) * (2.0 ** (p - 9) if quantised else 1.0)).all()), f"expert {e}, {PROJECTIONS[p]}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu], ids=str)
def test_stored_scales_of_any_float_dtype_are_read_as_float32(dtype, tmp_path):
    write_by_hand(tmp_path, SPEC, quantised=True, scale_dtype=dtype)
    weights = ExpertWeights.load(tmp_path, SPEC)
    assert weights.w13_scale_inv.dtype == weights.w2_scale_inv.dtype == torch.float32
    assert weights.w13_scale_inv[2].tolist() == [[2.0**-9] * 3, [2.0**-8] * 3]
    assert weights.w2_scale_inv[2].tolist() == [[2.0**-7]] * 3


@by_format
def test_layers_share_a_directory(fmt, tmp_path):
    layers = {layer: random_weights(SPEC, fmt, seed=layer) for layer in (0, 1, 11)}
    for layer, weights in layers.items():
        weights.save(tmp_path, layer)
    assert sum(stored_bytes(tmp_path).values()) == sum(weights.nbytes for weights in layers.values())
    for indexed in (True, False):
        if not indexed:
            (tmp_path / INDEX).unlink()
        for layer, weights in layers.items():
            assert_same(ExpertWeights.load(tmp_path, SPEC, layer), weights)


@by_format
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_rank_reads_its_own_experts_of_a_full_checkpoint(fmt, ep, tmp_path):
    full = random_weights(SPEC, fmt, seed=1)
    full.save(tmp_path)
    for rank in range(ep):
        spec = SPEC.shard(ep=ep, ep_rank=rank)
        loaded = ExpertWeights.load(tmp_path, spec)
        assert loaded.spec == spec
        assert_same(loaded, part_of(full, spec))


@by_format
def test_ranks_write_one_full_checkpoint(fmt, tmp_path):
    full = random_weights(SPEC, fmt, seed=2)
    for rank in (1, 0):
        path = part_of(full, SPEC.shard(ep=2, ep_rank=rank)).save(tmp_path)
        assert {name.split(".experts.")[1].split(".")[0] for name in load_file(path)} == {str(2 * rank), str(2 * rank + 1)}
    assert_same(ExpertWeights.load(tmp_path, SPEC), full)
    assert sum(stored_bytes(tmp_path).values()) == full.nbytes == json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"]
    (tmp_path / INDEX).unlink()
    assert_same(ExpertWeights.load(tmp_path, SPEC), full)


_OTHER_RANK = """
import sys
from graphmoe import MoESpec
from tests.checks import random_weights
weights = random_weights(MoESpec(4, 2, 128, 128).shard(ep=2, ep_rank=1), "bf16", seed=9)
print("ready", flush=True)
sys.stdin.readline()
weights.save(sys.argv[1])
"""


def test_ranks_that_write_at_the_same_time_lose_nothing(tmp_path, monkeypatch):
    """The other rank saves just before this one's new index takes its place: an index made from an old one would drop its experts."""
    child = subprocess.Popen([sys.executable, "-c", _OTHER_RANK, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        met = []
        replace = Path.replace

        def replace_late(self, target):
            if Path(target).name == INDEX and not met:
                met.append(target)
                child.stdin.write("go\n")
                child.stdin.flush()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait for us
                    child.wait(timeout=2)
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", replace_late)
        mine = random_weights(SMALL.shard(ep=2, ep_rank=0), "bf16", seed=8)
        mine.save(tmp_path)
        assert met, "the index no longer takes its place by Path.replace: this test must find the moment anew"
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        child.communicate()
    for rank, want in ((0, mine), (1, random_weights(SMALL.shard(ep=2, ep_rank=1), "bf16", seed=9))):
        assert_same(ExpertWeights.load(tmp_path, SMALL.shard(ep=2, ep_rank=rank)), want)


# saving again


@functools.cache
def _pool(rank: int | None, fmt: str, seed: int) -> ExpertWeights:
    return random_weights(SMALL if rank is None else SMALL.shard(ep=2, ep_rank=rank), fmt, seed=seed)


saves = st.tuples(st.integers(0, 1), st.sampled_from([None, 0, 1]), st.sampled_from(FORMATS), st.integers(0, 2))
"""Layer, rank of two (None: all experts), format, seed."""


@given(history=st.lists(saves, min_size=1, max_size=5))
def test_the_last_save_of_an_expert_is_what_loads(history):
    """Any order of layers, slices and formats. Per expert the newest save counts, with none of an older save's scales."""
    newest: dict[tuple[int, int], tuple[ExpertWeights, int]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for layer, rank, fmt, seed in history:
            weights = _pool(rank, fmt, seed)
            weights.save(folder, layer)
            newest |= {(layer, weights.spec.expert_offset + e): (weights, e) for e in range(weights.spec.num_local_experts)}
        expected = {
            key(layer, expert, projection) + suffix
            for (layer, expert), (weights, _) in newest.items()
            for projection in PROJECTIONS
            for suffix in (("", "_scale_inv") if weights.fmt == "fp8_block" else ("",))
        }
        sizes = stored_bytes(folder)
        assert sizes.keys() == expected
        assert json.loads((folder / INDEX).read_text())["metadata"]["total_size"] == sum(sizes.values())
        for layer in (0, 1):
            for spec in (SMALL, SMALL.shard(ep=2, ep_rank=0), SMALL.shard(ep=2, ep_rank=1)):
                parts = [newest.get((layer, spec.expert_offset + e)) for e in range(spec.num_local_experts)]
                if None in parts or len({weights.fmt for weights, _ in parts}) > 1:
                    with pytest.raises(CheckpointError):
                        ExpertWeights.load(folder, spec, layer)
                    continue
                loaded = ExpertWeights.load(folder, spec, layer)
                for e, (weights, theirs) in enumerate(parts):
                    for name, tensor in weights.tensors().items():
                        assert torch.equal(raw(loaded.tensors()[name][e]), raw(tensor[theirs])), f"{name} of expert {e} in layer {layer}"


@pytest.mark.parametrize("formats", [("fp8_block", "fp8_block"), ("bf16", "bf16"), ("bf16", "fp8_block"), ("fp8_block", "bf16")], ids="-".join)
def test_saving_a_layer_again_replaces_it(formats, tmp_path):
    """bf16 over fp8 must take the scales out of the index; the stated total must be the bytes that are there."""
    other = random_weights(SPEC, "bf16", seed=5)
    other.save(tmp_path, layer=1)
    for seed, fmt in enumerate(formats):
        weights = random_weights(SPEC, fmt, seed=seed)
        weights.save(tmp_path)
    assert_same(ExpertWeights.load(tmp_path, SPEC), weights)
    assert_same(ExpertWeights.load(tmp_path, SPEC, layer=1), other)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(stored_bytes(tmp_path).values()) == weights.nbytes + other.nbytes


@pytest.mark.parametrize("metadata", [{}, {"metadata": {}}, {"metadata": {"total_parameters": 7}}], ids=str)
def test_saving_beside_an_index_without_a_total_states_one(metadata, tmp_path):
    tensors = write_by_hand(tmp_path, SPEC, quantised=True, layer=4)
    (tmp_path / INDEX).write_text(json.dumps({**metadata, "weight_map": dict.fromkeys(tensors, "layer-4.safetensors")}))
    weights = random_weights(SPEC, "fp8_block")
    weights.save(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(stored_bytes(tmp_path).values())
    assert metadata.get("metadata", {}).items() <= index["metadata"].items()
    assert_same(ExpertWeights.load(tmp_path, SPEC), weights)
    assert ExpertWeights.load(tmp_path, SPEC, layer=4).fmt == "fp8_block"


def _contents(folder: Path) -> dict[str, bytes]:
    """Every file but the lock's."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.name.endswith(".lock")}


SHARDS_THAT_ARE_NOT_THERE = {
    "absent": lambda path: path.unlink(),
    "a pointer": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    "half there": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "of other tensors": lambda path: save_file({"other": torch.ones(1)}, path),
}


@pytest.mark.parametrize("damage", SHARDS_THAT_ARE_NOT_THERE.values(), ids=SHARDS_THAT_ARE_NOT_THERE)
def test_a_save_beside_a_shard_that_is_not_here_states_no_total(damage, tmp_path):
    """A checkpoint of which only a part was fetched: its other layers stay in the index, its total would be a lie until they are there."""
    other = write_by_hand(tmp_path, SMALL, quantised=True, layer=4)
    shard = tmp_path / "layer-4.safetensors"
    index = {"metadata": {"total_size": 12345, "total_parameters": 7}, "weight_map": dict.fromkeys(other, shard.name)}
    (tmp_path / INDEX).write_text(json.dumps(index))
    whole = shard.read_bytes()
    damage(shard)
    for seed in (1, 2):
        weights = random_weights(SMALL, "bf16", seed=seed)
        path = weights.save(tmp_path)
        assert_same(ExpertWeights.load(tmp_path, SMALL), weights)
        written = json.loads((tmp_path / INDEX).read_text())
        assert written["metadata"] == {"total_parameters": 7}
        assert written["weight_map"] == dict.fromkeys(other, shard.name) | dict.fromkeys(load_file(path), path.name)
    shard.write_bytes(whole)
    weights.save(tmp_path)
    assert json.loads((tmp_path / INDEX).read_text())["metadata"] == {"total_parameters": 7, "total_size": sum(stored_bytes(tmp_path).values())}


def test_a_first_index_names_the_files_that_are_there(tmp_path):
    others = write_by_hand(tmp_path, SPEC, quantised=True, layer=4)
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model-other.safetensors")
    weights = random_weights(SPEC, "bf16")
    path = weights.save(tmp_path)
    assert_same(ExpertWeights.load(tmp_path, SPEC), weights)
    assert ExpertWeights.load(tmp_path, SPEC, layer=4).fmt == "fp8_block"
    index = json.loads((tmp_path / INDEX).read_text())
    files = dict.fromkeys(others, "layer-4.safetensors") | {"model.norm.weight": "model-other.safetensors"}
    assert index["weight_map"] == files | dict.fromkeys(load_file(path), path.name)
    assert index["metadata"]["total_size"] == sum(stored_bytes(tmp_path).values())


def test_a_first_index_forgets_what_the_save_replaces(tmp_path):
    """The layer is in another file, with scales, and in a damaged one of the name that is written: neither counts any more."""
    write_by_hand(tmp_path, SPEC, quantised=True, layer=0)
    weights = random_weights(SPEC, "bf16")
    path = weights.save(tmp_path)
    (tmp_path / INDEX).unlink()
    os.truncate(path, 100)
    weights.save(tmp_path)
    assert_same(ExpertWeights.load(tmp_path, SPEC), weights)
    assert set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values()) == {path.name}


@pytest.mark.parametrize("damage", ["unreadable", "twice"])
def test_files_that_no_first_index_can_name_stop_the_save(damage, tmp_path):
    path, _ = saved(tmp_path, "bf16", SMALL)
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"model.norm.weight": torch.ones(3)}, tmp_path / name)
    if damage == "unreadable":
        os.truncate(tmp_path / "b.safetensors", 20)
    before = _contents(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"b\.safetensors cannot be read" if damage == "unreadable" else r"a\.safetensors and in b\.safetensors"
    ):
        random_weights(SMALL, "bf16", seed=1).save(tmp_path)
    assert _contents(tmp_path) == before
    assert path.name in before


@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()], ids=repr)
def test_an_index_that_cannot_be_written_changes_nothing(failure, tmp_path, monkeypatch):
    """Neither the old layer nor the old index, and no temporary file stays behind."""
    random_weights(SPEC, "fp8_block", seed=1).save(tmp_path)
    before = _contents(tmp_path)
    write_text = Path.write_text
    stopped = []

    def stop_halfway(self, text, *args, **kwargs):
        write_text(self, text[: len(text) // 2], *args, **kwargs)
        stopped.append(self)
        raise failure

    monkeypatch.setattr(Path, "write_text", stop_halfway)
    for layer in (0, 1):
        with pytest.raises(CheckpointError if isinstance(failure, OSError) else type(failure)):
            random_weights(SPEC, "bf16", seed=2).save(tmp_path, layer)
    assert len(stopped) == 2, "the index is no longer written by Path.write_text: this test must find the moment anew"
    assert _contents(tmp_path) == before


def test_a_file_that_cannot_take_its_name_is_not_in_the_index(tmp_path):
    weights = random_weights(SMALL, "bf16")
    weights.save(tmp_path / "a")
    before = _contents(tmp_path / "a")
    (tmp_path / "a" / weights.save(tmp_path / "b", layer=1).name).mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        weights.save(tmp_path / "a", layer=1)
    assert _contents(tmp_path / "a") == before


@pytest.mark.parametrize("layer", [-1, 1.0, "1", None, True], ids=repr)
def test_a_layer_that_is_no_number_of_one_is_refused(layer, tmp_path):
    weights = random_weights(SMALL, "bf16")
    with pytest.raises(CheckpointError, match=f"layer={layer!r} must be an int from 0 up"):
        weights.save(tmp_path, layer)
    assert os.listdir(tmp_path) == []
    weights.save(tmp_path)
    with pytest.raises(CheckpointError, match=f"layer={layer!r} must be an int from 0 up"):
        ExpertWeights.load(tmp_path, SMALL, layer)


@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()], ids=repr)
def test_an_interrupted_save_leaves_no_half_file(failure, tmp_path, monkeypatch):
    before = random_weights(SPEC, "fp8_block", seed=1)
    before.save(tmp_path, layer=0)
    files = sorted(os.listdir(tmp_path))

    append = TensorFile.append
    written = []

    def stop_halfway(self, name, piece):
        append(self, name, piece)
        written.append(name)
        if len(written) % 7 == 0:
            raise failure

    monkeypatch.setattr(TensorFile, "append", stop_halfway)
    for layer in (0, 1):
        with pytest.raises(CheckpointError if isinstance(failure, OSError) else type(failure)):
            random_weights(SPEC, "fp8_block", seed=2).save(tmp_path, layer)
    assert sorted(os.listdir(tmp_path)) == files
    assert_same(ExpertWeights.load(tmp_path, SPEC), before)


def test_a_save_makes_the_folders_above_it_and_files_that_others_can_read(tmp_path):
    folder = tmp_path / "a" / "b" / "c"
    before = os.umask(0o022)
    try:
        path = random_weights(SMALL, "bf16").save(folder)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (path, folder / INDEX)} == {0o644}


@by_format
@pytest.mark.parametrize("indexed", [True, False])
def test_a_file_that_holds_other_tensors_is_not_replaced(fmt, indexed, tmp_path):
    path, tensors = saved(tmp_path, fmt, SMALL)
    other = "model.layers.0.self_attn.q_proj.weight"
    save_file({**tensors, other: torch.ones(2, 2)}, path)
    if indexed:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys([*tensors, other], path.name)}))
    before = _contents(tmp_path)
    with pytest.raises(CheckpointError, match=f"{path.name} also holds {other}, which a new file of that name would lose; move"):
        random_weights(SMALL, "bf16", seed=1).save(tmp_path)
    assert _contents(tmp_path) == before
    random_weights(SMALL, "bf16", seed=1).save(tmp_path, layer=1)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert {name for name, file in weight_map.items() if file == path.name} == {*tensors, other}


def test_other_tensors_of_the_file_that_count_elsewhere_stop_no_save(tmp_path):
    path, tensors = saved(tmp_path, "bf16", SMALL)
    save_file({**tensors, "norm": torch.zeros(2)}, path)
    save_file({"norm": torch.ones(2)}, tmp_path / "other.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**dict.fromkeys(tensors, path.name), "norm": "other.safetensors"}}))
    weights = random_weights(SMALL, "fp8_block", seed=1)
    weights.save(tmp_path)
    assert_same(ExpertWeights.load(tmp_path, SMALL), weights)
    assert torch.equal(CheckpointReader(tmp_path).read("norm"), torch.ones(2))


@by_format
@pytest.mark.parametrize("indexed", [True, False])
def test_a_layer_replaces_its_fused_experts_and_a_part_of_one_is_refused(fmt, indexed, tmp_path):
    old = random_weights(SMALL, fmt)
    names = {"w13": "gate_up_proj", "w2": "down_proj", "w13_scale_inv": "gate_up_proj_scale_inv", "w2_scale_inv": "down_proj_scale_inv"}
    fused = {f"model.layers.{layer}.mlp.experts.{names[name]}": tensor for layer in (0, 1) for name, tensor in old.tensors().items()}
    save_file({name: tensor.clone() for name, tensor in fused.items()}, tmp_path / "model.safetensors")
    if indexed:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(fused, "model.safetensors")}))
    before = _contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.0\.mlp\.experts\.(gate_up|down)_proj.*would replace a part; save all experts"):
        random_weights(SMALL.shard(ep=2, ep_rank=1), fmt, seed=1).save(tmp_path)
    assert _contents(tmp_path) == before
    weights = random_weights(SMALL, "bf16", seed=1)
    weights.save(tmp_path)
    assert_same(ExpertWeights.load(tmp_path, SMALL), weights)
    assert_same(ExpertWeights.load(tmp_path, SMALL, layer=1), old)
    random_weights(SMALL.shard(ep=2, ep_rank=1), "bf16", seed=1).save(tmp_path)


@by_format
def test_a_tensor_parallel_shard_is_not_saved_as_a_layer(fmt, tmp_path):
    """Every rank's file and names would be the same: the last one would win."""
    whole = random_weights(MoESpec(2, 1, 128, 256), fmt)
    whole.save(tmp_path / "whole")
    shards = {
        2: [
            whole.shard(2, 1),
            ExpertWeights.load(tmp_path / "whole", whole.spec, tp=2, tp_rank=0),
            whole.shard(2, 0).to("cpu"),
            whole.shard(2, 1).shard(1, 0),
        ],
        4: [random_weights(MoESpec(2, 1, 128, 512), fmt).shard(2, 0).shard(2, 1)],
    }
    if fmt == "fp8_block":
        shards[2].append(whole.shard(2, 1).requantize("ue8m0"))
    for tp, parts in shards.items():
        for part in parts:
            with pytest.raises(WeightsMismatch, match=f"a shard of tp={tp}.*save the weights that were cut"):
                part.save(tmp_path / "shards")
    assert not (tmp_path / "shards").exists()
    whole.shard(1, 0).save(tmp_path / "shards")
    assert_same(ExpertWeights.load(tmp_path / "shards", whole.spec, tp=1, tp_rank=0), whole)


def test_a_file_that_is_written_again_replaces_its_own_tensors(tmp_path):
    for value in (1.0, 2.0):
        write_tensors(tmp_path, "x.safetensors", {"a": torch.full((2,), value)}, replaces=[])
    assert CheckpointReader(tmp_path).read("a").tolist() == [2.0, 2.0]


def test_what_an_index_says_besides_is_kept(tmp_path):
    random_weights(SMALL, "bf16").save(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps({**index, "format_version": 3, "notes": ["x"]}))
    random_weights(SMALL, "bf16").save(tmp_path, layer=1)
    written = json.loads((tmp_path / INDEX).read_text())
    assert {name: value for name, value in written.items() if name not in index} == {"format_version": 3, "notes": ["x"]}
    assert written["metadata"]["total_size"] == 2 * index["metadata"]["total_size"]


def test_threads_that_save_the_same_layer_leave_one_whole(tmp_path):
    layers = [random_weights(SMALL, "bf16", seed=seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda weights: weights.save(tmp_path), layers))
    loaded = ExpertWeights.load(tmp_path, SMALL)
    assert sum(torch.equal(raw(loaded.w13), raw(weights.w13)) and torch.equal(raw(loaded.w2), raw(weights.w2)) for weights in layers) == 1
    assert {path.suffix for path in tmp_path.iterdir()} <= {".safetensors", ".json", ".lock"}


def test_old_temporary_files_are_removed_and_fresh_ones_stay(tmp_path):
    """A fresh one may be another rank's."""
    for name, age in ((".graphmoe.old.tmp", 90_000), (".graphmoe.fresh.tmp", 3_000), ("other.tmp", 90_000)):
        (tmp_path / name).touch()
        then = (tmp_path / name).stat().st_mtime - age
        os.utime(tmp_path / name, (then, then))
    random_weights(SMALL, "bf16").save(tmp_path)
    assert {path.name for path in tmp_path.glob("*.tmp")} | {path.name for path in tmp_path.glob(".*.tmp")} == {".graphmoe.fresh.tmp", "other.tmp"}


@pytest.mark.parametrize(
    ("name", "part"), [(INDEX, "is a directory, where the index must be written"), (f".{INDEX}.lock", "cannot be locked: .*remove")]
)
def test_a_directory_in_the_way_of_index_or_lock_is_named_and_nothing_changes(name, part, tmp_path):
    saved(tmp_path, "bf16", SMALL)
    (tmp_path / f".{INDEX}.lock").unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    before = _contents(tmp_path)
    for layer in (0, 1):
        with pytest.raises(CheckpointError, match=part):
            random_weights(SMALL, "bf16", seed=1).save(tmp_path, layer)
    assert _contents(tmp_path) == before


WIDTHS = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I64": 8}
layouts = st.lists(st.tuples(st.sampled_from(sorted(WIDTHS)), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=6)


@given(layout=layouts, seed=st.integers(0, 2**32 - 1))
def test_a_file_made_in_pieces_is_what_safetensors_reads(layout, seed):
    """Tensors whose pieces come in turn; each lies at a multiple of its element's size. Before its header is there the file is none."""
    named = {f"t{number}": (dtype, tuple(shape)) for number, (dtype, shape) in enumerate(layout)}
    content = {name: random.Random(seed).randbytes(WIDTHS[dtype] * math.prod(shape)) for name, (dtype, shape) in named.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        with TensorFile(path, named, {"note": "x" * 40}) as file:
            for piece in range(3):
                for name, data in content.items():
                    third = -(-len(data) // 3)
                    file.append(name, data[piece * third : (piece + 1) * third])
            with pytest.raises(CheckpointError, match="cannot be read"):
                CheckpointReader(folder)
            file.finish({"note": "y"})
        for name, tensor in load_file(path).items():
            assert tuple(tensor.shape) == named[name][1]
            assert raw(tensor.flatten()).numpy().tobytes() == content[name]
        with safe_open(path, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt", "note": "y"}
        reader = CheckpointReader(folder)
        assert set(reader.keys()) == set(named)
        for name, (dtype, shape) in named.items():
            assert reader.describe(name) == (shape, dtype)
            assert b"".join(reader.read_bytes(name)) == content[name]
        length = int.from_bytes(path.read_bytes()[:8], "little")
        header = json.loads(path.read_bytes()[8 : 8 + length])
        assert all((8 + length + header[name]["data_offsets"][0]) % WIDTHS[dtype] == 0 for name, (dtype, _) in named.items())


# refusals: tensors


WRONG_SHAPES = {
    "experts": lambda w13, w2: (w13[:3], w2),
    "gate alone": lambda w13, w2: (w13[:, :128], w2),
    "transposed": lambda w13, w2: (w13.transpose(1, 2), w2),
    "w2 transposed": lambda w13, w2: (w13, w2.transpose(1, 2)),
    "swapped": lambda w13, w2: (w2, w13),
    "flat": lambda w13, w2: (w13.flatten(), w2),
}


@by_format
@pytest.mark.parametrize("wrong", WRONG_SHAPES)
def test_wrong_shapes_are_refused_with_both_shapes(fmt, wrong):
    w13, w2 = WRONG_SHAPES[wrong](*distinct_parts(SPEC))
    name, bad, good = ("w13", w13, (4, 256, 384)) if w13.shape != (4, 256, 384) else ("w2", w2, (4, 384, 128))
    with pytest.raises(WeightsMismatch) as caught:
        ExpertWeights.from_bf16(SPEC, w13, w2, fmt=fmt)
    assert str(caught.value) == f"{name} is {tuple(bad.shape)}, the spec needs {good}"
    if fmt == "fp8_block":
        made = random_weights(SPEC, fmt)
        payloads = [tensor.to(torch.float8_e4m3fn) for tensor in (w13, w2)]
        with pytest.raises(WeightsMismatch, match=f"{name} is"):
            ExpertWeights.from_fp8(SPEC, payloads[0], made.w13_scale_inv, payloads[1], made.w2_scale_inv)


@by_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("which", [0, 1])
def test_wrong_dtypes_are_refused(fmt, dtype, which):
    tensors = list(distinct_parts(SPEC))
    tensors[which] = tensors[which].to(dtype)
    with pytest.raises(WeightsMismatch, match=f"{('w13', 'w2')[which]} is {dtype}, expected torch.bfloat16 or torch.float32"):
        ExpertWeights.from_bf16(SPEC, *tensors, fmt=fmt)


@by_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_weights_that_are_not_finite_are_refused(fmt, bad, which):
    tensors = distinct_parts(SPEC)
    tensors[which][3, 5, 7] = bad
    with pytest.raises(WeightsMismatch, match=f"{('w13', 'w2')[which]} holds NaN or infinity"):
        ExpertWeights.from_bf16(SPEC, *tensors, fmt=fmt)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("which", [0, 1])
def test_float32_weights_beyond_bfloat16_are_refused_as_bf16_alone(which, sign):
    """The middle between bfloat16's largest number and the next power of two rounds up, to infinity; just below it nothing is lost."""
    largest = torch.finfo(torch.bfloat16).max
    middle = torch.tensor(largest) + torch.tensor(2.0**119)
    tensors = [tensor.float() for tensor in distinct_parts(SPEC)]
    tensors[which][3, 5, 7] = sign * torch.nextafter(middle, torch.tensor(0.0))
    kept = ExpertWeights.from_bf16(SPEC, *tensors, fmt="bf16")
    assert (kept.w13, kept.w2)[which][3, 5, 7] == sign * largest
    tensors[which][3, 5, 7] = sign * middle
    with pytest.raises(WeightsMismatch, match=rf"{('w13', 'w2')[which]} holds 3\.39618e\+38 in expert 3, bfloat16 ends at 3\.38953e\+38"):
        ExpertWeights.from_bf16(SPEC, *tensors, fmt="bf16")
    assert bool(ExpertWeights.from_bf16(SPEC, *tensors).dequantize()[which].isfinite().all())


def _fp8_parts() -> dict[str, Tensor]:
    """Arguments of `from_fp8`, by name."""
    return dict(random_weights(SPEC, "fp8_block").tensors())


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("place", [("w13", 0), ("w13", 3), ("w2", 2)], ids=str)
def test_a_payload_of_nan_is_refused_by_name(place, byte):
    """By `from_fp8`, which looks at what it is given; the constructor itself reads no payload."""
    (name, expert), parts = place, _fp8_parts()
    parts[name].view(torch.uint8)[expert, 5, 7] = byte
    with pytest.raises(WeightsMismatch, match=f"{name} holds NaN, first in expert {expert}"):
        ExpertWeights.from_fp8(SPEC, **parts)
    ExpertWeights(SPEC, "fp8_block", **parts)


def test_requantising_nan_changes_no_expert():
    for name, expert in (("w13", 3), ("w2", 0), ("w2", 3)):
        parts = _fp8_parts()
        parts[name].view(torch.uint8)[expert, 5, 7] = 0x7F
        weights = ExpertWeights(SPEC, "fp8_block", **parts)
        before = {part: raw(tensor).clone() for part, tensor in parts.items()}
        with pytest.raises(WeightsMismatch, match=f"{name} holds NaN, first in expert {expert}"):
            weights.requantize("ue8m0")
        for part, tensor in weights.tensors().items():
            assert torch.equal(raw(tensor), before[part]), f"{part} changed, for NaN in {name} of expert {expert}"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e-6])
@pytest.mark.parametrize("which", ["w13_scale_inv", "w2_scale_inv"])
def test_scales_that_cannot_be_are_refused(bad, which, tmp_path):
    parts = _fp8_parts()
    parts[which] = parts[which].clone()
    parts[which][2, 1, 0] = bad
    with pytest.raises(WeightsMismatch, match=f"{which} holds a scale that is NaN, infinite or negative"):
        ExpertWeights.from_fp8(SPEC, **parts)
    path, tensors = saved(tmp_path)
    name = key(0, 2, "up" if which == "w13_scale_inv" else "down") + "_scale_inv"
    tensors[name][0, 0] = bad
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=f"{name} holds a scale that is NaN"):
        ExpertWeights.load(tmp_path, SPEC)


@pytest.mark.parametrize("which", ["w13_scale_inv", "w2_scale_inv"])
def test_scales_of_a_wrong_shape_are_refused(which):
    parts = _fp8_parts()
    parts[which] = parts[which].transpose(1, 2)
    with pytest.raises(WeightsMismatch, match=f"{which} is"):
        ExpertWeights.from_fp8(SPEC, **parts)


@by_format
@pytest.mark.parametrize("which", ["w13", "w2", "w13_scale_inv", "w2_scale_inv"])
def test_the_constructor_refuses_strides(which, fmt):
    """Requantising writes into them: several blocks in one place would be computed from one another."""
    spec = MoESpec(4, 2, 256, 256)
    parts = dict(random_weights(spec, fmt).tensors())
    if which not in parts:
        return
    ExpertWeights(spec, fmt, **parts)
    strided = [parts[which].transpose(1, 2).contiguous().transpose(1, 2)]
    if parts[which].dtype == torch.float32:
        strided += [torch.ones(1, 1, 1).expand(parts[which].shape), torch.ones(4, 1, 1).expand(parts[which].shape)]
    for tensor in strided:
        with pytest.raises(WeightsMismatch, match=rf"{which} has strides \(.*pass {which}\.contiguous\(\)"):
            ExpertWeights(spec, fmt, **{**parts, which: tensor})
        if fmt == "fp8_block":
            assert ExpertWeights.from_fp8(spec, **{**parts, which: tensor}).tensors()[which].is_contiguous()


@pytest.mark.parametrize("which", ["w13", "w2"])
def test_a_payload_that_is_not_e4m3_is_refused(which):
    parts = _fp8_parts()
    parts[which] = parts[which].bfloat16()
    with pytest.raises(WeightsMismatch, match=f"{which} is torch.bfloat16, expected torch.float8_e4m3fn"):
        ExpertWeights.from_fp8(SPEC, **parts)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32], ids=str)
def test_integer_scales_are_refused(dtype, tmp_path):
    """UE8M0 exponents are stored as integers; 127 means 1.0, and read as 127.0 they would be silently wrong."""
    parts = _fp8_parts()
    parts["w13_scale_inv"] = torch.full_like(parts["w13_scale_inv"], 127).to(dtype)
    with pytest.raises(WeightsMismatch, match="w13_scale_inv"):
        ExpertWeights.from_fp8(SPEC, **parts)
    write_by_hand(tmp_path, SPEC, quantised=True, scale_dtype=dtype)
    with pytest.raises(WeightsError, match="scale_inv"):
        ExpertWeights.load(tmp_path, SPEC)


@pytest.mark.parametrize("which", ["w2", "w13_scale_inv", "w2_scale_inv"])
def test_fp8_parts_on_two_devices_are_refused(which):
    parts = _fp8_parts()
    parts[which] = parts[which].to("meta")
    with pytest.raises(WeightsMismatch, match=f"{which} is on meta, w13 on cpu"):
        ExpertWeights.from_fp8(SPEC, **parts)


@by_format
def test_floating_point_weights_on_two_devices_are_refused(fmt):
    w13, w2 = distinct_parts(SPEC)
    with pytest.raises(WeightsMismatch, match="w2 is on meta, w13 on cpu"):
        ExpertWeights.from_bf16(SPEC, w13, w2.to("meta"), fmt=fmt)


@pytest.mark.parametrize(
    ("fmt", "hidden", "intermediate", "culprit"),
    [
        ("fp8_block", 320, 128, "hidden_size=320"),
        ("fp8_block", 128, 192, "intermediate_size=192"),
        ("fp8_block", 128, 96, "intermediate_size=96"),
        ("bf16", 96, 128, "hidden_size=96"),
        ("bf16", 128, 80, "intermediate_size=80"),
    ],
)
def test_sizes_that_cut_a_block_are_refused_by_name(fmt, hidden, intermediate, culprit, tmp_path):
    spec = MoESpec(2, 1, hidden, intermediate)
    w13, w2 = torch.ones(2, 2 * intermediate, hidden).bfloat16(), torch.ones(2, hidden, intermediate).bfloat16()
    with pytest.raises(UnsupportedShape, match=culprit):
        ExpertWeights.from_bf16(spec, w13, w2, fmt=fmt)
    tensors = {}
    for e in range(2):
        for projection, part in (("gate", w13[e, :intermediate]), ("up", w13[e, intermediate:]), ("down", w2[e])):
            tensors[key(0, e, projection)] = part.clone()
            if fmt == "fp8_block":
                tensors[key(0, e, projection)] = part.to(torch.float8_e4m3fn)
                tensors[key(0, e, projection) + "_scale_inv"] = torch.ones(-(-part.shape[0] // 128), -(-part.shape[1] // 128))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedShape, match=culprit):
        ExpertWeights.load(tmp_path, spec)


@pytest.mark.parametrize(
    ("field", "mine", "other"),
    [
        ("num_local_experts", 4, MoESpec(8, 2, 384, 128)),
        ("num_local_experts", 4, MoESpec(4, 2, 384, 128, num_local_experts=2)),
        ("expert_offset", 0, MoESpec(8, 2, 384, 128, num_local_experts=4, expert_offset=4)),
        ("hidden_size", 384, MoESpec(4, 2, 128, 128)),
        ("intermediate_size", 128, MoESpec(4, 2, 384, 256)),
    ],
)
def test_weights_of_another_layer_are_refused_with_both_numbers(field, mine, other):
    with pytest.raises(WeightsMismatch, match=f"{field}={mine}, the runtime's spec says {getattr(other, field)}"):
        random_weights(SPEC, "bf16").check_spec(other)


@pytest.mark.parametrize(("field", "mine", "other"), [("gated", True, False), ("activation", "silu", "gelu")])
def test_weights_of_another_kind_of_expert_are_refused(field, mine, other):
    """No spec can say so yet; when one can, weights must not pass for what they are not."""
    spec = replace(SPEC)
    object.__setattr__(spec, field, other)
    with pytest.raises(WeightsMismatch, match=f"{field}={mine}, the runtime's spec says {other}"):
        random_weights(SPEC, "bf16").check_spec(spec)


def test_a_runtime_of_a_shard_takes_the_spec_of_the_shard():
    """The whole layer's spec, and one with `I / tp`, are refused with what to pass instead."""
    whole = MoESpec(2, 1, 128, 384)
    shard = random_weights(whole, "fp8_block").shard(4, 1)
    assert shard.spec == whole.shard(tp=4, block=128)
    for spec in (whole, whole.shard(tp=4)):
        with pytest.raises(WeightsMismatch, match=f"intermediate_size=256, the runtime's spec says {spec.intermediate_size}; pass weights.spec"):
            shard.check_spec(spec)
    shard.check_spec(shard.spec)


def test_an_unknown_format_is_one_error_everywhere():
    weights = random_weights(SMALL, "fp8_block")
    parts = {name: getattr(weights, name) for name in ("w13", "w13_scale_inv", "w2", "w2_scale_inv")}
    for call in (
        lambda: ExpertWeights.from_fp8(SMALL, **parts, fmt="int3"),
        lambda: ExpertWeights.from_bf16(SMALL, *weights.dequantize(), fmt="int3"),
        lambda: weights.requantize("int3"),
        lambda: ExpertWeights(SMALL, "int3", weights.w13, weights.w2),
    ):
        with pytest.raises(UnsupportedShape, match="unknown format 'int3'; known: fp8_block, ue8m0, w4afp8, bf16"):
            call()


def test_numbers_that_the_weights_do_not_hold_may_differ():
    random_weights(SPEC, "bf16").check_spec(MoESpec(8, 3, 384, 128, num_local_experts=4, routed_scaling_factor=2.5, distinct_topk=False))


# refusals: checkpoints


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("suffix", ["", "_scale_inv"])
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("expert", [0, 3])
def test_a_missing_tensor_is_named(expert, projection, suffix, indexed, tmp_path):
    path, tensors = saved(tmp_path)
    gone = key(0, expert, projection) + suffix
    del tensors[gone]
    save_file(tensors, path)
    if indexed:
        (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, path.name)}))
    with pytest.raises(CheckpointError, match=f"{gone} missing"):
        ExpertWeights.load(tmp_path, SPEC)


@by_format
def test_all_missing_tensors_are_counted_in_one_error(fmt, tmp_path):
    random_weights(SPEC, fmt).save(tmp_path)
    wanted = MoESpec(6, 2, 384, 128)
    with pytest.raises(CheckpointError) as caught:
        ExpertWeights.load(tmp_path, wanted)
    message = str(caught.value)
    assert key(0, 4, "gate") in message
    assert f"and {(12 if fmt == 'fp8_block' else 6) - 5} more missing; spec wants experts 0..5 of layer 0" in message
    random_weights(SPEC, fmt).save(tmp_path, layer=1)
    random_weights(SPEC, fmt).save(tmp_path, layer=3)
    with pytest.raises(CheckpointError, match=r"layer 9 has no experts under model\.layers\.9\..*layers that have: 0\.\.1, 3$"):
        ExpertWeights.load(tmp_path, SPEC, layer=9)
    names = {"model.layers.0.block_sparse_moe.experts.0.w1.weight": torch.ones(128, 384).bfloat16()}
    (tmp_path / "other").mkdir()
    save_file(names, tmp_path / "other" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no layer of this checkpoint has \(names as of Qwen3-MoE"):
        ExpertWeights.load(tmp_path / "other", SPEC)


@by_format
@pytest.mark.parametrize("fused", [False, True])
def test_a_spec_with_fewer_experts_than_the_layer_says_how_to_take_a_part(fmt, fused, tmp_path):
    weights = random_weights(SPEC, fmt)
    if fused:
        names = {"w13": "gate_up_proj", "w2": "down_proj", "w13_scale_inv": "gate_up_proj_scale_inv", "w2_scale_inv": "down_proj_scale_inv"}
        prefix = "model.layers.0.mlp.experts."
        save_file({prefix + names[name]: tensor for name, tensor in weights.tensors().items()}, tmp_path / "model.safetensors")
    else:
        weights.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"the layer has 4 experts, the spec num_experts=2: .*spec\.shard\(ep=, ep_rank=\)"):
        ExpertWeights.load(tmp_path, MoESpec(2, 2, 384, 128))
    assert ExpertWeights.load(tmp_path, SPEC.shard(ep=2)).w2.shape[0] == 2


@by_format
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_a_misshapen_tensor_is_named_with_both_shapes(fmt, projection, tmp_path):
    path, tensors = saved(tmp_path, fmt)
    name = key(0, 2, projection)
    good = tuple(tensors[name].shape)
    tensors[name] = tensors[name].T.contiguous()
    names = [(name, good[::-1], good)]
    if fmt == "fp8_block":
        good = tuple(tensors[name + "_scale_inv"].shape)
        tensors[name + "_scale_inv"] = torch.ones(good[0] + 1, good[1])
        names.append((name + "_scale_inv", (good[0] + 1, good[1]), good))
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        ExpertWeights.load(tmp_path, SPEC)
    for name, found, wanted in names:
        assert f"{name} is {found}, not {wanted}" in str(caught.value)


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        *(("bf16", dtype) for dtype in (torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn)),
        *(("fp8_block", dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e5m2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_a_tensor_of_another_dtype_is_named(fmt, dtype, projection, tmp_path):
    """Gate and up of two dtypes are concatenated: that must neither promote one silently nor fail inside torch."""
    path, tensors = saved(tmp_path, fmt, SMALL)
    for odd in (key(0, 0, projection), key(0, 2, projection)):
        save_file({**tensors, odd: tensors[odd].to(dtype)}, path)
        with pytest.raises(CheckpointError, match=odd):
            ExpertWeights.load(tmp_path, SMALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn], ids=str)
def test_a_checkpoint_of_an_unknown_dtype_is_refused(dtype, tmp_path):
    path, tensors = saved(tmp_path, "bf16", SMALL)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path)
    with pytest.raises(WeightsError, match=r"(?i)bfloat16|BF16"):
        ExpertWeights.load(tmp_path, SMALL)


NOT_FINITE = [
    ("bf16", torch.nan),
    ("bf16", torch.inf),
    ("bf16", -torch.inf),
    ("fp8_block", torch.nan),
    ("fp8_block", -torch.nan),
    ("ue8m0", torch.nan),
]


@pytest.mark.parametrize(("fmt", "bad"), NOT_FINITE)
def test_stored_weights_that_are_not_finite_are_all_named(fmt, bad, tmp_path):
    path, tensors = saved(tmp_path, fmt)
    names = [key(0, expert, projection) for expert, projection in ((0, "gate"), (1, "up"), (1, "down"), (3, "gate"), (3, "up"), (3, "down"))]
    for count in (1, 2, 6):
        for name in names[:count]:
            tensors[name][127, 127] = bad
        save_file(tensors, path)
        with pytest.raises(CheckpointError) as caught:
            ExpertWeights.load(tmp_path, SPEC)
        listed = ", ".join(names[: min(count, 5)]) + (" and 1 more" if count == 6 else "")
        assert f"{tmp_path}: NaN or infinity in {listed}; " in str(caught.value)
    assert ExpertWeights.load(tmp_path, SPEC.shard(ep=4, ep_rank=2)).fmt == fmt, "a rank whose experts are sound"


@by_format
def test_fused_weights_that_are_not_finite_are_named_with_their_expert(fmt, tmp_path):
    weights = random_weights(SPEC, fmt)
    names = {"w13": "gate_up_proj", "w2": "down_proj", "w13_scale_inv": "gate_up_proj_scale_inv", "w2_scale_inv": "down_proj_scale_inv"}
    for place in ((1, 0, 0), (1, 255, 383), (3, 128, 7)):
        weights.w13[place] = torch.nan
    weights.w2[3, 383, 127] = torch.nan
    prefix = "model.layers.0.mlp.experts."
    save_file({prefix + names[name]: tensor for name, tensor in weights.tensors().items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        ExpertWeights.load(tmp_path, SPEC)
    assert f"NaN or infinity in {prefix}gate_up_proj[1], {prefix}gate_up_proj[3], {prefix}down_proj[3]; " in str(caught.value)
    assert ExpertWeights.load(tmp_path, SPEC.shard(ep=4, ep_rank=2)).fmt == fmt


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("damage", ["empty", "header cut", "tail cut", "garbage"])
def test_a_damaged_file_is_named(damage, indexed, tmp_path):
    path = random_weights(SMALL, "fp8_block").save(tmp_path)
    if not indexed:
        (tmp_path / INDEX).unlink()
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "header cut": content[:100], "tail cut": content[:-1], "garbage": b"\xff" * 4096}[damage])
    with pytest.raises(CheckpointError, match=f"{path.name} cannot be read"):
        ExpertWeights.load(tmp_path, SMALL)


def test_two_files_that_hold_one_tensor_need_an_index(tmp_path):
    """A rank saved its experts again beside the full file: only the index knows which of the two counts."""
    old = random_weights(SMALL, "bf16", seed=1)
    full = old.save(tmp_path)
    new = random_weights(SMALL.shard(ep=2, ep_rank=1), "bf16", seed=2)
    part = new.save(tmp_path)
    assert_same(ExpertWeights.load(tmp_path, SMALL.shard(ep=2, ep_rank=1)), new)
    assert_same(ExpertWeights.load(tmp_path, SMALL.shard(ep=2, ep_rank=0)), part_of(old, SMALL.shard(ep=2, ep_rank=0)))
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError) as caught:
        ExpertWeights.load(tmp_path, SMALL)
    assert full.name in str(caught.value)
    assert part.name in str(caught.value)


def test_no_checkpoint_is_said_to_be_none(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file$|is not a directory$"):
            ExpertWeights.load(folder, SPEC)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for folder in ("absent", "here/absent", "./Qwen/absent", "a/b/c", "Qwen/"):
        with pytest.raises(CheckpointError, match=r"is not a directory$"):
            ExpertWeights.load(folder, SPEC)
    command = re.escape("fetch it with `hf download Qwen/Qwen3-30B-A3B-FP8 --local-dir DIR` and give DIR")
    for folder in ("Qwen/Qwen3-30B-A3B-FP8", Path("Qwen/Qwen3-30B-A3B-FP8")):
        with pytest.raises(CheckpointError, match=f"is not a directory.*{command}"):
            ExpertWeights.load(folder, SPEC)


@pytest.mark.parametrize("deep", [False, True])
def test_a_file_in_the_way_of_a_directory_is_named(deep, tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below" if deep else tmp_path / "file"
    with pytest.raises(CheckpointError, match=f"{re.escape(str(folder))} cannot be made: {re.escape(str(tmp_path / 'file'))} is a file, not a dir"):
        random_weights(SMALL, "bf16").save(folder)


NOT_AN_INDEX = ["", "nonsense", "{}", "[]", "3", "null", '{"weight_map": null}', '{"weight_map": []}', '{"weight_map": {"%s": 3}}']


@pytest.mark.parametrize("text", NOT_AN_INDEX)
def test_a_broken_index_is_named(text, tmp_path):
    random_weights(SMALL, "bf16").save(tmp_path)
    (tmp_path / INDEX).write_text(text.replace("%s", key(0, 0, "gate")))
    with pytest.raises(CheckpointError, match=f"{INDEX} is not a safetensors index"):
        ExpertWeights.load(tmp_path, SMALL)


@pytest.mark.parametrize("text", NOT_AN_INDEX)
def test_saving_beside_a_broken_index_says_so_and_changes_nothing(text, tmp_path):
    random_weights(SMALL, "bf16").save(tmp_path)
    (tmp_path / INDEX).write_text(text.replace("%s", key(0, 0, "gate")))
    before = _contents(tmp_path)
    for layer in (0, 1):
        with pytest.raises(CheckpointError, match=f"{INDEX} is not a safetensors index"):
            random_weights(SMALL, "bf16", seed=1).save(tmp_path, layer)
    assert _contents(tmp_path) == before


def test_a_tensor_that_is_not_there_is_named(tmp_path):
    saved(tmp_path, "bf16", SMALL)
    with CheckpointReader(tmp_path) as reader:
        for read in (
            reader.read,
            reader.describe,
            reader.file_of,
            lambda key: reader.read_rows(key, 0, slice(0, 1)),
            lambda key: list(reader.read_bytes(key)),
        ):
            with pytest.raises(CheckpointError, match=f"{tmp_path} has no tensor nope"):
                read("nope")


def test_an_index_that_names_a_wrong_file_is_an_error_with_both_names(tmp_path):
    random_weights(SMALL, "bf16", seed=1).save(tmp_path, layer=0)
    other = random_weights(SMALL, "bf16", seed=2).save(tmp_path, layer=1)
    index = json.loads((tmp_path / INDEX).read_text())
    moved = key(0, 3, "down")
    index["weight_map"][moved] = other.name
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{other.name} has no tensor {moved}"):
        ExpertWeights.load(tmp_path, SMALL)
    index["weight_map"][moved] = "absent.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"absent\.safetensors cannot be read"):
        ExpertWeights.load(tmp_path, SMALL)
