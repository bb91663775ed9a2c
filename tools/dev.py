#!/usr/bin/env python3
"""Set up graphmoe in a virtual environment of its own, then run its demo or its checks.

    python3 tools/dev.py demo [args]     what graphmoe does, on this machine; args go to `graphmoe demo`
    python3 tools/dev.py test [args]     formatting, lint, types, tests; args go to pytest
    python3 tools/dev.py setup           only the environment, with the test tools

Needs Python 3.11 or newer, nothing else. Without an NVIDIA GPU it installs the CPU build of torch. With one it uses the
torch that this interpreter has and never replaces it; where there is none, it installs the tested set `graphmoe[hopper]`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"  # of machines without a GPU
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
RUNTIME = ("torch", "filelock", "numpy", "safetensors", "typer", "rich", "transformers", "accelerate")
STATIC_CHECKS = (("ruff", "format", "--check", "."), ("ruff", "check", "."), ("mypy",))
PIP_STEPS = ("Collecting ", "Downloading ", "Building ", "Installing ")
LINE = 110
MARKER = "graphmoe-dev"  # in an environment that this script made, hence may replace
STAMP = "graphmoe-dev.stamp"  # what a finished environment was made from


class SetupFailed(Exception):
    """There is no environment to run in; the message is pip's output, or says what to do."""


@dataclass(frozen=True)
class Environment:
    """An interpreter that can import graphmoe; unless `complete`, it may lack ruff and mypy."""

    python: str
    gpu: bool
    complete: bool = True

    def run(self, *module: str, cwd: Path | None = None) -> int:
        return subprocess.run([self.python, "-m", *module], cwd=cwd, check=False).returncode


def say(text: str) -> None:
    print(f"dev: {text}", flush=True)


def has_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    return Path("/dev/nvidia0").exists() or (smi is not None and subprocess.run([smi], capture_output=True, check=False).returncode == 0)


def make_venv(path: Path, *, gpu: bool) -> None:
    """A new environment at `path`, in place of an older one only if this script made that; sees this Python's packages if `gpu`."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        if not (path / MARKER).exists():
            raise SetupFailed(f"{path} was not made by this script: delete it, or choose another place with --venv PATH")
        if Path(sys.prefix).resolve() == path:
            raise SetupFailed(f"{path} must be made anew, but this Python runs from it: `deactivate` it and start again")
        shutil.rmtree(path)
    say(f"making a virtual environment in {path}" + (" that sees the packages of this Python" if gpu else ""))
    path.mkdir(parents=True, exist_ok=True)
    (path / MARKER).touch()
    try:
        venv.EnvBuilder(system_site_packages=gpu, with_pip=True, symlinks=os.name != "nt").create(path)
    except subprocess.CalledProcessError as error:
        raise SetupFailed(f"{sys.executable} cannot make environments with pip (Debian: apt install python3-venv)") from error
    if gpu and sys.prefix != sys.base_prefix:  # from inside a venv, "system" means the base interpreter, not the venv that holds torch
        packages = sysconfig.get_path("purelib", "venv", vars={"base": str(path), "platbase": str(path)})
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
        Path(packages, "graphmoe-outer-packages.pth").write_text("".join(lines))


def pip_install(python: Path, *arguments: str, verbose: bool) -> None:
    """Run pip, one line a step; all of its output is shown if `verbose`, else kept for the error."""
    say("pip install " + " ".join(arguments))
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments]
    output = []
    with subprocess.Popen(command, cwd=ROOT, stdout=None if verbose else subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        for line in pip.stdout or ():
            output.append(line)
            step = line.strip()
            if step.startswith(PIP_STEPS) and ".metadata" not in step:
                say(f"  {step if len(step) <= LINE else step[: LINE - 3] + '...'}")
    if pip.returncode:
        raise SetupFailed("".join(output).strip() or "ERROR: pip failed, see its output above")


def install_cpu_torch(python: Path, *, verbose: bool) -> str:
    """Returns the requirement: on Linux only a version marked `+cpu`, for plain `torch` there is gigabytes of CUDA."""
    wanted = f"torch=={TORCH}+cpu" if platform.system() == "Linux" else f"torch=={TORCH}"
    output = ""
    for where in ((), ("--extra-index-url", CPU_INDEX, "--timeout", "15", "--retries", "1")):
        try:
            pip_install(python, wanted, *where, verbose=verbose)
            return wanted
        except SetupFailed as failure:
            output += f"{failure}\n\n"
    raise SetupFailed(f"{output}{wanted} came neither from pip's index nor from {CPU_INDEX}: go online, or set PIP_FIND_LINKS=FOLDER-OF-WHEELS")


def install(python: Path, *, gpu: bool, checks: bool, verbose: bool) -> None:
    """graphmoe, editable. Naming the torch that is there as a requirement keeps pip from replacing it."""
    if not gpu:
        torch, extras = [install_cpu_torch(python, verbose=verbose)], ["test" if checks else "transformers"]
    elif find_spec("torch"):
        torch, extras = [f"torch=={version('torch')}"], ["transformers"] + ["checks"] * checks
    else:
        torch, extras = [], ["hopper", "transformers"] + ["checks"] * checks
    patience = ["--retries", "1"] if gpu else []  # GPU machines are often offline, and there is a way to do without pip
    pip_install(python, *torch, "-e", f".[{','.join(extras)}]", *patience, verbose=verbose)


def from_source(reason: str, *, checks: bool) -> Environment:
    """This Python, with graphmoe straight from the source folder: for GPU machines where pip reaches no index."""
    absent = [name for name in RUNTIME + ("pytest", "hypothesis") * checks if find_spec(name) is None]
    if absent:
        raise SetupFailed(f"{reason}\n\nNothing was installed, and {sys.executable} itself lacks {', '.join(absent)}.")
    lines = reason.splitlines()
    say("not installed: " + next((line.strip(" │") for line in reversed(lines) if "ERROR:" in line), lines[-1]))
    say(f"{sys.executable} has what is needed: running from the source folder" + (", without ruff and mypy" if checks else ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return Environment(sys.executable, gpu=True, complete=False)


def prepare(path: Path, *, checks: bool, verbose: bool) -> Environment:
    """A finished environment at `path`: at once if its stamp fits, else made or brought up to date."""
    gpu = has_gpu()
    machine = f"python {platform.python_version()}, gpu {gpu}, {ROOT}\n"
    sources = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    wanted, with_checks = (f"{machine}{sources}\nchecks {c}\n" for c in (checks, True))
    python, stamp = path / ("Scripts/python.exe" if os.name == "nt" else "bin/python"), path / STAMP
    found = stamp.read_text() if stamp.exists() and python.exists() else ""
    if found not in (wanted, with_checks):
        stamp.unlink(missing_ok=True)  # an interrupted set-up leaves none, and the next one starts anew
        try:
            if not found.startswith(machine):
                make_venv(path, gpu=gpu)
            install(python, gpu=gpu, checks=checks, verbose=verbose)
        except SetupFailed as failure:
            if gpu:
                return from_source(str(failure), checks=checks)
            raise
        stamp.write_text(wanted)
    return Environment(str(python), gpu)


def run_checks(environment: Environment, pytest_arguments: list[str]) -> int:
    """The exit code of the first check that fails, or of pytest, which comes last."""
    for check in STATIC_CHECKS if environment.complete else ():
        say(" ".join(check))
        if code := environment.run(*check, cwd=ROOT):
            return code
    workers = () if environment.gpu else ("-n", str(min(2, os.cpu_count() or 1)))  # tests on one GPU must not run side by side
    say(" ".join(("pytest", *workers, *pytest_arguments)))
    return environment.run("pytest", *workers, *pytest_arguments, cwd=ROOT)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", metavar="PATH", help="where the environment is (default: .venv here)")
    parser.add_argument("-v", "--verbose", action="store_true", help="show all of pip's output; stands before the command")
    commands = parser.add_subparsers(dest="command", required=True, metavar="demo|test|setup")
    for name, text in {"demo": "run `graphmoe demo`", "test": "run ruff, mypy, pytest", "setup": "make the environment and stop"}.items():
        command = commands.add_parser(name, help=text, add_help=name != "demo", allow_abbrev=False)
        command.add_argument("--venv", type=Path, default=argparse.SUPPRESS, metavar="PATH", help="where the environment is")
        if name == "test":
            command.add_argument("--deep", action="store_true", help="many more hypothesis examples; the rest goes to pytest")
    options, rest = parser.parse_known_args()
    if rest and options.command == "setup":
        parser.error(f"setup takes no arguments: {' '.join(rest)}")
    return options, rest


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever python3 is here, say so before any download
        sys.exit(f"dev: graphmoe needs Python 3.11 or newer; {sys.executable} is {platform.python_version()}")
    options, rest = parse()
    try:
        environment = prepare(options.venv.resolve(), checks=options.command != "demo", verbose=options.verbose)
    except SetupFailed as failure:
        sys.exit(f"dev: the set-up failed\n{failure}")
    if options.command == "setup":
        say(f"ready: {environment.python}")
        return 0
    if options.command == "demo":
        return environment.run("graphmoe", "demo", *rest)
    os.environ["HYPOTHESIS_PROFILE"] = "deep" if options.deep else os.environ.get("HYPOTHESIS_PROFILE", "ci")
    return run_checks(environment, rest)


if __name__ == "__main__":
    sys.exit(main())
