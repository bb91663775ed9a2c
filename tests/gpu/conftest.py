"""GPU tests skip by themselves without a GPU. Every kernel that they need is compiled first, by parallel processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from tests.gpu.cases import CASES, SMALL_CASES, Case

ROOT = Path(__file__).parents[2]
_IN_A_WORKER = "PYTEST_XDIST_WORKER" in os.environ
_LINES = "GRAPHMOE_GPU_TEST_LINES"
"""Names the file of lines, also to worker processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Warm deep_gemm's and Triton's caches on disk, one process a case; of several test processes the first does it for all."""
    started = time.perf_counter()

    def warm(case: Case) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.cases", case.name], cwd=ROOT, env={**os.environ, "PYTHONPATH": _path()}, capture_output=True, text=True
        )
        return "" if done.returncode == 0 else f"{case.name}:\n{done.stderr[-2000:]}"

    shared = tmp_path_factory.getbasetemp().parent if _IN_A_WORKER else tmp_path_factory.getbasetemp()
    with FileLock(shared / "compiled.lock"):
        if (shared / "compiled").exists():
            return
        # deep_gemm's kernels for ue8m0 on SM90 are those for fp8_block.
        cases = [case for case in (*CASES, *SMALL_CASES) if case.fmt != "ue8m0"]
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            failures = [failure for failure in pool.map(warm, cases) if failure]
        Table().append(f"compiled {len(cases)} cases by parallel processes in {time.perf_counter() - started:.0f} s")
        assert not failures, "\n".join(failures[:2])
        (shared / "compiled").touch()


class Table:
    """Lines that are printed when all tests of all processes are done."""

    def append(self, line: str) -> None:
        with Path(os.environ[_LINES]).open("a") as file:
            file.write(line + "\n")


@pytest.fixture(scope="session")
def table() -> Table:
    return Table()


def pytest_configure() -> None:
    """One file for the lines of this process and of those that it starts."""
    if not _IN_A_WORKER:
        descriptor, os.environ[_LINES] = tempfile.mkstemp(suffix=".txt")
        os.close(descriptor)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _IN_A_WORKER:
        return
    file = Path(os.environ[_LINES])
    lines = sorted(file.read_text().splitlines())
    file.unlink()
    if lines:
        terminalreporter.section("what the GPU tests measured")
        for line in lines:
            terminalreporter.line(line)


def _path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
