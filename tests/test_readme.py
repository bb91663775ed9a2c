"""The README's example runs, and says what it claims."""

from __future__ import annotations

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def test_the_usage_example_runs(capsys) -> None:
    text = (ROOT / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(examples) == 1
    assert len([line for line in examples[0].splitlines() if line.strip()]) <= 10
    names: dict = {}
    exec(compile(examples[0], "README.md", "exec"), names)
    y = names["y"]
    assert y.shape == (3, 256)
    assert y.dtype == torch.bfloat16
    assert bool((y.abs().sum(-1) > 0).all())
    assert "psum block_e=64" in capsys.readouterr().out
