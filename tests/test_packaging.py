"""The shape of the house: public names, what importing costs, which way imports go, and that what is shipped is what is there."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import graphmoe
from graphmoe import errors

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "graphmoe"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("spec", "bounds", "buckets", "recipe", "environment"),
    ("fallback", "router"),
    ("layout", "formats"),
    ("ops", "op", "flag", "report", "device", "payload"),
    ("kernels", "reference"),
    ("gemm", "paths", "dispatch"),
    ("checkpoint", "sharding", "profile"),
    ("loading",),
    ("weights", "planner", "convert"),
    ("samples",),
    ("arena", "measure", "watch"),
    ("step",),
    ("audit",),
    ("capture",),
    ("build",),
    ("call",),
    ("provenance",),
    ("runtime",),
    ("trial", "verify", "block"),
    ("tuning", "doctor"),
    ("decode",),
    ("integrations",),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
"""Parts of graphmoe (a file or a folder), from the ground up. A part imports itself and lower layers, nothing beside or above it."""

IMPORTERS = {
    "kernels": {"kernels", "build", "paths", "gemm", "dispatch", "decode"},
    "reference": {"reference", "build", "trial", "verify", "decode", "measure", "integrations", "cli"},
    "cli": {"cli", "__main__"},
}
"""Kernels and their twins are reached through what binds them, so that planning needs neither; the command line is nobody's library."""

WITHOUT_TORCH = (
    "errors",
    "spec",
    "bounds",
    "buckets",
    "recipe",
    "fallback",
    "layout",
    "formats/__init__",
    "paths/__init__",
    "paths/base",
    "paths/grouped",
    "profile",
    "planner",
)
"""Files that plan: integers only, and no torch when they are imported."""


def sources(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def part_of(file: Path) -> str:
    """`graphmoe/cli/plan.py` -> `cli`, `graphmoe/spec.py` -> `spec`."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _guards_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def import_nodes(node: ast.AST, *, inside_functions: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements that run: not those under TYPE_CHECKING; those of function bodies if asked for."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif _guards_types(child):
            for otherwise in child.orelse:
                yield from import_nodes(ast.Module([otherwise], []), inside_functions=inside_functions)
        elif inside_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from import_nodes(child, inside_functions=inside_functions)


def imported(file: Path, *, inside_functions: bool = True) -> set[str]:
    """Dotted names of the modules that a file imports; `from graphmoe import x` is the module x where there is one."""
    names = set()
    for node in import_nodes(parsed(file), inside_functions=inside_functions):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
            continue
        base = node.module or ""
        if node.level:
            home = (ROOT / file).relative_to(ROOT).with_suffix("").parts[: -node.level]
            base = ".".join([*home, *filter(None, [node.module])])
        for alias in node.names:
            below = ROOT.joinpath(*base.split("."), alias.name)
            names.add(f"{base}.{alias.name}" if base == "graphmoe" and (below.is_dir() or below.with_suffix(".py").is_file()) else base)
    return names


def imported_parts(file: Path) -> set[str]:
    """Parts of graphmoe that a file imports; `__init__` for the package itself."""
    inside = {name for name in imported(file) if name.split(".")[0] == "graphmoe"}
    return {name.split(".")[1] if "." in name else "__init__" for name in inside}


# imports


def test_every_part_has_a_place_in_the_order():
    placed = [part for layer in LAYERS for part in layer]
    assert len(placed) == len(set(placed))
    assert {part_of(file) for file in sources("graphmoe")} <= set(placed), "give the new part a place in LAYERS"


def test_imports_go_one_way():
    height = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    against = {
        (str(file.relative_to(ROOT)), part)
        for file in sources("graphmoe")
        for part in imported_parts(file)
        if part != part_of(file) and height[part] >= height[part_of(file)]
    }
    assert sorted(against) == [], "these files import something beside or above them"


def test_the_order_is_read_from_the_files():
    """What the reader of imports must see: plain, nested in a function, of the package, and nothing that only types need."""
    assert imported_parts(PACKAGE / "weights.py") == {"checkpoint", "device", "errors", "formats", "loading", "sharding", "spec"}
    assert {"reference", "kernels", "gemm", "paths", "step"} <= imported_parts(PACKAGE / "build.py")
    assert imported_parts(PACKAGE / "ops.py") == set()
    assert imported_parts(PACKAGE / "__main__.py") == {"cli"}


def test_kernels_and_their_twins_are_reached_only_through_what_binds_them():
    for part, allowed in IMPORTERS.items():
        importers = {part_of(file) for file in sources("graphmoe") if part in imported_parts(file)}
        assert importers <= allowed, f"{part} is imported by {sorted(importers - allowed)}"


def test_only_kernels_need_triton():
    users = {part_of(file) for file in sources("graphmoe") if any(name.split(".")[0] == "triton" for name in imported(file))}
    assert users == {"kernels"}


def test_files_that_plan_do_not_import_torch():
    for name in WITHOUT_TORCH:
        roots = {module.split(".")[0] for module in imported(PACKAGE / f"{name}.py", inside_functions=False)}
        assert not roots & {"torch", "triton", "safetensors", "deep_gemm"}, f"graphmoe/{name}.py imports {sorted(roots)}"


_IMPORT_ALONE = """
import sys
import torch
of_torch = set(sys.modules)  # it imports cuda.bindings where they are installed
import graphmoe
for name in graphmoe.__all__:
    getattr(graphmoe, name)
print(*sorted({"triton", "deep_gemm", "cuda", "graphmoe.kernels", "graphmoe.cli", "transformers"} & sys.modules.keys() - of_torch))
print(torch.cuda.is_initialized())
"""


def test_importing_touches_no_device_and_no_triton():
    done = subprocess.run([sys.executable, "-c", _IMPORT_ALONE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", "False"]
    assert done.stderr == ""


# names


def test_public_names_are_those_of_all():
    listed = graphmoe.__all__
    assert listed == sorted(listed)
    assert {"MoESpec", "ExpertWeights", "MoERuntime", "BucketLadder", "Recipe", "bounds", "plan", "errors", "Plan"} <= set(listed)
    ours = {
        name
        for name, value in vars(graphmoe).items()
        if not name.startswith("_") and not inspect.ismodule(value) and getattr(value, "__module__", "").split(".")[0] == "graphmoe"
    }
    modules = {name for name in listed if inspect.ismodule(getattr(graphmoe, name))}
    assert modules == {"bounds", "errors"}
    assert ours | modules | {"__version__"} == set(listed)


def test_the_version_is_that_of_the_project():
    assert graphmoe.__version__ in (project()["project"]["version"], "0+unknown")


@pytest.mark.parametrize("file", sources("graphmoe"), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_everything_public_says_what_it_is(file):
    """Modules, public classes and public functions have a docstring."""
    tree = parsed(file)
    named = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")]
    silent = [node.name for node in named if not ast.get_docstring(node)]
    assert ast.get_docstring(tree), "the module has no docstring"
    assert silent == []


def test_every_error_stands_in_the_drawn_tree_under_its_parent():
    """The picture at the top of `errors.py` is the class tree, builtin bases included."""
    defined = {name: value for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__}
    path: list[str] = []
    drawn = set()
    for line in errors.__doc__.splitlines():
        found = re.fullmatch(r"    ((?:│   |    )*)(?:[├└]── )?(\w+)(?: +\((\w+)\))?(?: +.*)?", line)
        if not found or found[2] not in defined:
            continue
        indent, name, builtin = found[1], found[2], found[3]
        branch = "──" in line
        depth = len(indent) // 4 + branch
        path[depth:] = [name]
        drawn.add(name)
        bases = {base.__name__ for base in defined[name].__bases__}
        assert bases - {"Exception"} == {*path[depth - 1 : depth] * branch, *([builtin] if builtin else [])}, line
    assert drawn == defined.keys() - {"BrokenPromise"}
    for name, value in defined.items():
        assert issubclass(value, errors.GraphMoEError) != (name == "BrokenPromise")
        assert value.__doc__
    assert issubclass(errors.BrokenPromise, UserWarning)


def test_every_error_can_be_raised_with_a_message_alone():
    for value in vars(errors).values():
        if inspect.isclass(value) and issubclass(value, Exception):
            assert str(value("what and how")) == "what and how"


# what is shipped


@cache
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_wheel_lists_every_package():
    setuptools = project()["tool"]["setuptools"]
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in sources("graphmoe")}
    assert len(setuptools["packages"]) == len(set(setuptools["packages"]))
    assert set(setuptools["packages"]) == found | {"graphmoe.capture_profiles"}
    for file in sources("graphmoe"):
        assert (file.parent / "__init__.py").is_file(), f"{file.parent} is no package"
    for folder in setuptools["package-dir"].values():
        assert (ROOT / folder).is_dir()
    for name, patterns in setuptools["package-data"].items():
        folder = ROOT / setuptools["package-dir"].get(name, name.replace(".", "/"))
        assert list(folder.glob(patterns[0])), f"{name} has no {patterns[0]}"


def test_the_command_and_the_extras_exist():
    settings = project()["project"]
    module, function = settings["scripts"]["graphmoe"].split(":")
    assert callable(getattr(importlib.import_module(module), function))
    third_party = {name.split(".")[0] for file in sources("graphmoe") for name in imported(file, inside_functions=False)}
    third_party -= {"graphmoe", "__future__", *sys.stdlib_module_names}
    required = {re.split(r"[^\w-]", requirement)[0] for requirement in settings["dependencies"]}
    assert third_party - {"triton"} <= required, "imported, but not among the dependencies (torch brings triton)"


def test_ci_runs_the_one_test_command():
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    commands = [line for line in lines[1:] if line.strip() and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["python3 tools/dev.py test"]
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_readme_names_the_two_commands():
    readme = ROOT / "README.md"
    if not readme.is_file():
        pytest.skip("no README yet")
    text = readme.read_text()
    assert "python3 tools/dev.py demo" in text
    assert "python3 tools/dev.py test" in text


def test_the_example_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    readme = ROOT / "README.md"
    blocks = re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE) if readme.is_file() else []
    if not blocks:
        pytest.skip("no README with an example yet")
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(readme), "exec"), names)
    assert names["y"].shape == names["x"].shape
    assert bool(names["y"].isfinite().all())
    assert float(names["y"].abs().max()) > 0


def test_no_path_of_one_machine_is_written_down():
    """Absolute folders of whoever wrote a file mean nothing to its readers. (`/` apart, so that this file passes.)"""
    own = re.compile("(?<![\\w.~}])/" + "(?:work|opt|root|home|mnt|Users)/" + "|" + "bash_" + "jobs")
    files = [file for folder in ("graphmoe", "tests", "tools", "capture_profiles", ".ci") for file in (ROOT / folder).rglob("*") if file.is_file()]
    files += [ROOT / "pyproject.toml", *(file for file in (ROOT / "README.md", ROOT / "CHANGELOG.md") if file.is_file())]
    checked = [file for file in files if "__pycache__" not in file.parts]
    assert PACKAGE / "spec.py" in checked
    found = {str(file.relative_to(ROOT)): match[0] for file in checked if (match := own.search(file.read_text(errors="replace")))}
    assert found == {}


# kernels


def jit_functions() -> dict[str, Path]:
    """Every `@triton.jit` function in `graphmoe/kernels` whose name says that it is launched."""
    return {
        node.name: file
        for file in sources("graphmoe/kernels")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
        and re.fullmatch(r"_\w+_kernel", node.name)
    }


def test_every_kernel_is_compiled_by_the_compile_check():
    tree = parsed(ROOT / "tests/compile_kernels.py")
    imports = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.endswith("_kernel")
    }
    compiled = {ast.unparse(node.args[0]) for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "compile_kernel"}
    expected = jit_functions()
    assert len(expected) >= 5
    assert imports == {name: ".".join(file.relative_to(ROOT).with_suffix("").parts) for name, file in expected.items()}
    assert compiled == expected.keys()


def test_every_kernel_compiles_for_sm90():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.compile_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1:] == ["all kernels compile for sm90"]
