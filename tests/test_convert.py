"""Checkpoints rewritten in another format: values, names, config, resuming, and what may not happen on the way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from graphmoe import ExpertWeights, MoESpec, convert
from graphmoe.checkpoint import TensorFile, locked
from graphmoe.cli import app
from graphmoe.convert import convert_checkpoint
from graphmoe.errors import CheckpointError, UnsupportedShape
from graphmoe.formats.ue8m0 import is_power_of_two
from tests.checks import random_weights
from tests.test_ue8m0 import LiveBytes

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
@pytest.mark.parametrize("target", ["fp8_block", "ue8m0", "w4afp8", "bf16"])
def test_every_format_becomes_every_other(source: str, target: str, tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", source)
    files = convert_checkpoint(tmp_path / "a", tmp_path / "b", target)
    assert [file.found for file in files] == [False] * 3
    for layer in range(2):
        before, after = load(tmp_path / "a", layer), load(tmp_path / "b", layer)
        assert after.fmt == target
        for mine, original in zip(after.dequantize(), before.dequantize(), strict=True):
            assert float((mine - original).norm() / original.norm()) < {"fp8_block": 0.04, "ue8m0": 0.04, "w4afp8": 0.13, "bf16": 0.003}[target]
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
        assert quantisation["quant_method"] == ("w4afp8" if target == "w4afp8" else "fp8")
        assert quantisation["weight_block_size"] == [128, 128]
        assert quantisation.get("scale_fmt") == ("ue8m0" if target == "ue8m0" else None)
        assert "model.layers.0.self_attn.q_proj" in quantisation["modules_to_not_convert"]
        assert not any("experts" in name for name in quantisation["modules_to_not_convert"])
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    sizes = sum(t.nbytes for path in (tmp_path / "b").glob("*.safetensors") for t in load_file(path).values())
    assert index["metadata"]["total_size"] == sizes


def stop_in_the_second_file(patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when all of its tensors are written, but not its header."""
    finish, finished = TensorFile.finish, []

    def stop(self: TensorFile, metadata: dict[str, str]) -> None:
        if finished:
            raise KeyboardInterrupt
        finished.append(metadata)
        finish(self, metadata)

    patch.setattr(TensorFile, "finish", stop)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "a", "fp8_block", layers=3)
    with monkeypatch.context() as patch:
        stop_in_the_second_file(patch)
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(tmp_path / "a", tmp_path / "b", "ue8m0")
    assert names(tmp_path / "b") == ["model-layer-00000.safetensors"]
    first = (tmp_path / "b" / "model-layer-00000.safetensors").stat().st_mtime_ns
    steps: list[tuple[str, int, int]] = []
    resumed = convert_checkpoint(tmp_path / "a", tmp_path / "b", "ue8m0", lambda *step: steps.append(step))
    assert [file.found for file in resumed] == [True, False, False, False]
    assert steps[:2] == [("model-layer-00000.safetensors", 18, 56), ("model-layer-00001.safetensors", 19, 56)]
    assert [step[1:] for step in steps] == [(done, 56) for done in range(18, 57)]
    assert (tmp_path / "b" / "model-layer-00000.safetensors").stat().st_mtime_ns == first
    whole = convert_checkpoint(tmp_path / "a", tmp_path / "c", "ue8m0")
    assert [file.errors for file in resumed] == [file.errors for file in whole]
    for layer in range(3):
        for mine, want in zip(load(tmp_path / "b", layer).tensors().values(), load(tmp_path / "c", layer).tensors().values(), strict=True):
            assert torch.equal(mine.view(torch.uint8), want.view(torch.uint8))


def test_a_source_of_another_size_counts_as_changed(tmp_path: Path) -> None:
    """Though its time is the same: a copy that keeps times."""
    source = one_file(tmp_path / "a", good_expert())
    file = source / "model.safetensors"
    convert_checkpoint(source, tmp_path / "b", "ue8m0")
    before = file.stat()
    save_file(good_expert(), file, {"note": "longer"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert [file.found for file in convert_checkpoint(source, tmp_path / "b", "ue8m0")] == [False]
    assert [file.found for file in convert_checkpoint(source, tmp_path / "b", "ue8m0")] == [True]


def test_keys_that_count_elsewhere_now_are_not_kept(tmp_path: Path) -> None:
    """A rank saved its experts again: the full file is as it was, but no longer the one that counts for them."""
    source, target = tmp_path / "a", tmp_path / "b"
    random_weights(SPEC, "fp8_block", seed=1).save(source)
    convert_checkpoint(source, target, "bf16")
    random_weights(SPEC.shard(ep=3, ep_rank=1), "fp8_block", seed=2).save(source)
    again = convert_checkpoint(source, target, "bf16")
    assert [(file.name, file.found) for file in again] == [
        ("model-layer-00000-experts-0001-0001.safetensors", False),
        ("model-layer-00000.safetensors", False),
    ]
    for mine, want in zip(load(target).dequantize(), load(source).dequantize(), strict=True):
        assert torch.equal(mine, want.bfloat16().float())
    weight_map = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert {key for key, name in weight_map.items() if name == again[0].name} == set(load_file(target / again[0].name))
    assert {key for key, name in weight_map.items() if name == again[1].name} == set(load_file(target / again[1].name))


BROKEN_MARKS = ["", "{", "[]", "3", "null", '"x"', "[" * 5000, '{"made_from": 3}', '{"made_from": {"fmt": "ue8m0"}}']
NOT_ERRORS: list[Any] = [
    None,
    3,
    "x",
    {"a": 1},
    [3],
    [{}],
    [{"layer": 0, "key": "x", "relative_error": "y"}],
    [{"layer": None, "key": "", "relative_error": 0}],
]


@pytest.mark.parametrize("errors", NOT_ERRORS, ids=str)
def test_a_file_with_a_broken_note_of_its_errors_is_made_anew(errors: object, tmp_path: Path) -> None:
    source = one_file(tmp_path / "a", good_expert())
    convert_checkpoint(source, tmp_path / "b", "ue8m0")
    file = tmp_path / "b" / "model.safetensors"
    with safe_open(file, framework="pt") as stored:
        mark = json.loads(stored.metadata()["graphmoe.convert"])
    save_file(load_file(file), file, {"graphmoe.convert": json.dumps({**mark, "errors": mark["errors"]})})
    assert convert_checkpoint(source, tmp_path / "b", "ue8m0")[0].found
    save_file(load_file(file), file, {"graphmoe.convert": json.dumps({**mark, "errors": errors})})
    assert not convert_checkpoint(source, tmp_path / "b", "ue8m0")[0].found


@pytest.mark.parametrize("mark", BROKEN_MARKS, ids=lambda mark: mark[:20])
def test_a_broken_mark_is_none(mark: str, tmp_path: Path) -> None:
    """Of two files one is ours: the other is a stranger, or of our format and made anew."""
    source = checkpoint(tmp_path / "a", "bf16", layers=1)
    convert_checkpoint(source, tmp_path / "b", "ue8m0")
    file = tmp_path / "b" / "model-other.safetensors"
    save_file(load_file(file), file, {"graphmoe.convert": mark})
    if "fmt" in mark:
        assert [file.found for file in convert_checkpoint(source, tmp_path / "b", "ue8m0")] == [True, False]
    else:
        refused(source, tmp_path / "b", "ue8m0", "holds model-other.safetensors, which")


def test_a_finished_file_whose_source_changed_is_made_anew(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", "fp8_block")
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "bf16")
    random_weights(SPEC, "fp8_block", seed=9).save(tmp_path / "a", 0)
    again = convert_checkpoint(tmp_path / "a", tmp_path / "b", "bf16")
    assert [file.found for file in again] == [False, True, True]
    for mine, want in zip(load(tmp_path / "b").dequantize(), random_weights(SPEC, "fp8_block", seed=9).dequantize(), strict=True):
        assert torch.equal(mine, want.bfloat16().float())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but locks."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".lock"}


def names(folder: Path) -> list[str]:
    return sorted(contents(folder))


def refused(source: Path, target: Path, fmt: str, *parts: str) -> None:
    """CheckpointError with these parts; both directories are as before."""
    before = contents(source), contents(target)
    with pytest.raises(CheckpointError) as caught:
        convert_checkpoint(source, target, fmt)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert before == (contents(source), contents(target))


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
        ('{"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}', "activation_scheme='static'"),
        ('{"quantization_config": {"bits": 4}}', "quantization_config says quant_method=None"),
        ('{"quantization_config": "fp4"}', "quant_method='fp4'"),
        ('{"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}', "quant_method='compressed-tensors'"),
        ('{"compression_config": {"quant_method": "compressed-tensors"}}', "compression_config says quant_method='compressed-tensors'"),
        ('{"text_config": {"quantization_config": {"quant_method": "awq"}}}', "quant_method='awq'"),
        ('{"a": {"text_config": {"compression_config": {"format": "x"}}}, "quantization_config": {"quant_method": "fp8"}}', "quant_method=None"),
    ],
)
def test_a_config_that_cannot_be_kept_is_refused_first(text: str, part: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "a", "fp8_block")
    (source / "config.json").write_bytes(text.encode("latin-1"))
    refused(source, tmp_path / "b", "ue8m0", "config.json", part)


@pytest.mark.parametrize("fmt", ["ue8m0", "fp8_block", "bf16"])
@pytest.mark.parametrize("where", ["top", "text_config", "both", "none"])
def test_the_quantisation_is_stated_where_it_was(where: str, fmt: str, tmp_path: Path) -> None:
    """Readers take the first that they find: no old statement may stay."""
    source = checkpoint(tmp_path / "a", "bf16" if where == "none" else "fp8_block", layers=1)
    old = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "scale_fmt": "x"}}
    text = {"num_experts": 3} | (old if where in ("text_config", "both") else {})
    (source / "config.json").write_text(json.dumps({"text_config": text, "vision_config": {}} | (old if where in ("top", "both") else {})))
    convert_checkpoint(source, tmp_path / "b", fmt)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    stated = [config.pop("quantization_config", None), config["text_config"].pop("quantization_config", None)]
    assert config == {"text_config": {"num_experts": 3}, "vision_config": {}}
    assert [one is not None for one in stated] == [fmt != "bf16" and where != "text_config", fmt != "bf16" and where in ("text_config", "both")]
    for one in stated:
        assert one is None or one["weight_block_size"] == [128, 128]
        assert one is None or one.get("scale_fmt") == ("ue8m0" if fmt == "ue8m0" else None)


def test_links_in_the_target_are_replaced_and_never_followed(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "a", "fp8_block", layers=1)
    target = tmp_path / "b"
    convert_checkpoint(source, target, "ue8m0")
    before, want = contents(source), contents(target)
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        (target / name).unlink()
        (target / name).symlink_to(source / name)
    assert all(file.found for file in convert_checkpoint(source, target, "ue8m0"))
    assert contents(source) == before
    assert contents(target) == want
    assert not any(path.is_symlink() for path in target.iterdir())


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors.index.json"])
def test_a_small_file_is_old_or_new_as_a_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint(tmp_path / "a", "bf16", layers=1)
    convert_checkpoint(source, tmp_path / "b", "ue8m0")
    before = contents(tmp_path / "b")
    replace = Path.replace

    def fail(self: Path, to: Path) -> Path:
        if Path(to).name == name:
            assert self.stat().st_size > 0
            raise OSError("disk full")
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(CheckpointError, match=f"{name} cannot be written: disk full"):
        convert_checkpoint(source, tmp_path / "b", "ue8m0")
    assert contents(tmp_path / "b") == before


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "a", "bf16", layers=1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ".graphmoe.0123.tmp").touch()
    (tmp_path / "b" / "theirs.tmp").touch()
    convert_checkpoint(source, tmp_path / "b", "ue8m0")
    assert [name for name in names(tmp_path / "b") if name.endswith(".tmp")] == ["theirs.tmp"]


def test_a_second_conversion_at_the_same_time_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "a", "bf16", layers=1)
    convert_checkpoint(source, tmp_path / "b", "ue8m0")
    with locked(tmp_path / "b" / ".graphmoe.convert.lock"):
        refused(source, tmp_path / "b", "ue8m0", "another process writes into", "wait until it has ended")
    assert all(file.found for file in convert_checkpoint(source, tmp_path / "b", "ue8m0"))


def test_paths_may_be_text(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", "bf16", layers=1)
    convert_checkpoint(str(tmp_path / "a"), str(tmp_path / "b"), "ue8m0")
    assert load(tmp_path / "b").fmt == "ue8m0"


def test_files_in_folders_that_the_index_names_are_converted(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "a", "fp8_block", layers=1)
    (source / "sub").mkdir()
    (source / "model-layer-00000.safetensors").rename(source / "sub" / "x.safetensors")
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-layer-00000", "./sub//x"))
    assert [file.name for file in convert_checkpoint(source, tmp_path / "b", "bf16")] == ["model-other.safetensors", "sub/x.safetensors"]
    for mine, want in zip(load(tmp_path / "b").dequantize(), load(source).dequantize(), strict=True):
        assert torch.equal(mine, want.bfloat16().float())
    assert all(file.found for file in convert_checkpoint(source, tmp_path / "b", "bf16"))
    foreign = tmp_path / "c"
    (foreign / "sub").mkdir(parents=True)
    (foreign / "sub" / "x.safetensors").touch()
    refused(source, foreign, "bf16", "holds sub/x.safetensors, which")
    linked = tmp_path / "d"
    linked.mkdir()
    (linked / "sub").symlink_to(source / "sub")
    elsewhere = tmp_path / "e"
    elsewhere.mkdir()
    for folder in (source / "sub", elsewhere):
        (linked / "sub").unlink()
        (linked / "sub").symlink_to(folder)
        refused(source, linked, "bf16", f"sub/x.safetensors leads to {folder}", "outside of the result or into its source")


def test_a_target_within_the_source_cannot_replace_its_files(tmp_path: Path) -> None:
    source = one_file(tmp_path / "a", good_expert())
    convert_checkpoint(source, source / "sub", "ue8m0")
    (source / "model.safetensors").rename(source / "x.safetensors")
    tensors = load_file(source / "sub" / "model.safetensors")
    other = {"model.layers.1.mlp.experts.0.down_proj.weight": torch.ones(128, 128).bfloat16()}
    save_file(other, source / "model.safetensors")
    weight_map = {**dict.fromkeys(tensors, "sub/model.safetensors"), **dict.fromkeys(other, "model.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(source, source / "sub", "ue8m0", "sub/model.safetensors leads to", "into its source")


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "sub/../../x.safetensors"])
def test_files_outside_of_the_source_are_refused(name: str, tmp_path: Path) -> None:
    source = one_file(tmp_path / "a", good_expert())
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {EXPERT: name}}))
    refused(source, tmp_path / "b", "ue8m0", f"the index names {name}, outside of the directory")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json", "README.md"])
def test_a_directory_in_the_way_of_a_file_is_refused_first(name: str, tmp_path: Path) -> None:
    source = one_file(tmp_path / "a", good_expert())
    (source / "README.md").touch()
    (tmp_path / "b" / name).mkdir(parents=True)
    refused(source, tmp_path / "b", "ue8m0", f"{name} is a directory, where a file of the result must be written")


def test_tensors_of_any_dtype_are_copied_bit_for_bit(tmp_path: Path) -> None:
    """Also those that torch does not know, of no dimension or no element, and longer than a piece."""
    others = {
        "a.bias": torch.tensor(3),
        "b.none": torch.empty(0, 4, dtype=torch.float64),
        "c.mask": torch.tensor([True, False, True]),
        "d.long": torch.arange(400_001),
        "e.complex": torch.randn(3, dtype=torch.complex64),
        "f.scale": torch.rand(3).to(torch.float8_e5m2),
    }
    source = one_file(tmp_path / "a", {**good_expert(), **others})
    with TensorFile(source / "more.safetensors", {"g.packed": ("F4", (6,)), "h.six": ("F6_E2M3", (4,))}, {}) as file:
        file.append("g.packed", b"abc")
        file.append("h.six", b"def")
        file.finish({})
    convert_checkpoint(source, tmp_path / "b", "ue8m0")
    after = load_file(tmp_path / "b" / "model.safetensors")
    for key, tensor in others.items():
        assert (after[key].dtype, after[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(after[key].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))
    raw = (tmp_path / "b" / "more.safetensors").read_bytes()
    assert b"defabc" in raw or b"abcdef" in raw


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
        name = f"{prefix}[1]"
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
    assert names(tmp_path / "b") == ["model-layer-00000.safetensors"]
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
    first = load(split)
    for key in scales:
        scales[key] *= 3
    save_file(scales, split / "a-scales.safetensors")
    assert [file.found for file in convert_checkpoint(split, tmp_path / "b", "ue8m0")] == [False, False]
    for mine, old in zip(load(tmp_path / "b").dequantize(), first.dequantize(), strict=True):
        assert float((mine - 3 * old).norm() / (3 * old).norm()) < 0.05
    assert [file.found for file in convert_checkpoint(split, tmp_path / "b", "ue8m0")] == [True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu], ids=str)
def test_scales_of_another_dtype_become_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = random_weights(SPEC, "ue8m0")
    file = weights.save(tmp_path / "a")
    save_file({key: tensor.to(dtype) if key.endswith("_scale_inv") else tensor for key, tensor in load_file(file).items()}, file)
    errors = convert_checkpoint(tmp_path / "a", tmp_path / "b", "fp8_block")[0].errors
    assert all(error.relative_error == 0 for error in errors)
    assert {tensor.dtype for key, tensor in load_file(tmp_path / "b" / file.name).items() if key.endswith("_scale_inv")} == {torch.float32}
    after = load(tmp_path / "b")
    assert after.fmt == "fp8_block"
    for name, tensor in after.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), weights.tensors()[name].view(torch.uint8))


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
    (file,) = convert_checkpoint(tmp_path / "a", tmp_path / "b", "ue8m0")
    after = load(tmp_path / "b")
    assert after.fmt == "ue8m0"
    errors = {error.key: error for error in file.errors}
    for name, mine, original in zip(("gate_up_proj", "down_proj"), after.dequantize(), weights.dequantize(), strict=True):
        error = float((mine - original).norm() / original.norm())
        assert 0.01 < error < 0.05
        assert errors[prefix + name].relative_error == pytest.approx(error, rel=1e-4)
        assert errors[prefix + name].layer == 0


@pytest.mark.parametrize("target", ["fp8_block", "ue8m0", "w4afp8", "bf16"])
@pytest.mark.parametrize("stored", ["fp8_block", "bf16"])
def test_pieces_make_the_same_file(stored: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused, per expert and ragged; a block of rows at a time, several, or all."""
    weights = random_weights(MoESpec(2, 1, 256, 384), stored)
    source = weights.save(tmp_path / "a").parent
    fused = {f"a.experts.{name}": tensor for name, tensor in {"gate_up_proj": weights.w13, "gate_up_proj_scale_inv": weights.w13_scale_inv}.items()}
    fused |= {"a.kv.weight": torch.ones(300, 130).to(torch.float8_e4m3fn), "a.kv.weight_scale_inv": torch.rand(3, 2)}
    save_file({key: tensor for key, tensor in fused.items() if tensor is not None}, source / "fused.safetensors")
    (source / "model.safetensors.index.json").unlink()
    made = []
    for piece in (1, 512 * 256, 1 << 30):
        monkeypatch.setattr(convert, "PIECE", piece)
        errors = [error for file in convert_checkpoint(source, tmp_path / str(piece), target) for error in file.errors]
        tensors = {key: tensor for file in (tmp_path / str(piece)).glob("*.safetensors") for key, tensor in load_file(file).items()}
        made.append((tensors, {error.key: error.relative_error for error in errors}))
    for tensors, errors in made[1:]:
        assert errors == pytest.approx(made[0][1], rel=1e-9)
        assert tensors.keys() == made[0][0].keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor.view(torch.uint8), made[0][0][key].view(torch.uint8)), key


@pytest.mark.parametrize("target", ["fp8_block", "ue8m0", "w4afp8", "bf16"])
@pytest.mark.parametrize("stored", ["fp8_block", "bf16"])
@pytest.mark.parametrize("fused", [False, True])
def test_memory_does_not_grow_with_the_file(fused: bool, stored: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes alive beside the pages of the mapped source; the allocator's own waste is what tools/measure_memory.py measures."""
    monkeypatch.setattr(convert, "PIECE", 1)
    peaks = []
    for experts in (1, 6):
        spec = MoESpec(experts, 1, 384, 256)
        weights = random_weights(spec, stored)
        source = tmp_path / f"source {experts}"
        if fused:
            tensors = {f"a.experts.{name}": tensor for name, tensor in zip(("gate_up_proj", "down_proj"), (weights.w13, weights.w2), strict=True)}
            if weights.w13_scale_inv is not None and weights.w2_scale_inv is not None:
                tensors |= {"a.experts.gate_up_proj_scale_inv": weights.w13_scale_inv, "a.experts.down_proj_scale_inv": weights.w2_scale_inv}
            one_file(source, tensors)
        else:
            weights.save(source)
        mapped = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        with LiveBytes([]) as live:
            convert_checkpoint(source, tmp_path / f"target {experts}", target)
        assert live.peak < convert.peak_bytes(384) // 2 + mapped
        peaks.append(live.peak - (mapped if fused else 0))
    assert peaks[1] - peaks[0] < 4096


def test_what_cannot_be_converted_says_why(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", "fp8_block")
    with pytest.raises(CheckpointError, match="cannot replace its source"):
        convert_checkpoint(tmp_path / "a", tmp_path / "x" / ".." / "a", "bf16")
    with pytest.raises(UnsupportedShape, match="unknown format 'int4'; known: fp8_block, ue8m0, w4afp8, bf16"):
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
    arguments = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "ue8m0"]
    with monkeypatch.context() as patch:
        stop_in_the_second_file(patch)
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
    for name in (".model.safetensors.index.json.lock", "x.lock", "x.tmp", "unused.safetensors"):
        (source / name).touch()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {EXPERT: "model.safetensors"}}))
    convert_checkpoint(source, tmp_path / "b", "ue8m0")
    present = [path.name for path in (tmp_path / "b").iterdir() if path.name != ".graphmoe.convert.lock"]
    assert sorted(present) == ["README.md", "model.safetensors", "model.safetensors.index.json"]
