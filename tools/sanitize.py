"""Rerun the GPU kernels' tests under compute-sanitizer: `python -m tools.sanitize`.

memcheck finds accesses outside of allocations and misaligned ones, racecheck hazards in shared memory. (Races between kernels that overlap, as
programmatic launch lets them, are in global memory: racecheck does not see them, `graphmoe verify --soak` is for those.) torch's caching allocator is
off under memcheck, so that every tensor is an allocation of its own and the first byte behind it is outside.

Exit code: 0 without a finding, 1 with one or where the tests fail, 2 where compute-sanitizer does not run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck")
TESTS = ("tests/gpu/test_kernels.py", "tests/gpu/test_packed.py", "tests/gpu/test_requantize.py")
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


@dataclass(frozen=True)
class Outcome:
    """What one tool said: findings (None where it gave no summary), pytest's last line, the first lines of the first finding, and how it ended (None:
    it was stopped).
    """

    tool: str
    findings: int | None
    tests: str
    first: str
    returncode: int | None

    def __str__(self) -> str:
        found = "no summary" if self.findings is None else f"{self.findings} findings"
        return f"{self.tool:<10} {found:<14} {self.tests}" + (f"\n{self.first}" if self.first else "")


def sanitizer() -> str | None:
    """The program, on PATH or in the CUDA toolkit."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin{os.pathsep}{home}/compute-sanitizer")


def run(program: str, tool: str, tests: list[str], timeout: float) -> Outcome:
    """One tool over the tests."""
    command = [program, "--tool", tool, "--target-processes", "all", "--print-limit", "20", sys.executable, "-m", "pytest", "-q", "-x", *tests]
    caching = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}
    environment = {**os.environ, **caching, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            returncode: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            returncode = None
            os.killpg(process.pid, signal.SIGKILL)  # its children, too: they hold the GPU
            process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")
    return judge(tool, said, returncode, f"stopped after {timeout:g} s" if returncode is None else f"exit code {returncode}")


def judge(tool: str, said: str, returncode: int | None, ended: str = "") -> Outcome:
    """Read what a run printed. compute-sanitizer prints a summary a process: they are added."""
    counts = [int(match[1] or match[2]) for match in _SUMMARY.finditer(said)]
    passed = [line.strip("= ") for line in said.splitlines() if re.search(r"\d+ (passed|failed|skipped)", line)]
    lines = said.splitlines()
    errors = [number for number, line in enumerate(lines) if re.match(r"=+ (Invalid|Error|Warning: Race|Misaligned|Program hit)", line)]
    first = "\n".join(lines[errors[0] : errors[0] + 8]) if errors else ""
    return Outcome(tool, sum(counts) if counts else None, passed[-1] if passed and returncode is not None else ended, first, returncode)


def failed(outcome: Outcome) -> bool:
    """Whether an outcome is anything but: tests ran and passed, and the tool found nothing."""
    return outcome.findings != 0 or outcome.returncode != 0 or "passed" not in outcome.tests


def main() -> int:
    """Run the tools one after the other and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=TOOLS, action="append", help="one of them; both by default")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each tool")
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="pytest arguments; the kernels' tests by default")
    options = parser.parse_args()
    program = sanitizer()
    if program is None:
        print(
            "compute-sanitizer is neither on PATH nor in the CUDA toolkit: install it (it comes with the toolkit) or set CUDA_HOME", file=sys.stderr
        )
        return 2
    outcomes = [run(program, tool, options.tests, options.timeout) for tool in options.tool or TOOLS]
    for outcome in outcomes:
        print(outcome)
    return 1 if any(map(failed, outcomes)) else 0


if __name__ == "__main__":
    sys.exit(main())
