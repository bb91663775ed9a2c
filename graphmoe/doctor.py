"""Doctor: what this machine has, whether it works together, and the command that mends what does not."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from graphmoe.buckets import BucketLadder
from graphmoe.device import arch_of, resolve_device
from graphmoe.formats import FORMATS, get_format
from graphmoe.gemm.deep_gemm import PROVEN, diagnosis
from graphmoe.paths import PATHS, why_not
from graphmoe.profile import device_slug, profiles_root
from graphmoe.provenance import version_of
from graphmoe.recipe import Recipe
from graphmoe.spec import MoESpec
from graphmoe.verify import Verifier, verify

SPEC = MoESpec(16, 4, 256, 256, routed_scaling_factor=1.5)
"""The layer of the self-check."""
_ARCHS = {"sm90": "", "sm100": "; the plan and the weights for it are tested, its GEMMs have not been run"}
_CALLS = 12
_PIP = f"{sys.executable} -m pip install"


class State(StrEnum):
    """How a check came out."""

    OK = "ok"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One thing looked at; `remedy` is the command that mends a failure."""

    name: str
    state: State
    what: str
    remedy: str = ""


def examine() -> Iterator[Check]:
    """Every check, in an order in which a failure explains those that follow."""
    yield Check("python", State.OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield _torch()
    gpu = torch.cuda.is_available()
    yield _gpu() if gpu else _no_gpu()
    for name, check in (("cuda-python", _cuda_python), ("triton", _triton), ("nvcc", _nvcc), ("deep_gemm", _deep_gemm)):
        yield check() if gpu else Check(name, State.SKIPPED, "only a GPU needs it")
    for name, variable, home in (("triton cache", "TRITON_CACHE_DIR", "~/.triton/cache"), ("deep_gemm cache", "DG_JIT_CACHE_DIR", "~/.deep_gemm")):
        yield _cache(name, variable, home) if gpu else Check(name, State.SKIPPED, "only a GPU needs it")
    yield _profiles(torch.cuda.get_device_name()) if gpu else Check("profiles", State.SKIPPED, "only a GPU needs them")
    for fmt in FORMATS:
        for path in PATHS:
            yield self_check(path, fmt, resolve_device("cuda" if gpu else "cpu"))


def self_check(path: str, fmt: str, device: torch.device) -> Check:
    """A small layer on this device against the oracle: other routings from call to call, poisoned scratch, guard bands."""
    name = f"{path}, {fmt}"
    refused = why_not(path, SPEC, get_format(fmt).on(arch_of(device)), arch_of(device))
    if refused:
        return Check(name, State.SKIPPED, refused)
    try:
        verifier = Verifier(SPEC, fmt, BucketLadder.of([1, 8, 64]), Recipe(path), device)
        try:
            verify(verifier, _CALLS)
        finally:
            verifier.close()
    except Exception as error:  # a library's, a compiler's or the driver's: any of them is the answer
        return Check(name, State.FAILED, f"{type(error).__name__}: {error}", f"graphmoe verify --path {path} --format {fmt}")
    return Check(name, State.OK, f"{verifier.calls} calls, worst row off by {verifier.worst:.4f} of its norm")


def _torch() -> Check:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    what = f"{torch.__version__}, {build}"
    if torch.version.cuda is None and _has_nvidia_driver():
        return Check("torch", State.FAILED, f"{what}, but this machine has an NVIDIA driver", f"{_PIP} 'graphmoe[hopper]'")
    return Check("torch", State.OK, what)


def _gpu() -> Check:
    device = resolve_device("cuda")
    facts = torch.cuda.get_device_properties(device)
    arch = arch_of(device)
    what = f"{facts.name}, {arch}, {facts.total_memory / 2**30:.0f} GiB, {facts.multi_processor_count} SMs"
    if arch not in _ARCHS:
        return Check(
            "gpu", State.FAILED, f"{what}; graphmoe's kernels are for {', '.join(_ARCHS)}", "run on the CPU with device='cpu', or on such a GPU"
        )
    return Check("gpu", State.OK, what + _ARCHS[arch])


def _no_gpu() -> Check:
    if torch.version.cuda and _has_nvidia_driver():
        return Check("gpu", State.FAILED, "there is an NVIDIA driver, but torch sees no device (CUDA_VISIBLE_DEVICES, driver version?)", "nvidia-smi")
    return Check("gpu", State.SKIPPED, "none; planning, conversion and the step in plain torch work without")


def _has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _cuda_python() -> Check:
    try:
        answer, version = importlib.import_module("cuda.bindings.driver").cuDriverGetVersion()
    except Exception as error:
        return Check("cuda-python", State.FAILED, f"does not load: {error}; captured graphs cannot be read back", f"{_PIP} cuda-python")
    if int(answer):
        return Check("cuda-python", State.FAILED, f"the driver answers {answer}", "nvidia-smi")
    return Check(
        "cuda-python",
        State.OK,
        f"{version_of('cuda-bindings', 'unknown version')}, the driver supports CUDA {version // 1000}.{version % 1000 // 10}",
    )


def _triton() -> Check:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Check("triton", State.FAILED, "TRITON_INTERPRET=1 interprets every kernel on the CPU", "unset TRITON_INTERPRET")
    try:
        importlib.import_module("triton")
    except Exception as error:
        return Check("triton", State.FAILED, f"does not load: {error}", f"{_PIP} triton")
    return Check("triton", State.OK, version_of("triton", "unknown version"))


def _nvcc() -> Check:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    found = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
    if found is None:
        what = f"neither on PATH nor in {home}/bin; deep_gemm compiles its kernels with it"
        return Check("nvcc", State.FAILED, what, "install NVIDIA's CUDA toolkit, then export CUDA_HOME=/usr/local/cuda")
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Check("nvcc", State.FAILED, f"{found} does not run: {error}", "install NVIDIA's CUDA toolkit")
    release = re.search(r"release ([\d.]+)", said)
    return Check("nvcc", State.OK, f"{release[1] if release else 'unknown version'}, {found}")


def _deep_gemm() -> Check:
    what = diagnosis()
    minor = ".".join(torch.__version__.split(".")[:2])
    if "is a known pair" in what:
        return Check("deep_gemm", State.OK, what)
    pairs = PROVEN.get(minor)
    return Check("deep_gemm", State.FAILED, what, f"{_PIP} sgl-deep-gemm=={pairs[0]}" if pairs else f"{_PIP} 'graphmoe[hopper]'")


def _cache(name: str, variable: str, home: str) -> Check:
    """A folder that compiled kernels are kept in: it need not be there, but it must be possible to write it."""
    folder = Path(os.environ.get(variable) or home).expanduser()
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not os.access(there, os.W_OK) or not there.is_dir():
        return Check(name, State.FAILED, f"{folder} cannot be written", f"export {variable}=a folder that can be written")
    if there != folder:
        return Check(name, State.OK, f"{folder} is empty: the first build compiles for a minute or more")
    files = [file for file in folder.rglob("*") if file.is_file()]
    return Check(name, State.OK, f"{folder}, {len(files)} files, {sum(file.stat().st_size for file in files) / 2**20:.1f} MiB")


def _profiles(device_name: str) -> Check:
    found = sorted(file.stem for file in (profiles_root() / device_slug(device_name)).glob("*.json"))
    if not found:
        return Check("profiles", State.SKIPPED, f"none for {device_name}: auto follows a rule; `graphmoe tune --model M` measures one")
    return Check("profiles", State.OK, f"{len(found)} for {device_name}: {', '.join(found)}")
