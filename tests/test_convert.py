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
from graphmoe.errors import CheckpointError, UnsupportedShape
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


def test_a_finished_file_whose_source_changed_is_made_anew(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", "fp8_block")
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "bf16")
    random_weights(SPEC, "fp8_block", seed=9).save(tmp_path / "a", 0)
    again = convert_checkpoint(tmp_path / "a", tmp_path / "b", "bf16")
    assert [file.found for file in again] == [False, True, True]
    for mine, want in zip(load(tmp_path / "b").dequantize(), random_weights(SPEC, "fp8_block", seed=9).dequantize(), strict=True):
        assert torch.equal(mine, want.bfloat16().float())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refused(source: Path, target: Path, fmt: str, *parts: str) -> None:
    """CheckpointError with these parts; both directories are as before."""
    before = contents(source), contents(target) if target.is_dir() else target.exists()
    with pytest.raises(CheckpointError) as caught:
        convert_checkpoint(source, target, fmt)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert before == (contents(source), contents(target) if target.is_dir() else target.exists())


def test_a_target_with_other_files_is_refused_and_they_are_named(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "a", "fp8_block")
    convert_checkpoint(source, tmp_path / "b", "ue8m0")
    refused(source, tmp_path / "b", "bf16", "config.json", "model-layer-00000.safetensors", "and 1 more", "did not make")
    (tmp_path / "b" / "model.safetensors").write_bytes((tmp_path / "b" / "model-other.safetensors").read_bytes())
    (tmp_path / "b" / "notes.txt").touch()
    refused(source, tmp_path / "b", "ue8m0", "holds model.safetensors, notes.txt, which")
    (tmp_path / "b" / "model.safetensors").unlink()
    (tmp_path / "b" / "notes.txt").unlink()
    assert all(file.found for file in convert_checkpoint(source, tmp_path / "b", "ue8m0"))
    for name in ("config.json", "tokenizer.json", "model-layer-00000.safetensors", "x.bin"):
        foreign = tmp_path / f"foreign {name}"
        foreign.mkdir()
        (foreign / name).write_bytes((source / name).read_bytes() if (source / name).exists() else b"")
        refused(source, foreign, "ue8m0", f"holds {name}, which")
    refused(source, source / "config.json", "ue8m0", "config.json is a file, not a directory")
    (tmp_path / "with a folder" / ".cache").mkdir(parents=True)
    (tmp_path / "with a folder" / "model-layer-00000.99.tmp").touch()
    assert len(convert_checkpoint(source, tmp_path / "with a folder", "ue8m0")) == 3


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "it holds a list, not an object"),
        ("\xff", "cannot be read"),
        ('{"quantization_config": {"quant_method": "awq"}}', "quant_method='awq'"),
        ('{"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}}', "weight_block_size=[64, 128]"),
        ('{"quantization_config": "fp4"}', "quant_method='fp4'"),
    ],
)
def test_a_config_that_cannot_be_kept_is_refused_first(text: str, part: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "a", "fp8_block")
    (source / "config.json").write_bytes(text.encode("latin-1"))
    refused(source, tmp_path / "b", "ue8m0", "config.json", part)


def test_a_checkpoint_without_config_is_converted(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "a", "fp8_block")
    (source / "config.json").unlink()
    convert_checkpoint(source, tmp_path / "b", "ue8m0")
    assert not (tmp_path / "b" / "config.json").exists()


EXPERT = "model.layers.0.mlp.experts.0.down_proj.weight"


def one_file(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("target", ["fp8_block", "ue8m0", "bf16"])
@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        ({"model.layers.0.block_sparse_moe.experts.0.w1.weight": torch.ones(128, 128).bfloat16()}, "BF16 experts named"),
        ({EXPERT: torch.ones(128, 128).half()}, f"{EXPERT} is F16"),
        ({EXPERT: torch.ones(128, 128)}, f"{EXPERT} is F32"),
        ({EXPERT: torch.ones(128, 128).to(torch.float8_e4m3fn), EXPERT + "_scale": torch.ones(1)}, f"{EXPERT} is F8_E4M3 without {EXPERT}_scale_inv"),
        ({"model.norm.weight": torch.ones(128).bfloat16()}, "no weight that convert knows"),
    ],
    ids=["w1", "fp16", "fp32", "weight_scale", "no experts"],
)
def test_a_checkpoint_with_nothing_to_convert_is_refused(tensors: dict[str, torch.Tensor], part: str, target: str, tmp_path: Path) -> None:
    refused(one_file(tmp_path / "a", tensors), tmp_path / "b", target, "no weight that convert knows", part, "nothing written")


def good_expert(fmt: str = "bf16") -> dict[str, torch.Tensor]:
    weights = random_weights(MoESpec(1, 1, 128, 128), fmt)
    tensors = {EXPERT: weights.w2[0].clone()}
    return tensors if weights.w2_scale_inv is None else {**tensors, EXPERT + "_scale_inv": weights.w2_scale_inv[0].clone()}


@pytest.mark.parametrize(
    ("others", "part"),
    [
        ({"a.experts.1.up_proj.weight": torch.ones(128, 128).half()}, "a.experts.1.up_proj.weight is F16: experts must be BF16"),
        ({"a.q_proj.weight": torch.ones(128, 128).to(torch.float8_e4m3fn)}, "a.q_proj.weight is F8_E4M3 without"),
        ({"a.weight": torch.ones(128, 128).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 2)}, "a.weight_scale_inv is F32 (1, 2), not"),
        ({"a.weight": torch.ones(128, 128).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1)}, "a.weight_scale_inv is F32 (1,), not"),
        ({"a.weight": torch.ones(128, 128).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1).int()}, "a.weight_scale_inv is I32"),
        ({"a.weight": torch.ones(128).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1)}, "a.weight is (128,), not a matrix"),
        ({"a.weight": torch.ones(0, 128).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(0, 1)}, "a.weight is (0, 128), not a matrix"),
        ({"a.weight": torch.ones(128, 128).bfloat16(), "a.weight_scale_inv": torch.ones(1, 1)}, "a.weight is BF16 with a scale"),
        ({"a.weight_scale_inv": torch.ones(1, 1)}, "a.weight_scale_inv has no weight a.weight"),
    ],
    ids=["fp16 expert", "no scale", "scale shape", "scale rank", "scale dtype", "vector", "empty", "scaled bf16", "lonely scale"],
)
def test_weights_that_it_does_not_know_beside_those_it_does_are_refused(others: dict[str, torch.Tensor], part: str, tmp_path: Path) -> None:
    refused(one_file(tmp_path / "a", {**good_expert(), **others}), tmp_path / "b", "ue8m0", part, "nothing written")


@pytest.mark.parametrize("stored", ["fp8_block", "bf16"])
@pytest.mark.parametrize(("target", "divisor"), [("fp8_block", 128), ("ue8m0", 128), ("bf16", 64)])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (EXPERT, (128, 96)),
        (EXPERT, (96, 128)),
        ("model.layers.0.mlp.experts.gate_up_proj", (2, 192, 128)),
        ("model.layers.0.mlp.experts.gate_up_proj", (2, 256, 96)),
        ("model.layers.0.mlp.experts.down_proj", (2, 128, 96)),
        (EXPERT, (2, 128, 128)),
    ],
    ids=str,
)
def test_experts_that_the_format_cannot_store_are_refused(
    name: str, shape: tuple[int, ...], target: str, divisor: int, stored: str, tmp_path: Path
) -> None:
    """192 rows of gate and up are an intermediate size of 96."""
    tensors = {name: torch.ones(shape).bfloat16()}
    if stored == "fp8_block":
        tensors = {
            name: torch.ones(shape).to(torch.float8_e4m3fn),
            name + "_scale_inv": torch.ones(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)),
        }
    part = f"multiples of {divisor}" if len(shape) == 3 - name.endswith(".weight") else "not [N, K]"
    refused(one_file(tmp_path / "a", tensors), tmp_path / "b", target, f"{name} is {shape}", part, "nothing written")


def test_other_matrices_may_be_ragged(tmp_path: Path) -> None:
    ragged = {"a.kv_a_proj.weight": torch.ones(72, 130).to(torch.float8_e4m3fn), "a.kv_a_proj.weight_scale_inv": torch.full((1, 2), 0.3)}
    convert_checkpoint(one_file(tmp_path / "a", {**good_expert(), **ragged}), tmp_path / "b", "ue8m0")
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    assert tensors["a.kv_a_proj.weight"].shape == (72, 130)
    assert float((tensors["a.kv_a_proj.weight"].float() * tensors["a.kv_a_proj.weight_scale_inv"].float()[0, 0] - 0.3).abs().max()) < 0.015


@pytest.mark.parametrize("target", ["fp8_block", "ue8m0", "bf16"])
@pytest.mark.parametrize(
    ("stored", "what", "bad"),
    [
        ("bf16", "weight", torch.nan),
        ("bf16", "weight", torch.inf),
        ("bf16", "weight", -torch.inf),
        ("fp8_block", "weight", torch.nan),
        ("fp8_block", "scale", torch.nan),
        ("fp8_block", "scale", torch.inf),
        ("fp8_block", "scale", -1.0),
        ("fp8_block", "scale", 3e38),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_weights_that_are_not_finite_are_refused_by_name(stored: str, what: str, bad: float, fused: bool, target: str, tmp_path: Path) -> None:
    """Also where the format stays and nothing would be computed."""
    tensors = good_expert(stored)
    tensors[EXPERT + ("_scale_inv" if what == "scale" else "")][0, 0] = bad
    name = EXPERT
    if fused:
        prefix = "model.layers.0.mlp.experts.down_proj"
        good = good_expert(stored)
        tensors = {key.replace(EXPERT, prefix): torch.stack([good[key], tensor]) for key, tensor in tensors.items()}
        name = prefix if stored == target == "bf16" else f"{prefix}[1]"
    source = one_file(tmp_path / "a", tensors)
    why = {"weight": f"NaN or infinity in {name}; ", "scale": f"{name} has a scale that is NaN, infinite or negative; "}[what]
    if bad == 3e38:
        why = f"{name} times its scale is beyond {'bfloat16' if target == 'bf16' else 'float32'}; "
    refused(source, tmp_path / "b", target, why, "take this tensor from the original checkpoint")


def test_a_sound_file_before_a_broken_one_is_kept(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "a", "fp8_block")
    file = source / "model-layer-00001.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.0.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"NaN or infinity in model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight"):
        convert_checkpoint(source, tmp_path / "b", "ue8m0")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["model-layer-00000.safetensors"]
    random_weights(SPEC, "fp8_block", seed=1).save(source, 1)
    assert [file.found for file in convert_checkpoint(source, tmp_path / "b", "ue8m0")] == [True, False, False]


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
    with pytest.raises(UnsupportedShape, match="unknown format 'int4'; known: fp8_block, ue8m0, bf16"):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", "int4")
    with pytest.raises(CheckpointError, match="nowhere is not a directory"):
        convert_checkpoint(tmp_path / "nowhere", tmp_path / "b", "bf16")
    lonely = tmp_path / "lonely"
    lonely.mkdir()
    save_file({"x.weight_scale_inv": torch.ones(1, 1)}, lonely / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"x\.weight_scale_inv has no weight"):
        convert_checkpoint(lonely, tmp_path / "b", "bf16")


@pytest.mark.parametrize("name", ["fp8", "fp8_block"])
def test_the_command_prints_errors_per_layer(name: str, tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", "bf16")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--format", name])
    assert result.exit_code == 0, result.output
    assert "Weights now fp8_block: relative error per tensor" in result.output
    assert result.output.rstrip().endswith(f"3 files of weights in {tmp_path / 'b'}")
    again = CliRunner().invoke(app, ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--format", name])
    assert again.output.rstrip().endswith(f"3 files of weights in {tmp_path / 'b'}, 3 found finished from an earlier run")
    rows = [line for line in result.output.splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in rows] == ["0", "1"]
    assert all(0.02 < float(row.split()[5]) < 0.04 for row in rows)
    assert load(tmp_path / "b").fmt == "fp8_block"


def test_a_source_whose_files_are_not_all_there_is_refused_at_once(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", "fp8_block")
    (tmp_path / "a" / "model-layer-00001.safetensors").unlink()
    refused(tmp_path / "a", tmp_path / "b", "ue8m0", "the index names model-layer-00001.safetensors, not there; fetch")


def test_a_copy_without_conversion_prints_no_empty_table(tmp_path: Path) -> None:
    one_file(tmp_path / "a", good_expert())
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "bf16"])
    assert (result.exit_code, result.output) == (0, f"1 file of weights in {tmp_path / 'b'}\n")


def test_an_interrupted_command_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "a", "fp8_block")
    from graphmoe import convert as module

    write, written = module.write_file, []

    def stop_at_the_second(path: Path, tensors: dict, *, metadata: dict) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(path)
        write(path, tensors, metadata=metadata)

    arguments = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "ue8m0"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_file", stop_at_the_second)
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130
    assert result.stdout == ""
    assert result.stderr == f"interrupted after 36 tensors: the same command goes on, and keeps the files that are finished in {tmp_path / 'b'}\n"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "1 found finished" in result.stdout


def test_only_top_level_files_are_copied(tmp_path: Path) -> None:
    source = one_file(tmp_path / "a", good_expert())
    (source / "figures").mkdir()
    (source / "figures" / "x.png").touch()
    (source / "README.md").write_text("a model")
    convert_checkpoint(source, tmp_path / "b", "ue8m0")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["README.md", "model.safetensors", "model.safetensors.index.json"]
