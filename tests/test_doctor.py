"""What the doctor finds, and that each failure names the command that mends it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from graphmoe import doctor, reference
from graphmoe.cli import app
from graphmoe.doctor import Check, State, examine, self_check
from graphmoe.formats import FORMATS
from graphmoe.paths import PATHS


def test_every_path_and_format_is_checked_and_nothing_fails_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CALLS", 2)
    checks = list(examine())
    assert [check for check in checks if check.state is State.FAILED] == []
    run = {f"{name}, {fmt}" for name, path in PATHS.items() for fmt in FORMATS if path.weight_layout == FORMATS[fmt].layout}
    assert {check.name for check in checks if check.state is State.OK} >= run
    assert {check.name for check in checks if check.state is State.SKIPPED} >= {"nvcc", "deep_gemm", "cuda-python", "triton", "profiles"}
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert all(check.name in result.output for check in checks)
    assert "everything that this machine can run works" in result.output


def test_a_wrong_kernel_is_found_and_the_exit_code_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = reference.combine

    def doubled(*arguments: torch.Tensor, out: torch.Tensor, **named: float) -> None:
        sound(*arguments, out=out, **named)  # type: ignore[arg-type]
        out.mul_(2)

    monkeypatch.setattr(reference, "combine", doubled)
    check = self_check("psum", "bf16", torch.device("cpu"))
    assert check.state is State.FAILED
    assert "VerifyFailed" in check.what
    assert check.remedy == "graphmoe verify --path psum --format bf16"
    monkeypatch.setattr(sys.modules["graphmoe.cli.doctor"], "examine", lambda: iter([Check("python", State.OK, "3"), check]))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "FAILED" in result.output
    assert f"-> {check.remedy}" in result.output
    assert "1 checks failed" in result.output


def driver(answer: int) -> ModuleType:
    module = ModuleType("cuda.bindings.driver")
    module.cuDriverGetVersion = lambda: (answer, 13000)  # type: ignore[attr-defined]
    return module


def missing(name: str) -> ModuleType:
    raise ImportError(f"no {name}")


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch, Path], None], Callable[[], Check], str, str]] = {
    "a CPU build beside a driver": (
        lambda patch, _: patch.setattr(doctor, "_has_nvidia_driver", lambda: True), doctor._torch, "NVIDIA driver", "graphmoe[hopper]",
    ),
    "a driver and no device": (
        lambda patch, _: (patch.setattr(doctor, "_has_nvidia_driver", lambda: True), patch.setattr(torch.version, "cuda", "13.0")),
        doctor._no_gpu, "sees no device", "nvidia-smi",
    ),
    "no cuda-python": (
        lambda patch, _: patch.setattr(doctor.importlib, "import_module", missing), doctor._cuda_python, "no cuda", "pip install cuda-python",
    ),
    "a driver that answers an error": (
        lambda patch, _: patch.setattr(doctor.importlib, "import_module", lambda _: driver(3)), doctor._cuda_python, "answers 3", "nvidia-smi",
    ),
    "interpreted kernels": (lambda patch, _: patch.setenv("TRITON_INTERPRET", "1"), doctor._triton, "interprets", "unset TRITON_INTERPRET"),
    "no triton": (
        lambda patch, _: (patch.delenv("TRITON_INTERPRET", raising=False), patch.setattr(doctor.importlib, "import_module", missing)),
        doctor._triton, "no triton", "pip install triton",
    ),
    "no nvcc": (
        lambda patch, folder: (patch.setenv("CUDA_HOME", str(folder)), patch.setattr(doctor.shutil, "which", lambda *_, **__: None)),
        doctor._nvcc, "/bin; deep_gemm compiles", "CUDA_HOME",
    ),
    "an nvcc that fails": (
        lambda patch, _: (patch.setattr(doctor.shutil, "which", lambda *_, **__: "/bin/false")), doctor._nvcc, "does not run", "CUDA toolkit",
    ),
    "a wrong pair": (
        lambda patch, _: patch.setattr(doctor, "diagnosis", lambda: "deep_gemm 9 with torch 2.13 is not a known pair"),
        doctor._deep_gemm, "not a known pair", "pip install",
    ),
    "a cache in a file": (
        lambda patch, folder: ((folder / "file").touch(), patch.setenv("DG_JIT_CACHE_DIR", str(folder / "file" / "cache"))),
        lambda: doctor._cache("deep_gemm cache", "DG_JIT_CACHE_DIR", "~"), "cannot be written", "export DG_JIT_CACHE_DIR",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_check_with_a_remedy(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant, check, what, remedy = FAULTS[fault]
    plant(monkeypatch, tmp_path)
    found = check()
    assert found.state is State.FAILED
    assert what in found.what
    assert remedy in found.remedy


def test_sound_machines_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(doctor.importlib, "import_module", lambda name: driver(0))
    assert "CUDA 13.0" in doctor._cuda_python().what
    assert doctor._triton().state is State.OK
    monkeypatch.setattr(doctor.shutil, "which", lambda *_, **__: "/cuda/bin/nvcc")
    said = SimpleNamespace(stdout="Cuda compilation tools, release 13.0, V13.0.48")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    assert doctor._nvcc() == Check("nvcc", State.OK, "13.0, /cuda/bin/nvcc")
    monkeypatch.setattr(doctor, "diagnosis", lambda: "deep_gemm 0.1.5 with torch 2.11 is a known pair")
    assert doctor._deep_gemm().state is State.OK
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert "is empty" in doctor._cache("triton cache", "TRITON_CACHE_DIR", "~").what
    (tmp_path / "cache" / "deep").mkdir(parents=True)
    (tmp_path / "cache" / "deep" / "kernel").write_bytes(bytes(1 << 20))
    assert "1 files, 1.0 MiB" in doctor._cache("triton cache", "TRITON_CACHE_DIR", "~").what
    assert "qwen3-30b-a3b" in doctor._profiles("NVIDIA H200").what
    assert doctor._profiles("NVIDIA H800").state is State.SKIPPED
