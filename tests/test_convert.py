"""Checkpoints rewritten in another format: values, names, config, resuming, and what may not happen on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from graphmoe import ExpertWeights, MoESpec
from graphmoe.cli import app
from graphmoe.convert import convert_checkpoint
from graphmoe.errors import CheckpointError, UnknownRecipe
from graphmoe.formats.ue8m0 import is_power_of_two
from tests.checks import random_weights

SPEC = MoESpec(3, 2, 256, 128)


def checkpoint(folder: Path, fmt: str, layers: int = 2) -> Path:
    """Experts of a few layers, an attention weight, a norm and the small files beside them."""
    for layer in range(layers):
        random_weights(SPEC, fmt, seed=layer).save(folder, layer)
    other = {"model.layers.0.self_attn.q_proj.weight": torch.randn(256, 256).bfloat16(), "model.norm.weight": torch.ones(256).bfloat16()}
    save_file(other, folder / "model-other.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(other, "model-other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "quantization_config": {"quant_method": "fp8"}}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def load(folder: Path, layer: int = 0) -> ExpertWeights:
    return ExpertWeights.load(folder, SPEC, layer)


@pytest.mark.parametrize("source", ["fp8_block", "bf16"])
@pytest.mark.parametrize("target", ["fp8_block", "ue8m0", "bf16"])
def test_every_format_becomes_every_other(source: str, target: str, tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", source)
    files = convert_checkpoint(tmp_path / "a", tmp_path / "b", target)
    assert [file.found for file in files] == [False] * 3
    for layer in range(2):
        before, after = load(tmp_path / "a", layer), load(tmp_path / "b", layer)
        assert after.fmt == target
        for mine, original in zip(after.dequantize(), before.dequantize(), strict=True):
            assert float((mine - original).norm() / original.norm()) < {"fp8_block": 0.04, "ue8m0": 0.04, "bf16": 0.003}[target]
        if target == source:
            for name, tensor in before.tensors().items():
                assert torch.equal(tensor.view(torch.uint8), after.tensors()[name].view(torch.uint8))
    if target == "ue8m0" and source == "fp8_block":
        want = load(tmp_path / "a").requantize("ue8m0")
        for name, tensor in want.tensors().items():
            assert torch.equal(tensor.view(torch.uint8), load(tmp_path / "b").tensors()[name].view(torch.uint8))
        assert bool(is_power_of_two(load(tmp_path / "b").w13_scale_inv).all())
    other = load_file(tmp_path / "b" / "model-other.safetensors")
    for key, tensor in load_file(tmp_path / "a" / "model-other.safetensors").items():
        assert torch.equal(other[key], tensor)
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe"
    if target == "bf16":
        assert "quantization_config" not in config
    else:
        quantisation = config["quantization_config"]
        assert quantisation["weight_block_size"] == [128, 128]
        assert quantisation.get("scale_fmt") == ("ue8m0" if target == "ue8m0" else None)
        assert "model.layers.0.self_attn.q_proj" in quantisation["modules_to_not_convert"]
        assert not any("experts" in name for name in quantisation["modules_to_not_convert"])
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    sizes = sum(t.nbytes for path in (tmp_path / "b").glob("*.safetensors") for t in load_file(path).values())
    assert index["metadata"]["total_size"] == sizes


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "a", "fp8_block", layers=3)
    from graphmoe import checkpoint as module

    written = []

    def stop_in_the_second(tensors: dict, path: Path, metadata: dict | None = None) -> None:
        save_file(tensors, path, metadata)
        if len(written) == 1:
            Path(path).write_bytes(Path(path).read_bytes()[:100])
            raise KeyboardInterrupt
        written.append(path)

    monkeypatch.setattr(module, "save_file", stop_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", "ue8m0")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["model-layer-00000.safetensors"]
    monkeypatch.setattr(module, "save_file", save_file)
    first = (tmp_path / "b" / "model-layer-00000.safetensors").stat().st_mtime_ns
    resumed = convert_checkpoint(tmp_path / "a", tmp_path / "b", "ue8m0")
    assert [file.found for file in resumed] == [True, False, False, False]
    assert (tmp_path / "b" / "model-layer-00000.safetensors").stat().st_mtime_ns == first
    whole = convert_checkpoint(tmp_path / "a", tmp_path / "c", "ue8m0")
    assert [file.errors for file in resumed] == [file.errors for file in whole]
    for layer in range(3):
        for mine, want in zip(load(tmp_path / "b", layer).tensors().values(), load(tmp_path / "c", layer).tensors().values(), strict=True):
            assert torch.equal(mine.view(torch.uint8), want.view(torch.uint8))


def test_a_finished_file_of_another_format_or_source_is_made_anew(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", "fp8_block")
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "ue8m0")
    assert not any(file.found for file in convert_checkpoint(tmp_path / "a", tmp_path / "b", "bf16"))
    assert load(tmp_path / "b").fmt == "bf16"
    random_weights(SPEC, "fp8_block", seed=9).save(tmp_path / "a", 0)
    again = convert_checkpoint(tmp_path / "a", tmp_path / "b", "bf16")
    assert [file.found for file in again] == [False, True, True]


def test_a_scale_in_another_file_than_its_weight(tmp_path: Path) -> None:
    weights = random_weights(SPEC, "fp8_block")
    tensors = load_file(weights.save(tmp_path / "a"))
    scales = {key: tensor for key, tensor in tensors.items() if key.endswith("_scale_inv")}
    split = tmp_path / "split"
    split.mkdir()
    save_file(scales, split / "a-scales.safetensors")
    save_file({key: tensor for key, tensor in tensors.items() if key not in scales}, split / "b-weights.safetensors")
    convert_checkpoint(split, tmp_path / "b", "ue8m0")
    want = weights.requantize("ue8m0")
    for name, tensor in load(tmp_path / "b").tensors().items():
        assert torch.equal(tensor.view(torch.uint8), want.tensors()[name].view(torch.uint8))


@pytest.mark.parametrize("fmt", ["fp8_block", "bf16"])
def test_fused_experts_convert_and_load(fmt: str, tmp_path: Path) -> None:
    weights = random_weights(SPEC, fmt)
    prefix = "model.layers.0.mlp.experts."
    tensors = {prefix + "gate_up_proj": weights.w13, prefix + "down_proj": weights.w2}
    if fmt != "bf16":
        tensors |= {prefix + "gate_up_proj_scale_inv": weights.w13_scale_inv, prefix + "down_proj_scale_inv": weights.w2_scale_inv}
    (tmp_path / "a").mkdir()
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    for name, tensor in load(tmp_path / "a").tensors().items():
        assert torch.equal(tensor.view(torch.uint8), weights.tensors()[name].view(torch.uint8))
    ep = SPEC.shard(ep=3, ep_rank=2)
    assert torch.equal(ExpertWeights.load(tmp_path / "a", ep).w2.view(torch.uint8), weights.w2[2:].view(torch.uint8))
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "ue8m0")
    after = load(tmp_path / "b")
    assert after.fmt == "ue8m0"
    for mine, original in zip(after.dequantize(), weights.dequantize(), strict=True):
        assert float((mine - original).norm() / original.norm()) < 0.05


def test_what_cannot_be_converted_says_why(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", "fp8_block")
    with pytest.raises(CheckpointError, match="cannot replace its source"):
        convert_checkpoint(tmp_path / "a", tmp_path / "x" / ".." / "a", "bf16")
    with pytest.raises(UnknownRecipe, match="int4"):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", "int4")
    with pytest.raises(CheckpointError, match="nowhere is not a directory"):
        convert_checkpoint(tmp_path / "nowhere", tmp_path / "b", "bf16")
    lonely = tmp_path / "lonely"
    lonely.mkdir()
    save_file({"x.weight_scale_inv": torch.ones(1, 1)}, lonely / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"x\.weight_scale_inv has no weight"):
        convert_checkpoint(lonely, tmp_path / "b", "bf16")


def test_the_command_prints_errors_per_layer(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", "bf16")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "fp8"])
    assert result.exit_code == 0, result.output
    assert "3 file(s)" in result.output
    rows = [line for line in result.output.splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in rows] == ["0", "1"]
    assert all(0.02 < float(row.split()[5]) < 0.04 for row in rows)
    assert load(tmp_path / "b").fmt == "fp8_block"


def test_a_source_whose_files_are_not_all_there_is_refused_at_once(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", "fp8_block")
    (tmp_path / "a" / "model-layer-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-layer-00001\.safetensors, 1 file"):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", "ue8m0")
    assert not (tmp_path / "b").exists()
