"""The sanitizer's driver, with a stand-in for compute-sanitizer that prints what the real one prints."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tools import sanitize

CLEAN = "========= COMPUTE-SANITIZER\n12 passed in 3.21s\n========= ERROR SUMMARY: 0 errors\n"
BROKEN = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 16 bytes
=========     at _combine_kernel+0x1a0
=========     by thread (3,0,0) in block (7,0,0)
12 passed in 3.21s
========= ERROR SUMMARY: 2 errors
========= ERROR SUMMARY: 1 error
"""
RACY = "12 passed in 3.21s\n========= RACECHECK SUMMARY: 4 hazards displayed (4 errors, 0 warnings)\n"
SKIPPED = "12 skipped in 0.21s\n========= ERROR SUMMARY: 0 errors\n"
EXPECTED = "10 passed, 2 xfailed in 3.21s\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("said", "findings", "fails"),
    [(CLEAN, 0, False), (BROKEN, 3, True), (RACY, 4, True), (SKIPPED, 0, True), ("12 passed\n", None, True), ("", None, True), (EXPECTED, 0, False)],
)
def test_only_tests_that_ran_and_a_tool_that_found_nothing_pass(said: str, findings: int | None, fails: bool) -> None:
    outcome = sanitize.judge("memcheck", said, 0, "exit code 9")
    assert sanitize.failed(sanitize.judge("memcheck", said, 1)), "whatever was printed"
    assert outcome.findings == findings
    assert sanitize.failed(outcome) == fails
    assert ("_combine_kernel" in str(outcome)) == (said is BROKEN)
    assert said != "" or "exit code 9" in str(outcome)


def stand_in(folder: Path, said: str, *, seconds: float = 0, code: int = 0) -> None:
    program = folder / "compute-sanitizer"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys, time\nprint({said!r}, flush=True)\n"
        f"open({str(folder / 'asked')!r}, 'a').write(' '.join(sys.argv[1:]) + ' ' + os.environ.get('PYTORCH_NO_CUDA_MEMORY_CACHING', '0') + '\\n')\n"
        f"time.sleep({seconds})\nsys.exit({code})\n"
    )
    program.chmod(0o755)


def test_both_tools_run_over_the_kernels_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(tmp_path, CLEAN)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "argv", ["sanitize"])
    assert sanitize.main() == 0
    asked = (tmp_path / "asked").read_text().splitlines()
    assert ["--tool memcheck" in asked[0], "--tool racecheck" in asked[1]] == [True, True]
    assert [line[-1] for line in asked] == ["1", "0"], "the caching allocator is off for memcheck alone"
    assert all("--target-processes all" in line and " -x " in line for line in asked)
    assert all(test in line for test in sanitize.TESTS for line in asked)
    assert all((sanitize.ROOT / test).is_file() for test in sanitize.TESTS)
    assert capsys.readouterr().out.count("0 findings") == 2, asked
    stand_in(tmp_path, CLEAN, code=1)
    assert sanitize.main() == 1
    stand_in(tmp_path, BROKEN)
    monkeypatch.setattr(sys, "argv", ["sanitize", "--tool", "memcheck", "tests/gpu/test_packed.py"])
    assert sanitize.main() == 1
    assert "3 findings" in capsys.readouterr().out


def test_a_run_that_does_not_end_and_a_program_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, CLEAN, seconds=30)
    outcome = sanitize.run(str(tmp_path / "compute-sanitizer"), "memcheck", [], 1.5)
    assert outcome.findings == 0
    assert outcome.tests == "stopped after 1.5 s"
    assert sanitize.failed(outcome)
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    monkeypatch.setattr(sys, "argv", ["sanitize"])
    assert sanitize.main() == 2
