"""The set-up script: what a user sees of pip while it works."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def dev() -> ModuleType:
    spec = importlib.util.spec_from_file_location("graphmoe_dev", ROOT / "tools" / "dev.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def fake_python(folder: Path, code: int) -> Path:
    """Something that answers `-m pip install ...` as pip does."""
    file = folder / "python"
    lines = [
        "Looking in links: x",
        "Collecting torch==2.13.0+cpu",
        "  Downloading torch-2.13.0.whl.metadata (30 kB)",
        "  Downloading torch-2.13.0.whl (190 MB)",
        "Requirement already satisfied: rich",
        "Installing collected packages: " + "a, " * 100,
        "ERROR: no space left" if code else "done",
    ]
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{chr(10).join(lines)}\nEND\nexit {code}\n")
    file.chmod(0o755)
    return file


def test_each_step_of_pip_is_a_line(dev: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dev.pip_install(fake_python(tmp_path, 0), "torch", verbose=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["dev: pip install torch", "dev:   Collecting torch==2.13.0+cpu", "dev:   Downloading torch-2.13.0.whl (190 MB)"]
    assert lines[3].startswith("dev:   Installing collected packages: a, a, ")
    assert len(lines) == 4
    assert len(lines[3]) <= 120


def test_what_pip_said_is_in_the_error(dev: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(dev.SetupFailed, match=r"(?s)Looking in links.*ERROR: no space left$"):
        dev.pip_install(fake_python(tmp_path, 1), "torch", verbose=False)


def test_all_of_pip_is_shown_on_demand(dev: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(dev.SetupFailed, match="see its output above"):
        dev.pip_install(fake_python(tmp_path, 1), "torch", verbose=True)
    assert "Requirement already satisfied: rich" in capfd.readouterr().out
