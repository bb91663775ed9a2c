"""The README's examples run, in order and in one folder, and it says what it claims; its source can be read in a terminal."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from graphmoe import ExpertWeights, MoERuntime, MoESpec

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_the_examples_run(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(examples) == 3
    names: dict = {}
    for example in examples:
        assert len([line for line in example.splitlines() if line.strip()]) <= 10
        exec(compile(example, "README.md", "exec"), names)
    y = names["y"]
    assert y.shape == (3, 256)
    assert y.dtype == torch.bfloat16
    assert bool((y.abs().sum(-1) > 0).all())
    printed = capsys.readouterr().out
    assert "1 layer on cpu, fp8_block" in printed
    assert [len(tokens) for tokens in names["out"]] == [16, 16]
    assert "32 new tokens" in printed

    assert names["published"] == MoESpec(128, 8, 2048, 768, num_local_experts=16, expert_offset=48)
    first = names["spec"].shard(ep=2, ep_rank=0)
    with MoERuntime(first, ExpertWeights.load("checkpoint", first, layer=3), buckets=[4]) as other:
        both = other(names["x"], first.to_local(names["topk_ids"]), names["topk_weights"]) + names["part"]
    assert float((both - y).norm() / y.norm()) < 0.06
    assert sorted(path.name for path in (tmp_path / "checkpoint").glob("*.safetensors")) == ["model-layer-00003.safetensors"]


def test_its_lines_fit_the_line_length_of_the_project() -> None:
    assert [line for line in TEXT.splitlines() if len(line) > 150] == []


def test_it_names_every_file_of_the_package() -> None:
    """Under "Where things are"; a folder stands for what is in it."""
    tree = TEXT[TEXT.index("## Where things are") :]
    files = [path.name for path in (ROOT / "graphmoe").iterdir() if path.suffix == ".py" and not path.name.startswith("__")]
    folders = [f"{path.name}/" for path in (ROOT / "graphmoe").iterdir() if (path / "__init__.py").is_file()]
    assert [name for name in files + folders if name not in tree] == []
