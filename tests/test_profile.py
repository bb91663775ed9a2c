"""A capture profile speaks for what it measured and for nothing else, survives its file, and every plan says whether it spoke."""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import graphmoe
from graphmoe import MoERuntime, MoESpec, Plan, Recipe, named_spec, plan
from graphmoe import profile as profile_module
from graphmoe.cli import app
from graphmoe.errors import PlanError, SchemaMismatch, UnknownRecipe
from graphmoe.formats import FORMATS
from graphmoe.paths import PATHS, get_path
from graphmoe.profile import SCHEMA, BucketRecord, Profile, device_slug, find_profile, kernels_version, profiles_root
from tests import strategies
from tests.checks import assert_rows, oracle, random_inputs, random_weights, routings

H200 = "NVIDIA H200"
TITLE = "profile NVIDIA H200 2026-11-29"
SPEC = MoESpec(8, 2, 256, 128)
EP_RANK = MoESpec(64, 8, 256, 128, num_local_experts=32)
COMPACT, MASKED, PSUM = Recipe("compact", block_e=128), Recipe("masked", row_tile=128), Recipe("psum", block_e=64)


def filled(recipe: Recipe) -> Recipe:
    """As a plan writes it: with every option."""
    return Recipe(recipe.path, **get_path(recipe.path).options(recipe))


DIRECT, GATHERED_16, GATHERED_32 = filled(Recipe("direct")), filled(Recipe("gathered", tile=16)), filled(Recipe("gathered", tile=32))
FEW_ROWS = "2 rows an expert, at most 12"
"""The rule's reason for `GATHERED_16` at 8 tokens of `SPEC`, where no profile speaks."""


def record(tokens: int, recipe: Recipe = COMPACT, **changed: Any) -> BucketRecord:
    measured: dict[str, Any] = {"replay_us": 28.0, "spread_us": 0.5, "floor_us": 25.0, "launches": 6, "worst_row": 0.03, "tried": 12}
    return BucketRecord(tokens, recipe, **{**measured, **changed})


def profile_of(spec: MoESpec, *records: BucketRecord, device: str = H200, fmt: str = "fp8_block", **changed: Any) -> Profile:
    kernels = {one.recipe.path: kernels_version(one.recipe.path) for one in records if one.recipe.path in PATHS}
    given = {"kernels": kernels, "provenance": {"date": "2026-11-29", "driver": "580.95"}, **changed}
    return Profile(device=device, fmt=fmt, shape=spec, buckets=records, **given)


def stored(profile: Profile) -> dict[str, Any]:
    return json.loads(json.dumps(profile.to_json(), allow_nan=False))


# --- the file


_NAMES = st.text(min_size=1, max_size=12)
_TIMES = st.floats(1e-3, 1e9)


@st.composite
def records(draw: st.DrawFn, tokens: int) -> BucketRecord:
    options = draw(st.dictionaries(st.sampled_from(["block_e", "row_tile", "tile"]), st.integers(-(2**70), 2**70)))
    spread, worst = draw(st.floats(0, 1e9)), draw(st.floats(0, 1))
    launches, tried = draw(st.integers(1, 99)), draw(st.integers(1, 2**40))
    return BucketRecord(tokens, Recipe(draw(_NAMES), **options), draw(_TIMES), spread, draw(_TIMES), launches, worst, tried)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any device and path names, registered or not; buckets in any order."""
    sizes = draw(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=6, unique=True))
    buckets = tuple(draw(records(size)) for size in sizes)
    kernels = {one.recipe.path: draw(st.integers(0, 2**64 - 1).map(lambda number: f"{number:016x}")) for one in buckets}
    provenance = {**draw(st.dictionaries(_NAMES, st.text(max_size=12), max_size=3)), "date": draw(_NAMES)}
    device = draw(_NAMES.filter(str.strip))
    return Profile(device, draw(st.sampled_from(list(FORMATS))), draw(strategies.specs()), kernels, provenance, buckets)


@given(profile=profiles())
def test_a_profile_survives_json(profile: Profile) -> None:
    data = stored(profile)
    loaded = Profile.from_json(data)
    assert loaded == profile
    assert stored(loaded) == data == profile.to_json()


@given(profile=profiles())
def test_a_profile_survives_its_file(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("profile") / "a device" / "model.json"
    profile.save(file)
    profile.save(file)
    assert Profile.load(file) == profile
    assert [one.name for one in file.parent.iterdir()] == ["model.json"], "a temporary file stays behind"


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.json"
    profile_of(SPEC, record(8)).save(file)
    before = file.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(PlanError, match=r"cannot be written to .*model\.json: No space left"):
        profile_of(SPEC, record(16)).save(file)
    assert [one.name for one in tmp_path.iterdir()] == ["model.json"]
    assert file.read_bytes() == before


def test_a_saved_profile_can_be_read_by_everybody(tmp_path: Path) -> None:
    profile_of(SPEC, record(8)).save(tmp_path / "model.json")
    assert (tmp_path / "model.json").stat().st_mode & 0o444 == 0o444


def test_buckets_are_kept_in_order_and_the_shape_forgets_what_decides_no_kernel() -> None:
    spec = MoESpec(64, 8, 256, 128, num_local_experts=32, expert_offset=32, routed_scaling_factor=2.5)
    made = profile_of(spec, record(8), record(2))
    assert [one.tokens for one in made.buckets] == [2, 8]
    assert made.shape == EP_RANK
    assert not {"expert_offset", "routed_scaling_factor"} & stored(made)["shape"].keys()
    assert {**stored(made)["shape"], "expert_offset": 0, "routed_scaling_factor": 1.0} == vars(EP_RANK)


def test_what_a_record_holds() -> None:
    assert record(8).ratio == pytest.approx(1.12)
    assert stored(profile_of(SPEC, record(8)))["buckets"] == [
        {
            "tokens": 8,
            "recipe": {"path": "compact", "options": {"block_e": 128}},
            "replay_us": 28.0,
            "spread_us": 0.5,
            "floor_us": 25.0,
            "ratio": 28.0 / 25.0,
            "launches": 6,
            "worst_row": 0.03,
            "tried": 12,
        }
    ]


GOOD = stored(profile_of(SPEC, record(8), record(16, PSUM)))


@pytest.mark.parametrize("schema", ["graphmoe.profile/0", "graphmoe.profile/2", "graphmoe.plan/1", "", None, 1, [SCHEMA]])
def test_another_schema_is_refused_by_name(schema: object) -> None:
    with pytest.raises(SchemaMismatch, match=re.escape(repr(schema))):
        Profile.from_json({**GOOD, "schema": schema})


@pytest.mark.parametrize("data", [None, [], "graphmoe.profile/1", 3])
def test_what_is_no_object_is_refused(data: object) -> None:
    with pytest.raises(PlanError, match="JSON object"):
        Profile.from_json(data)


_OBJECTS: list[tuple[str | int, ...]] = [(), ("shape",), ("buckets", 0), ("buckets", 1, "recipe")]


def _at(data: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


_FIELDS = [(*path, name) for path in _OBJECTS for name in _at(GOOD, path) if (*path, name) != ("schema",)]


@pytest.mark.parametrize("path", _FIELDS, ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("edit", ["missing", "misspelt", "unknown"])
def test_every_field_is_required_and_no_other_is_known(path: tuple[str | int, ...], edit: str) -> None:
    data = copy.deepcopy(GOOD)
    holder, name = _at(data, path[:-1]), str(path[-1])
    value = holder[name] if edit == "unknown" else holder.pop(name)
    if edit != "missing":
        holder[name + "_"] = value
    with pytest.raises(PlanError, match=rf"'{name}_?'") as refused:
        Profile.from_json(data)
    assert all(str(key) in str(refused.value) for key in path[:-1]), "the message does not say where"


_NUMBERS = ("replay_us", "spread_us", "floor_us", "ratio", "worst_row")
_WRONG: list[tuple[tuple[str | int, ...], Any]] = [
    *((("buckets", 1, name), value) for name in _NUMBERS for value in (float("nan"), float("inf"), -1.0, -1, True, "28", None, [28.0], 10**400)),
    *((("buckets", 1, name), 0) for name in ("replay_us", "floor_us")),
    *((("buckets", 1, name), value) for name in ("tokens", "launches", "tried") for value in (0, -1, 8.0, True, "8", None, float("nan"))),
    (("buckets", 1, "ratio"), 1.3),  # of other times
    (("buckets", 1, "replay_us"), 20.0),
    (("buckets", 1, "tokens"), 8),  # twice
    (("buckets", 1, "recipe"), "psum"),
    (("buckets", 1, "recipe", "path"), ""),
    (("buckets", 1, "recipe", "path"), None),
    (("buckets", 1, "recipe", "path"), "masked"),  # whose kernels the file does not name
    (("buckets", 1, "recipe", "options"), [64]),
    (("buckets", 1, "recipe", "options", "block_e"), 64.0),
    (("buckets", 1, "recipe", "options", "block_e"), True),
    (("buckets", 1, "recipe", "options", "path"), 1),
    (("buckets",), []),
    (("buckets",), {}),
    (("buckets",), None),
    (("buckets", 1), 3),
    (("device",), ""),
    (("device",), " "),
    (("device",), 200),
    (("fmt",), "fp8"),
    (("fmt",), ["fp8_block"]),
    (("shape",), None),
    (("shape", "num_experts"), 0),
    (("shape", "num_local_experts"), 0),
    (("shape", "num_local_experts"), -1),
    (("shape", "top_k"), 2.0),
    (("shape", "hidden_size"), -256),
    (("shape", "activation"), "gelu"),
    (("shape", "gated"), 1),
    (("shape", "distinct_topk"), "yes"),
    (("kernels",), []),
    (("kernels", "psum"), "0123"),
    (("kernels", "psum"), "0123456789ABCDEF"),
    (("kernels", "psum"), 1),
    (("provenance",), "by hand"),
    (("provenance", "driver"), 580),
    (("provenance", "date"), ""),
]


@pytest.mark.parametrize(("path", "value"), _WRONG, ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else repr(value)[:20])
def test_an_impossible_value_is_refused_by_name(path: tuple[str | int, ...], value: Any) -> None:
    data = copy.deepcopy(GOOD)
    _at(data, path[:-1])[path[-1]] = value
    with pytest.raises(PlanError) as refused:
        Profile.from_json(data)
    assert str(path[-1]) in str(refused.value)
    assert not isinstance(refused.value, SchemaMismatch)


def test_a_time_may_be_written_as_an_int() -> None:
    data = copy.deepcopy(GOOD)
    data["buckets"][0].update(replay_us=28, floor_us=25, ratio=1.12)
    assert Profile.from_json(data) == Profile.from_json(GOOD)


def test_a_profile_without_a_date_is_refused() -> None:
    with pytest.raises(PlanError, match="'date'"):
        profile_of(SPEC, record(8), provenance={"driver": "580"})


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"{", "is no JSON"), (b"\xff\xfe", "is no JSON"), (b"[" * 100_000, "is no JSON"), (b"[]", "JSON object"), (None, "cannot be read")],
)
def test_a_file_that_is_no_profile_is_refused_by_name(content: bytes | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(PlanError, match=rf"broken\.json.*{says}"):
        Profile.load(file)


def test_nan_in_a_file_is_refused(tmp_path: Path) -> None:
    """Python's JSON reads it as a number."""
    file = tmp_path / "nan.json"
    file.write_text(json.dumps(GOOD).replace('"spread_us": 0.5', '"spread_us": NaN'))
    with pytest.raises(PlanError, match=r"nan\.json: buckets\[0\]: spread_us=nan"):
        Profile.load(file)


# --- which kernels were measured


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two source files and a path `fake` that declares them."""
    folder = tmp_path / "package"
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels/one.py").write_text("a")
    (folder / "kernels/two.py").write_text("b")
    monkeypatch.setattr(profile_module, "PACKAGE", folder)
    monkeypatch.setitem(PATHS, "fake", SimpleNamespace(sources=("kernels/one.py", "kernels/two.py")))  # type: ignore[arg-type]
    profile_module._digest.cache_clear()
    return folder


def _anew() -> str:
    profile_module._digest.cache_clear()
    return kernels_version("fake")


def test_a_version_follows_the_bytes_of_the_declared_files_alone(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _anew()
    assert re.fullmatch("[0-9a-f]{16}", first)
    (package / "kernels/three.py").write_text("c")
    assert _anew() == first
    (package / "kernels/one.py").write_text("a ")
    assert _anew() != first
    (package / "kernels/one.py").write_text("a")
    assert _anew() == first
    (package / "kernels/one.py").write_text("ab")
    (package / "kernels/two.py").write_text("")
    assert _anew() != first, "bytes moved from one file to the next"
    (package / "kernels/one.py").write_text("a")
    (package / "kernels/two.py").write_text("b")
    monkeypatch.setitem(PATHS, "fake", SimpleNamespace(sources=("kernels/two.py", "kernels/one.py")))  # type: ignore[arg-type]
    assert _anew() == first, "the order in which files are declared"
    monkeypatch.setitem(PATHS, "fake", SimpleNamespace(sources=("kernels/one.py",)))  # type: ignore[arg-type]
    assert _anew() != first


@pytest.mark.parametrize("path", PATHS)
def test_every_path_declares_files_that_are_there(path: str) -> None:
    sources = get_path(path).sources
    assert len(sources) == len(set(sources)) > 0
    assert all((profile_module.PACKAGE / name).is_file() for name in sources)
    assert re.fullmatch("[0-9a-f]{16}", kernels_version(path))


def test_the_version_of_an_unknown_path_is_refused() -> None:
    with pytest.raises(UnknownRecipe, match="'mega2'"):
        kernels_version("mega2")


def test_a_record_is_void_once_its_kernels_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made = profile_of(SPEC, record(8, PSUM), record(64, COMPACT))
    assert made.choose(8) == (PSUM, f"{TITLE}: 1.12 of the floor")
    monkeypatch.setattr(profile_module, "kernels_version", lambda path: "0" * 16 if path == "psum" else made.kernels[path])
    assert made.choose(8) is None
    assert made.void(8) == f"{TITLE} is void for psum (its kernels changed)"
    assert made.choose(64) is not None, "another path's record"
    [void, spoken] = plan(SPEC, [8, 64], profile=made).buckets
    assert (void.recipe, spoken.recipe) == (GATHERED_16, COMPACT)
    assert void.rule == f"auto: {TITLE} is void for psum (its kernels changed), {FEW_ROWS}"


def test_a_record_of_a_path_that_is_gone_is_void() -> None:
    made = profile_of(SPEC, record(8, Recipe("vanished", tile=3)), kernels={"vanished": "0" * 16})
    assert made.choose(8) is None
    [bucket] = plan(SPEC, [8], profile=made).buckets
    assert bucket.recipe == GATHERED_16
    assert bucket.rule == f"auto: {TITLE} is void for vanished (this version has no such path), {FEW_ROWS}"


# --- which record speaks


def test_a_measured_bucket_gets_its_own_recipe() -> None:
    made = profile_of(SPEC, record(8, PSUM), record(9, COMPACT), record(10, MASKED))
    assert made.choose(9) == (COMPACT, f"{TITLE}: 1.12 of the floor")


@pytest.mark.parametrize(
    ("tokens", "nearest"),
    [
        (3, None),
        (4, 8),
        (5, 8),
        (7, 8),
        (11, 8),
        (12, 18),
        (17, 18),
        (19, 18),
        (36, 18),
        (37, None),
        (49, None),
        (50, 100),
        (101, 100),
        (200, 100),
        (201, None),
        (10**9, None),
    ],
)
def test_a_bucket_between_measured_ones_takes_the_nearest_by_ratio(tokens: int, nearest: int | None) -> None:
    """12 is 1.5 times 8 and two thirds of 18: a tie, which the larger takes."""
    sizes = (8, 18, 100)
    made = profile_of(SPEC, *(record(size, Recipe("psum", block_e=size)) for size in sizes))
    if nearest is None:
        assert made.choose(tokens) is None
        assert made.void(tokens) == f"{TITLE} measured 8 to 100 tokens, none near this bucket"
    else:
        assert made.choose(tokens) == (Recipe("psum", block_e=nearest), f"{TITLE}: as measured at {nearest} tokens")


@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=6, unique=True), tokens=st.integers(1, 10_000))
def test_the_nearest_is_the_nearest_of_all(sizes: list[int], tokens: int) -> None:
    made = profile_of(SPEC, *(record(size, Recipe("psum", block_e=size)) for size in sizes))
    choice = made.choose(tokens)
    assert (choice is None) == (made.void(tokens) is not None) == (not any(a <= 2 * tokens and tokens <= 2 * a for a in sizes))
    if choice is not None:
        # ratios as exact fractions: a/t for a >= t, t/a below; the larger of two that are equally near
        best = [a for a in sizes if all(max(a, tokens) * min(b, tokens) <= max(b, tokens) * min(a, tokens) for b in sizes)]
        assert dict(choice[0].options)["block_e"] == max(best)


@pytest.mark.parametrize("name", PATHS)
def test_a_path_declares_every_kernel_that_it_launches_and_what_these_are_made_of(name: str) -> None:
    """A source that is not declared could change beneath a measurement."""
    package = Path(graphmoe.__file__).parent
    sources = get_path(name).sources
    launched = {f"kernels/{op}.py" for op in re.findall(r"self\.ops\.(\w+)\(", (package / sources[0]).read_text())}
    assert launched
    used = {
        f"kernels/{module}.py" for file in sources for module in re.findall(r"from graphmoe\.kernels\.(\w+) import", (package / file).read_text())
    }
    assert launched | used <= set(sources)


# --- which file is found


@pytest.mark.parametrize(
    ("name", "slug"),
    [("NVIDIA H200", "nvidia-h200"), ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"), ("../../Tesla (V100)", "tesla-v100"), ("é", "")],
)
def test_the_folder_of_a_device(name: str, slug: str) -> None:
    assert device_slug(name) == slug


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """Profiles of one whole model and of one shard of another, and files that are none."""
    folder = tmp_path / "shelf" / "nvidia-h200"
    profile_of(named_spec("qwen3-30b-a3b"), record(8, PSUM)).save(folder / "qwen3-30b-a3b.json")
    profile_of(named_spec("qwen3-235b-a22b").shard(tp=4), record(8)).save(folder / "qwen3-235b-a22b-tp4.json")
    (folder / "a-broken.json").write_text("{")
    (folder / "b-other.json").write_text(json.dumps({**GOOD, "schema": "graphmoe.profile/0"}))
    (folder / "c-folder.json").mkdir()
    (folder / "notes.txt").write_text("not looked at")
    return tmp_path / "shelf"


def test_a_profile_is_found_by_device_shape_and_format(shelf: Path) -> None:
    whole, shard = named_spec("qwen3-30b-a3b"), named_spec("qwen3-235b-a22b").shard(tp=4)
    for spec, recipe in ((whole, PSUM), (shard, COMPACT)):
        found = find_profile(spec, "fp8_block", H200, root=shelf)
        assert found is not None
        assert found.buckets[0].recipe == recipe
        assert plan(spec, [8], profile=found).buckets[0].recipe == recipe
    assert find_profile(replace(whole, routed_scaling_factor=2.5), "fp8_block", H200, root=shelf) is not None


@pytest.mark.parametrize(
    ("spec", "fmt", "device"),
    [
        (named_spec("qwen3-30b-a3b"), "bf16", H200),
        (named_spec("qwen3-30b-a3b"), "fp8_block", "NVIDIA H100"),
        (named_spec("qwen3-30b-a3b"), "fp8_block", "nvidia h200"),  # the same folder
        (named_spec("qwen3-30b-a3b").shard(ep=2), "fp8_block", H200),
        (named_spec("qwen3-235b-a22b"), "fp8_block", H200),
        (named_spec("qwen3-235b-a22b").shard(tp=2), "fp8_block", H200),
        (replace(named_spec("qwen3-30b-a3b"), distinct_topk=False), "fp8_block", H200),
        (replace(named_spec("qwen3-30b-a3b"), top_k=4), "fp8_block", H200),
    ],
)
def test_nothing_is_found_if_anything_differs(spec: MoESpec, fmt: str, device: str, shelf: Path) -> None:
    assert find_profile(spec, fmt, device, root=shelf) is None


def test_ranks_of_one_shard_share_a_profile(shelf: Path) -> None:
    spec = named_spec("deepseek-v3").shard(ep=8, ep_rank=1)
    profile_of(spec, record(8)).save(shelf / "nvidia-h200" / "deepseek-v3-ep8.json")
    for rank in range(8):
        assert find_profile(named_spec("deepseek-v3").shard(ep=8, ep_rank=rank), "fp8_block", H200, root=shelf) is not None


def test_a_file_that_is_no_profile_is_skipped_with_a_warning(shelf: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="graphmoe"):
        assert find_profile(named_spec("qwen3-30b-a3b"), "fp8_block", H200, root=shelf) is not None
    warned = [one.getMessage() for one in caplog.records if one.name == "graphmoe"]
    assert [re.search(r"[\w-]+\.json", message)[0] for message in warned] == ["a-broken.json", "b-other.json", "c-folder.json"]  # type: ignore[index]


def test_there_may_be_no_folder_at_all(tmp_path: Path) -> None:
    assert find_profile(SPEC, "fp8_block", H200, root=tmp_path / "absent") is None


def test_a_source_tree_keeps_its_profiles_at_its_root() -> None:
    root = Path(__file__).resolve().parents[1]
    assert profiles_root() == root / "capture_profiles"
    assert (profiles_root() / "README.md").is_file()


_INSTALLED = """
import sys, types
sys.modules.update(torch=None, triton=None)  # importing them raises
package = types.ModuleType("graphmoe")
package.__path__ = [sys.argv[1]]             # the package without its __init__, which needs torch for the runtime
sys.modules["graphmoe"] = package
from graphmoe.profile import find_profile, profiles_root
from graphmoe.spec import MoESpec
print(profiles_root())
print(find_profile(MoESpec(8, 2, 256, 128), "fp8_block", "NVIDIA H200").title)
"""


@pytest.mark.parametrize("layout", ["wheel", "source tree"])
def test_profiles_are_found_where_the_package_is_installed(layout: str, tmp_path: Path) -> None:
    """A wheel holds the folder inside the package, whatever lies beside it in site-packages; and torch is not asked for."""
    site, home = tmp_path / "site", tmp_path / "site/graphmoe"
    shutil.copytree(profile_module.PACKAGE, home, ignore=shutil.ignore_patterns("__pycache__"))
    folder = home / "capture_profiles" if layout == "wheel" else site / "capture_profiles"
    profile_of(SPEC, record(8)).save(folder / "nvidia-h200" / "small.json")
    if layout == "wheel":
        (site / "capture_profiles").mkdir()
    done = subprocess.run([sys.executable, "-c", _INSTALLED, str(home)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(folder.resolve()), TITLE]


def test_every_shipped_profile_is_read_and_found() -> None:
    for file in profiles_root().rglob("*.json"):
        shipped = Profile.load(file)
        assert file.parent == profiles_root() / device_slug(shipped.device)
        assert find_profile(shipped.shape, shipped.fmt, shipped.device) == shipped, f"{file}: another file of this shape and format comes first"
        for entry in shipped.buckets:
            assert shipped.void(entry.tokens) is None, f"{file}: measure it again, or leave the path's files as they were measured"


# --- what a plan does with it


def test_auto_buckets_follow_the_profile_and_others_what_was_asked_for() -> None:
    made = profile_of(SPEC, record(4, COMPACT), record(16, MASKED))
    planned = plan(SPEC, [1, 4, 8, 16, 64], recipes={16: "psum"}, profile=made)
    assert [(bucket.recipe, bucket.rule) for bucket in planned.buckets] == [
        (DIRECT, f"auto: {TITLE} measured 4 to 16 tokens, none near this bucket, at most 4 tokens"),
        (COMPACT, f"{TITLE}: 1.12 of the floor"),
        (MASKED, f"{TITLE}: as measured at 16 tokens"),
        (PSUM, "asked for"),
        (GATHERED_32, f"auto: {TITLE} measured 4 to 16 tokens, none near this bucket, 16 rows an expert, at most 32"),
    ]


def test_options_that_the_profile_leaves_out_are_filled_in() -> None:
    [bucket] = plan(SPEC, [8], profile=profile_of(SPEC, record(8, Recipe("compact")))).buckets
    assert bucket.recipe == Recipe("compact", block_e=64)


def test_a_plan_without_a_profile_is_what_it_was() -> None:
    """Byte for byte: rules are part of the fingerprint."""
    assert [bucket.rule for bucket in plan(SPEC, [4, 8, 256]).buckets] == [
        "auto: no profile, at most 4 tokens",
        f"auto: no profile, {FEW_ROWS}",
        "auto: no profile, psum with block_e 64",
    ]
    assert plan(EP_RANK, [264]).buckets[0].rule == "auto: no profile, expert-parallel rank of at most 32 experts"
    assert plan(SPEC, [8], profile=None) == plan(SPEC, [8])


def test_a_profile_is_part_of_the_fingerprint_and_survives_json() -> None:
    """Even if it chooses what the rule would have chosen, and even if it is void."""
    profiles = [
        None,
        profile_of(SPEC, record(8, GATHERED_16)),
        profile_of(SPEC, record(8, PSUM)),
        profile_of(SPEC, record(8, COMPACT)),
        profile_of(SPEC, record(8, PSUM, replay_us=50.0)),
        profile_of(SPEC, record(8, PSUM), device="NVIDIA H100"),
        profile_of(SPEC, record(8, PSUM), kernels={"psum": "0" * 16}),
        profile_of(SPEC, record(99, PSUM)),
    ]
    plans = [plan(SPEC, [8], profile=one) for one in profiles]
    assert len({made.fingerprint for made in plans}) == len(plans)
    for made in plans:
        assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_the_arena_limit_binds_the_profile_by_the_byte() -> None:
    made = profile_of(SPEC, record(256, MASKED))
    need = plan(SPEC, [256], recipes=MASKED).arena_bytes
    [fits] = plan(SPEC, [256], profile=made, max_arena_bytes=need).buckets
    [falls_back] = plan(SPEC, [256], profile=made, max_arena_bytes=need - 1).buckets
    assert (fits.recipe, falls_back.recipe) == (MASKED, PSUM)
    assert falls_back.rule == f"auto: {TITLE} chose masked row_tile=128, which exceeds max_arena_bytes, psum with block_e 64"


@pytest.mark.parametrize("limit_by", [0, -1])
def test_the_rule_that_speaks_instead_is_the_whole_rule(limit_by: int) -> None:
    """For many rows on a small expert-parallel rank that is masked, unless masked exceeds the limit too."""
    made = profile_of(EP_RANK, record(264, COMPACT), kernels={"compact": "0" * 16})
    need = plan(EP_RANK, [264], recipes=MASKED).arena_bytes
    [bucket] = plan(EP_RANK, [264], profile=made, max_arena_bytes=need + limit_by).buckets
    rule = "masked exceeds max_arena_bytes, psum with block_e 64" if limit_by else "expert-parallel rank of at most 32 experts"
    assert bucket.recipe == (PSUM if limit_by else MASKED)
    assert bucket.rule == f"auto: {TITLE} is void for compact (its kernels changed), {rule}"


@pytest.mark.parametrize(
    ("recipe", "says"),
    [(Recipe("compact", block_e=96), r"takes block_e in \(64, 128\), not 96"), (Recipe("compact", tile=8), "has no option tile")],
    ids=str,
)
def test_a_recipe_that_the_path_refuses_gives_way_to_the_rule(recipe: Recipe, says: str) -> None:
    [bucket] = plan(SPEC, [8], profile=profile_of(SPEC, record(8, recipe))).buckets
    assert bucket.recipe == GATHERED_16
    assert re.fullmatch(rf"auto: {TITLE} chose {recipe}, which cannot run: .*{says}.*, {FEW_ROWS}", bucket.rule)


def test_a_path_that_cannot_run_the_shape_gives_way_to_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    made = profile_of(SPEC, record(8, COMPACT))
    monkeypatch.setattr(type(get_path("compact")), "supports", lambda path, *_: "not on Sundays" if path.name == "compact" else None)
    [bucket] = plan(SPEC, [8], profile=made).buckets
    assert bucket.recipe == GATHERED_16
    assert bucket.rule == f"auto: {TITLE} chose compact block_e=128, which cannot run: path 'compact': not on Sundays, {FEW_ROWS}"


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"fmt": "bf16"}, "measured for fmt=fp8_block, the plan has fmt=bf16"),
        ({"spec": replace(SPEC, hidden_size=512)}, "measured for hidden_size=256, the plan has hidden_size=512"),
        ({"spec": replace(SPEC, top_k=3, distinct_topk=False)}, "for top_k=2, distinct_topk=True, the plan has top_k=3, distinct_topk=False"),
        ({"spec": SPEC.shard(ep=2)}, "measured for num_local_experts=8, the plan has num_local_experts=4"),
    ],
)
def test_a_profile_of_another_shape_or_format_is_refused(changed: dict[str, Any], names: str) -> None:
    with pytest.raises(UnknownRecipe, match=names):
        plan(**{"spec": SPEC, "ladder": [8], **changed}, profile=profile_of(SPEC, record(8)))


def test_a_profile_serves_every_rank_and_scaling_factor() -> None:
    made = profile_of(EP_RANK, record(8))
    other = replace(EP_RANK, expert_offset=32, routed_scaling_factor=2.5)
    assert plan(other, [8], profile=made).buckets[0].recipe == COMPACT


@pytest.mark.parametrize("wrong", ["auto", "h200.json", {}, True])
def test_what_is_no_profile_is_refused_by_plan(wrong: Any) -> None:
    with pytest.raises(PlanError, match=r"must be a Profile or None"):
        plan(SPEC, [8], profile=wrong)


# --- what a runtime does with it


def test_a_runtime_on_the_cpu_looks_for_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "profiles_root", lambda: pytest.fail("looked for a profile"))
    weights = random_weights(SPEC, "fp8_block")
    for how in ({}, {"profile": "auto"}, {"profile": None}):
        with MoERuntime(SPEC, weights, buckets=[8], device="cpu", **how) as made:
            assert made.plan == plan(SPEC, [8], arch="cpu")


def test_a_runtime_runs_what_a_profile_of_its_device_chose() -> None:
    weights = random_weights(SPEC, "fp8_block")
    chosen = profile_of(SPEC, record(4, COMPACT), record(8, MASKED), device="cpu")
    with MoERuntime(SPEC, weights, buckets=[4, 8], device="cpu", profile=chosen) as made:
        assert [bucket.recipe for bucket in made.plan.buckets] == [COMPACT, MASKED]
        assert "profile cpu 2026-11-29: 1.12 of the floor" in str(made.report())
        for tokens in (3, 8):
            x, router = random_inputs(SPEC, tokens)
            ids = dict(routings(SPEC, tokens))["balanced"]
            assert_rows(made(x, ids, router), oracle(x, ids, router, weights), "fp8_block")


def test_a_profile_of_another_device_is_refused() -> None:
    weights = random_weights(SPEC, "fp8_block")
    with pytest.raises(UnknownRecipe, match="measured on 'NVIDIA H200', this runtime is on 'cpu'"):
        MoERuntime(SPEC, weights, buckets=[8], device="cpu", profile=profile_of(SPEC, record(8)))
    with pytest.raises(PlanError, match=r"profile='h200' must be 'auto', None or a Profile"):
        MoERuntime(SPEC, weights, buckets=[8], device="cpu", profile="h200")  # type: ignore[arg-type]


def test_auto_finds_the_profile_of_a_gpu(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "profiles_root", lambda: shelf)
    spec = named_spec("qwen3-30b-a3b")
    found = profile_module.profile_for("auto", spec, "fp8_block", H200)
    assert found is not None
    assert profile_module.profile_for(found, spec, "fp8_block", H200) is found
    assert profile_module.profile_for("auto", spec, "fp8_block", "NVIDIA H100") is None
    assert profile_module.profile_for(None, spec, "fp8_block", H200) is None


# --- what the command line does with it


def run_plan(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", "--buckets", "4,8,64", *arguments])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_a_plan_printed_anywhere_is_the_one_that_the_gpu_runs(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "profiles_root", lambda: shelf)
    spec, file = named_spec("qwen3-30b-a3b"), tmp_path / "plan.json"
    output = run_plan("--json", str(file))
    assert f"{TITLE} chose 2 of 3 buckets; measured at 1.12 to 1.12 of the floor" in output
    assert f"psum block_e=64 ({TITLE})" in output
    written = Plan.from_json(json.loads(file.read_text()))
    assert written == plan(spec, [4, 8, 64], profile=find_profile(spec, "fp8_block", H200, root=shelf))
    assert written.buckets[0].rule == f"{TITLE}: as measured at 8 tokens"
    assert f"{TITLE} chose 0 of 3 buckets" in run_plan("--path", "masked")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--device", "NVIDIA H100"), "no profile of NVIDIA H100 for this shape in fp8_block"),
        (("--format", "bf16"), "no profile of NVIDIA H200 for this shape in bf16"),
        (("--device", "none"), "no device, no profile"),
        (("--device", ""), "no device, no profile"),
        (("--arch", "cpu"), "no device, no profile"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_plan_says_that_no_profile_spoke(arguments: tuple[str, ...], says: str, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "profiles_root", lambda: shelf)
    output = run_plan(*arguments)
    assert says in output
    for rule in ("at most 4 tokens", "4 rows an expert, at most 12"):
        assert f"(auto: no profile, {rule})" in output
