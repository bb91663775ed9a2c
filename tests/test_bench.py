"""`graphmoe tune` and `graphmoe bench` on invented times: what they measure, keep, write, print and draw, and how they fail."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from graphmoe import MoESpec, Recipe, named_spec, plan
from graphmoe.cli import main
from graphmoe.cli.bench import SCHEMA
from graphmoe.cli.gpu import measured_gpu
from graphmoe.measure import Ceilings, Timing
from graphmoe.paths import get_path
from graphmoe.profile import BucketRecord, Profile, find_profile, kernels_version
from graphmoe.trial import Trial
from graphmoe.tuning import starting_points

H200 = "NVIDIA H200"
QWEN = named_spec("qwen3-30b-a3b")
TUNE, BENCH, GPU = (sys.modules[f"graphmoe.cli.{name}"] for name in ("tune", "bench", "gpu"))

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `graphmoe ARGS` in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["graphmoe", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        code = caught.value.code
        return (code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


def assert_clean(result: tuple[int, str, str], error: str, *parts: str) -> None:
    """Exit code 2 and one line on stderr: the error's name, then what is wrong."""
    code, _, stderr = result
    assert code == 2, stderr
    assert stderr.count("\n") == 1, f"not one line: {stderr!r}"
    assert stderr.startswith(f"{error}: ")
    for part in parts:
        assert part in stderr


class FakeBench:
    """Stands for `Bench`: no weights, no GPU. `time_of` invents a recipe's time, in units of the floor; None refuses it."""

    made: ClassVar[list[FakeBench]]
    compiled: ClassVar[list[tuple[MoESpec, str, list[int]]]]
    time_of: Callable[[int, Recipe], float | None]

    def __init__(self, spec: MoESpec, fmt: str, device: torch.device) -> None:
        self.spec, self.fmt, self.device = spec, fmt, device
        self.ceilings = Ceilings(4.2e12, 1.5e15)
        self.runs: list[tuple[int, Recipe, bool]] = []
        self.made.append(self)

    def batches(self, tokens: int) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(name="balanced", tokens=tokens, counts=(1, 1, 0, 2), floor_us=20.0),
            SimpleNamespace(name="zipf", tokens=tokens, counts=(0, 4, 0, 0), floor_us=10.0),
        ]

    def run(self, recipe: Recipe, batches: list[SimpleNamespace], *, repeats: int = 15, calls: bool = False) -> Trial:
        recipe = Recipe(recipe.path, **get_path(recipe.path).options(recipe))
        self.runs.append((batches[0].tokens, recipe, calls))
        ratio = type(self).time_of(batches[0].tokens, recipe)
        if ratio is None:
            return Trial(recipe, refused=f"wrong: {recipe.path}")
        times = tuple((batch.name, Timing(ratio * batch.floor_us, 0.25), batch.floor_us) for batch in batches)
        return Trial(recipe, None, times, 4, 0.0321, 3 << 20, Timing(77.7, 1.0) if calls else None)

    @classmethod
    def measured(cls) -> list[int]:
        """Buckets that any of them measured, in order."""
        return list(dict.fromkeys(tokens for one in cls.made for tokens, _, _ in one.runs))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeBench]:
    """The commands see an H200; gathered is the fastest path, and tile=32 its best tile."""

    class Fake(FakeBench):
        made: ClassVar[list[FakeBench]] = []
        compiled: ClassVar[list[tuple[MoESpec, str, list[int]]]] = []

        @staticmethod
        def time_of(tokens: int, recipe: Recipe) -> float | None:  # type: ignore[override]
            return 1.25 if dict(recipe.options).get("tile") == 32 else 1.5 if recipe.path == "gathered" else 2.5

    def compile_ahead(spec: MoESpec, fmt: str, sizes: list[int], *, done: Callable[[], None]) -> int:
        Fake.compiled.append((spec, fmt, list(sizes)))
        done()
        return 17

    monkeypatch.setattr(GPU.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(GPU, "resolve_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(GPU.torch.cuda, "get_device_name", lambda device: H200)
    monkeypatch.setattr(TUNE, "Bench", Fake)
    monkeypatch.setattr(TUNE, "compile_ahead", compile_ahead)
    monkeypatch.setattr(BENCH, "Bench", Fake)
    monkeypatch.setattr(BENCH, "find_profile", lambda *_: None)
    return Fake


@pytest.fixture
def tune(command: Command, fake: type[FakeBench], tmp_path: Path) -> Command:
    """`graphmoe tune` into a folder of its own; returns stdout."""

    def run(*arguments: object) -> str:
        fake.made.clear()
        fake.compiled.clear()
        code, stdout, stderr = command("tune", "--out", tmp_path, *arguments)
        assert (code, stderr) == (0, ""), stderr
        return stdout

    return run  # type: ignore[return-value]


FILE = "nvidia-h200/qwen3-30b-a3b.json"


# --- tune


def test_what_was_tuned_is_found_and_planned_with(tune: Any, fake: Any, tmp_path: Path) -> None:
    output = tune("--buckets", "8,128,2048")
    assert fake.compiled == [(QWEN, "fp8_block", [8, 128, 2048])]
    assert fake.measured() == [8, 128, 2048]
    found = find_profile(QWEN, "fp8_block", H200, root=tmp_path)
    assert found == Profile.load(tmp_path / FILE)
    assert found is not None
    assert [record.tokens for record in found.buckets] == [8, 128, 2048]
    recipes = [bucket.recipe for bucket in plan(QWEN, [8, 128, 2048], profile=found).buckets]
    assert [(recipe.path, dict(recipe.options).get("tile")) for recipe in recipes] == [("gathered", 16), ("gathered", 32), ("masked", None)]
    assert recipes == [record.recipe for record in found.buckets]
    assert [bucket.rule for bucket in plan(QWEN, [128], profile=found).buckets] == [f"{found.title}: 1.25 of the floor"]
    record = found.buckets[1]
    assert (record.ratio, record.spread_us, record.launches, record.worst_row) == (1.25, 0.25, 4, 0.0321)
    assert record.tried == len({recipe for tokens, recipe, _ in fake.made[0].runs if tokens == 128})
    assert found.kernels == {path: kernels_version(path) for path in ("gathered", "masked")}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.provenance["date"])
    assert found.provenance["ceilings"] == "4.20 TB/s read, 1500 TFLOP/s dense fp8_block"
    assert found.provenance["command"] == "graphmoe tune --model qwen3-30b-a3b --tp 1 --ep 1 --format fp8_block --buckets 8,128,2048"
    assert {"torch", "triton", "driver", "graphmoe"} <= found.provenance.keys()
    assert "3 of 3 buckets to measure" in output
    assert "compiled 17 recipes" in output
    assert re.search(r"T=128 +25\.0 \+-0\.2 us, 1\.25 of the floor, 4 kernels, worst row 0\.0321, gathered .*gathered 1\.25, masked 2\.50", output)
    assert f"3 buckets in {tmp_path / FILE}" in output
    assert "not measured" not in output


def test_a_shape_has_one_file_however_it_was_given(tune: Any, tmp_path: Path) -> None:
    tune("--model", "K=8,E=0128,H=2048,I=768", "--buckets", "8")
    assert [record.tokens for record in Profile.load(tmp_path / FILE).buckets] == [8]
    assert "1 of 2 buckets to measure" in tune("--model", "qwen3-30b-a3b", "--buckets", "8,16")
    tune("--model", "H=2048,E=96,K=8,I=1536", "--tp", "2", "--buckets", "8")
    assert (tmp_path / "nvidia-h200/E96-K8-H2048-I1536-tp2.json").is_file()


def test_a_second_run_measures_what_the_first_did_not(tune: Any, fake: Any, tmp_path: Path) -> None:
    tune("--buckets", "8,64")
    before = Profile.load(tmp_path / FILE).buckets
    fake.time_of = staticmethod(lambda tokens, recipe: 3.0)
    output = tune("--buckets", "8,32,64,128")
    assert fake.compiled == [(QWEN, "fp8_block", [32, 128])]
    assert fake.measured() == [32, 128]
    assert "2 of 4 buckets to measure" in output
    after = {record.tokens: record for record in Profile.load(tmp_path / FILE).buckets}
    assert list(after) == [8, 32, 64, 128]
    assert (after[8], after[64]) == before
    assert (after[32].ratio, after[128].ratio) == (3.0, 3.0)
    content = (tmp_path / FILE).read_bytes()
    output = tune("--buckets", "8,128")
    assert "0 of 2 buckets to measure" in output
    assert "4 buckets in" in output
    assert (fake.made, fake.compiled, (tmp_path / FILE).read_bytes()) == ([], [], content)


def test_a_record_of_other_kernels_is_measured_again(tune: Any, fake: Any, tmp_path: Path) -> None:
    """masked is the best at 2048 tokens, gathered at 8; the kernels of gathered change."""
    tune("--buckets", "8,2048")
    data = json.loads((tmp_path / FILE).read_text())
    data["kernels"]["gathered"] = "0" * 16
    (tmp_path / FILE).write_text(json.dumps(data))
    assert "1 of 2 buckets to measure" in tune("--buckets", "8,2048")
    assert fake.measured() == [8]
    profile = Profile.load(tmp_path / FILE)
    assert [record.tokens for record in profile.buckets] == [8, 2048]
    assert profile.void(8) is None


def test_records_of_other_libraries_are_measured_again(tune: Any, fake: Any, tmp_path: Path) -> None:
    """A profile has one provenance: what it says must hold for every record."""
    tune("--buckets", "8,128")
    data = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**data, "provenance": {**data["provenance"], "torch": "1.0"}}))
    assert "1 of 1 buckets to measure" in tune("--buckets", "8")
    assert [record.tokens for record in Profile.load(tmp_path / FILE).buckets] == [8]


def test_records_of_another_device_are_refused(command: Command, tune: Any, fake: Any, tmp_path: Path) -> None:
    tune("--buckets", "8")
    data = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**data, "device": "NVIDIA H100"}))
    assert_clean(command("tune", "--out", tmp_path, "--buckets", "32"), "PlanError", "measured on 'NVIDIA H100'", "--again writes")


def test_again_measures_what_is_named_and_keeps_the_rest(tune: Any, fake: Any, tmp_path: Path) -> None:
    tune("--buckets", "8,32,64")
    old = Profile.load(tmp_path / FILE).buckets
    fake.time_of = staticmethod(lambda tokens, recipe: 3.0)
    assert "2 of 2 buckets to measure" in tune("--buckets", "8,64", "--again")
    assert fake.measured() == [8, 64]
    new = Profile.load(tmp_path / FILE).buckets
    assert [record.tokens for record in new] == [8, 32, 64]
    assert new[1] == old[1]
    assert [record.ratio for record in new] == [3.0, old[1].ratio, 3.0]


def test_without_budget_nothing_is_compiled_or_measured_and_what_is_left_is_named(tune: Any, fake: Any, tmp_path: Path) -> None:
    output = tune("--buckets", "8,32", "--budget", "0")
    assert "time budget of 0 s spent; not measured: 8,32 (go on with --buckets 8,32)" in output
    assert (fake.made, fake.compiled, list(tmp_path.iterdir())) == ([], [], [])
    tune("--buckets", "8")
    content = (tmp_path / FILE).read_bytes()
    assert "not measured: 32 (go on with --buckets 32)" in tune("--buckets", "8,32", "--budget", "0")
    assert "not measured: 8,32 (go on with --buckets 8,32 --again)" in tune("--buckets", "8,32", "--budget", "0", "--again")
    assert (tmp_path / FILE).read_bytes() == content


@pytest.mark.parametrize("again", [(), ("--again",)], ids=["anew", "again"])
def test_no_bucket_is_begun_after_the_budget(again: tuple[str, ...], tune: Any, fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second goes by with every trial. What an earlier run measured is kept."""
    if again:
        tune("--buckets", "8,64")
    now = [0.0]

    def time_of(tokens: int, recipe: Recipe) -> float:
        now[0] += 1.0
        return 3.0

    fake.time_of = staticmethod(time_of)
    monkeypatch.setattr(TUNE, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    output = tune("--buckets", "8,16,64", "--budget", "1.5", *again)
    assert fake.measured() == [8]
    assert f"time budget of 1.5 s spent; not measured: 16,64 (go on with --buckets 16,64{' --again' if again else ''})" in output
    assert [(record.tokens, record.ratio) for record in Profile.load(tmp_path / FILE).buckets] == ([(8, 3.0), (64, 1.5)] if again else [(8, 3.0)])


@pytest.mark.parametrize(
    ("arguments", "name", "spec", "fmt"),
    [
        (("--tp", 4), "qwen3-30b-a3b-tp4", QWEN.shard(tp=4, block=128), "fp8_block"),
        (("--format", "fp8"), "qwen3-30b-a3b", QWEN, "fp8_block"),
        (("--ep", 2, "--format", "bf16"), "qwen3-30b-a3b-ep2-bf16", QWEN.shard(ep=2), "bf16"),
        (("--model", "glm-4.5-air", "--tp", 2, "--ep", 4, "--format", "ue8m0"), "glm-4.5-air-tp2-ep4-ue8m0", None, "ue8m0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rank_is_tuned_as_its_weights_are_stored(
    arguments: tuple[object, ...], name: str, spec: MoESpec | None, fmt: str, tune: Any, fake: Any, tmp_path: Path
) -> None:
    """In whole scale blocks; so that `graphmoe plan` and a runtime of that shard find the profile."""
    spec = spec or named_spec("glm-4.5-air").shard(tp=2, ep=4, block=128)
    tune("--buckets", "8", *arguments)
    assert [(bench.spec, bench.fmt) for bench in fake.made] == [(spec, fmt)]
    assert [file.name for file in (tmp_path / "nvidia-h200").iterdir()] == [f"{name}.json"]
    assert find_profile(spec, fmt, H200, root=tmp_path) is not None
    assert plan(spec, [8], fmt=fmt, profile=find_profile(spec, fmt, H200, root=tmp_path)).buckets[0].recipe.path == "gathered"


def test_profiles_are_written_where_they_are_shipped_unless_told_otherwise(
    command: Command, fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TUNE, "profiles_root", lambda: tmp_path / "shipped")
    assert command("tune", "--buckets", "8")[0] == 0
    assert (tmp_path / "shipped" / FILE).is_file()


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        ("{", "PlanError", "is no JSON"),
        (json.dumps({"schema": "graphmoe.profile/0"}), "SchemaMismatch", "'graphmoe.profile/0'"),
        (None, "UnknownRecipe", "was measured for num_experts=8, top_k=2"),
    ],
    ids=["broken", "schema", "shape"],
)
def test_a_file_of_something_else_is_refused_unless_it_may_be_written_anew(
    content: str | None, error: str, says: str, command: Command, tune: Any, fake: Any, tmp_path: Path
) -> None:
    file = tmp_path / FILE
    file.parent.mkdir()
    if content is None:
        record = BucketRecord(8, Recipe("psum", block_e=64), 28.0, 0.5, 25.0, 6, 0.03, 12)
        Profile(H200, "fp8_block", MoESpec(8, 2, 2048, 768), {"psum": kernels_version("psum")}, {"date": "2026-11-29"}, (record,)).save(file)
    else:
        file.write_text(content)
    before = file.read_bytes()
    assert_clean(command("tune", "--out", tmp_path, "--buckets", "8,32"), error, says, f"--again writes {file} anew")
    assert (fake.made, file.read_bytes()) == ([], before)
    tune("--buckets", "32", "--again")
    assert [one.tokens for one in Profile.load(file).buckets] == [32]


def test_a_bucket_without_a_working_recipe_is_one_clean_line_and_the_others_are_kept(command: Command, fake: Any, tmp_path: Path) -> None:
    fake.time_of = staticmethod(lambda tokens, recipe: None if tokens == 32 else 2.0)
    result = command("tune", "--out", tmp_path, "--buckets", "8,32,64")
    assert_clean(
        result, "GraphMoEError", "no recipe works at 32 tokens", *(f"wrong: {point.path}" for point in starting_points(QWEN, 32, "fp8_block"))
    )
    assert [one.tokens for one in Profile.load(tmp_path / FILE).buckets] == [8]


def test_refused_recipes_are_told(tune: Any, fake: Any) -> None:
    fake.time_of = staticmethod(lambda tokens, recipe: None if recipe.path == "masked" else 2.0)
    assert re.search(r"T=8 .*masked inf.*; refused 1: masked row_tile=128: wrong: masked\n", tune("--buckets", "8"))


# --- both


WRONG: list[tuple[tuple[str, ...], str, str]] = [
    (("--model", "gpt-0"), "SpecError", "unknown model 'gpt-0'"),
    (("--format", "int3"), "UnsupportedShape", "unknown format 'int3'"),
    (("--tp", "5"), "SpecError", "--tp 5 does not divide"),
    (("--buckets", "0"), "SpecError", "positive ints"),
]


@pytest.mark.parametrize("which", ["tune", "bench"])
@pytest.mark.parametrize(("arguments", "error", "says"), WRONG, ids=[" ".join(case[0]) for case in WRONG])
def test_a_wrong_argument_is_one_clean_line_before_anything_is_compiled(
    which: str, arguments: tuple[str, ...], error: str, says: str, command: Command, fake: Any
) -> None:
    assert_clean(command(which, *arguments), error, says)
    assert (fake.made, fake.compiled) == ([], [])


@pytest.mark.parametrize("which", ["tune", "bench"])
def test_a_machine_without_a_gpu_is_one_clean_line(which: str, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That names no option which these commands do not have."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = command(which, *(("--out", tmp_path) if which == "tune" else ()))
    assert_clean(result, "InvalidInput", "sees no CUDA device")
    assert "--device" not in result[2]
    assert (result[1], list(tmp_path.iterdir())) == ("", [])


def test_the_measured_gpu_is_the_current_one_and_has_torch_s_name(fake: Any) -> None:
    assert measured_gpu() == (torch.device("cpu"), H200)


@pytest.mark.parametrize("which", ["tune", "bench"])
def test_the_help_names_every_model_and_format(which: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, output, _ = command(which, "--help")
    assert code == 0
    for name in ("qwen3-30b-a3b", "kimi-k2", "fp8_block", "ue8m0", "bf16", "vllm", "sglang"):
        assert re.search(rf"\b{re.escape(name)}\b", output)


# --- bench


def cells(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if line.startswith("│")]


def test_bench_measures_what_auto_runs_and_prints_it(command: Command, fake: Any) -> None:
    """Twice the times on the routing of half the floor: the same ratio."""
    code, output, stderr = command("bench", "--buckets", "1,8,1024")
    assert (code, stderr) == (0, "")
    [made] = fake.made
    assert (made.spec, made.fmt) == (QWEN, "fp8_block")
    chosen = [(bucket.tokens, bucket.recipe, True) for bucket in plan(QWEN, [1, 8, 1024]).buckets]
    assert made.runs == chosen
    assert "qwen3-30b-a3b, fp8_block: cpu, 4.20 TB/s read, 1500 TFLOP/s dense fp8_block" in output
    assert cells(output) == [
        ["1", "balanced", "3", "* direct", "50.0", "0.2", "2.50", "", "20", "4", "3.0", "0.0321"],
        ["1", "zipf", "1", "* direct", "25.0", "0.2", "2.50", "77.7", "40", "4", "3.0", "0.0321"],
        ["8", "balanced", "3", "* gathered", "30.0", "0.2", "1.50", "", "267", "4", "3.0", "0.0321"],
        ["8", "zipf", "1", "* gathered", "15.0", "0.2", "1.50", "77.7", "533", "4", "3.0", "0.0321"],
        ["1024", "balanced", "3", "* psum", "50.0", "0.2", "2.50", "", "20480", "4", "3.0", "0.0321"],
        ["1024", "zipf", "1", "* psum", "25.0", "0.2", "2.50", "77.7", "40960", "4", "3.0", "0.0321"],
    ]


def test_bench_follows_the_profile_of_this_gpu(command: Command, fake: Any, tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune("--buckets", "128")
    monkeypatch.setattr(BENCH, "find_profile", lambda *wanted: find_profile(*wanted, root=tmp_path))
    fake.made.clear()
    code, _, _ = command("bench", "--buckets", "128", "--json", tmp_path / "out.json")
    assert code == 0
    measured = json.loads((tmp_path / "out.json").read_text())
    [(_, recipe, _)] = fake.made[0].runs
    assert dict(recipe.options)["tile"] == 32
    assert measured["provenance"]["profile"] == Profile.load(tmp_path / FILE).title
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", measured["provenance"]["date"])


def test_bench_of_a_rank_is_of_whole_scale_blocks(command: Command, fake: Any) -> None:
    assert command("bench", "--buckets", "8", "--tp", "4", "--format", "fp8")[0] == 0
    assert (fake.made[0].spec.intermediate_size, fake.made[0].fmt) == (256, "fp8_block")


def test_others_are_every_path_once_beside_auto_s(command: Command, fake: Any) -> None:
    """direct would take minutes at many tokens."""
    code, output, _ = command("bench", "--buckets", "1,8,32", "--others")
    assert code == 0
    runs = [(tokens, recipe.path, calls) for tokens, recipe, calls in fake.made[0].runs]
    assert runs == [
        *((1, path, path == "direct") for path in ("direct", "gathered", "psum", "masked")),
        *((8, path, path == "gathered") for path in ("gathered", "direct", "psum", "masked")),
        *((32, path, path == "gathered") for path in ("gathered", "psum", "masked")),
    ]
    rows = cells(output)
    assert [row[3] for row in rows if row[:2] == ["8", "zipf"]] == ["* gathered", "direct", "psum", "masked"]
    assert [row[7] for row in rows if row[:2] == ["8", "zipf"]] == ["77.7", "", "", ""]


def test_a_refused_recipe_is_told_and_not_in_the_table(command: Command, fake: Any) -> None:
    fake.time_of = staticmethod(lambda tokens, recipe: None if recipe.path == "psum" else 2.0)
    code, output, stderr = command("bench", "--buckets", "8", "--others")
    assert code == 0
    assert stderr == "T=8 psum block_e=64: wrong: psum\n"
    assert [row[3] for row in cells(output)] == ["* gathered", "* gathered", "direct", "direct", "masked", "masked"]


def test_a_measurement_is_kept_printed_and_drawn_again(command: Command, fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, picture = tmp_path / "measured.json", tmp_path / "picture.png"
    _, first, _ = command("bench", "--buckets", "1,8", "--others", "--json", file)
    assert json.loads(file.read_text())["schema"] == SCHEMA
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fake.made.clear()
    code, second, stderr = command("bench", "--load", file, "--png", picture, "--json", tmp_path / "copy.json")
    assert (code, second, stderr) == (0, first, "")
    assert len(cells(second)) == 16
    assert fake.made == []
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert (tmp_path / "copy.json").read_bytes() == file.read_bytes()


def test_a_picture_shows_every_path_the_floor_and_what_auto_chose(
    command: Command, fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the balanced routing."""
    from matplotlib.figure import Figure

    drawn: list[Figure] = []

    class Kept(Figure):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            drawn.append(self)

    monkeypatch.setattr("matplotlib.figure.Figure", Kept)
    assert command("bench", "--buckets", "1,8", "--others", "--png", tmp_path / "picture.svg")[0] == 0
    [axes] = drawn[0].axes
    lines = {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert lines == {
        "floor": ([1, 8], [20.0, 20.0]),
        "direct": ([1, 8], [50.0, 50.0]),
        "gathered": ([1, 8], [30.0, 30.0]),
        "psum": ([1, 8], [50.0, 50.0]),
        "masked": ([1, 8], [50.0, 50.0]),
        "auto's choice": ([1, 8], [50.0, 30.0]),
    }
    assert axes.get_title() == "qwen3-30b-a3b, fp8_block"


def test_a_picture_without_auto_s_choice_is_drawn(command: Command, fake: Any, tmp_path: Path) -> None:
    """It was refused; others were not."""
    fake.time_of = staticmethod(lambda tokens, recipe: None if recipe.path == "gathered" else 2.0)
    code, _, stderr = command("bench", "--buckets", "8", "--others", "--png", tmp_path / "picture.png")
    assert code == 0
    assert stderr.startswith("T=8 gathered ")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_nothing_to_draw_is_one_clean_line(command: Command, fake: Any, tmp_path: Path) -> None:
    file = tmp_path / "none.json"
    file.write_text(json.dumps({"schema": SCHEMA, "title": "t", "ceilings": "c", "provenance": {"device": "d"}, "rows": []}))
    assert_clean(command("bench", "--load", file, "--png", tmp_path / "picture.png"), "InvalidInput", "nothing to draw")
    assert not (tmp_path / "picture.png").exists()


GOOD: dict[str, Any] = {
    "schema": SCHEMA,
    "title": "t",
    "provenance": {"device": "d"},
    "ceilings": "c",
    "rows": [
        {
            "tokens": 8, "routing": "balanced", "path": "psum", "recipe": "psum block_e=64", "chosen": True, "graph_us": 50.0, "spread_us": 1.0,
            "floor_us": 25.0, "call_us": None, "launches": 6, "arena_bytes": 1 << 20, "worst_row": 0.03, "active_experts": 7,
        }
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"{", "is not a measurement"),
        (b"\xff\xfe\x00", "is not a measurement"),
        (b"[]", f"has no schema '{SCHEMA}'"),
        (json.dumps({**GOOD, "schema": "graphmoe.bench/0"}).encode(), f"has no schema '{SCHEMA}'"),
        (json.dumps({**GOOD, "rows": [{**GOOD["rows"][0], "colour": 3}]}).encode(), "colour"),
        (json.dumps({**GOOD, "rows": [{"tokens": 8}]}).encode(), "routing"),
        (json.dumps({**GOOD, "rows": 3}).encode(), "lacks or misspells"),
        (json.dumps({**GOOD, "provenance": {}}).encode(), "lacks device"),
        (json.dumps({**GOOD, "provenance": "by hand"}).encode(), "lacks or misspells"),
        *(
            (json.dumps({**GOOD, "rows": [{**GOOD["rows"][0], field: value}]}).encode(), "lacks or misspells")
            for field, value in (
                *((field, value) for field in ("graph_us", "floor_us") for value in (None, "5", 0, -1.0, 10**400, float("nan"))),
                *((field, "a") for field in ("spread_us", "worst_row", "call_us", "tokens", "arena_bytes", "launches", "active_experts")),
                *((field, None) for field in ("path", "routing", "recipe", "worst_row", "arena_bytes")),
                ("tokens", 0),
            )
        ),
        (("[" * 100_000).encode(), "is not a measurement"),
        *(
            (json.dumps({key: value for key, value in GOOD.items() if key != name}).encode(), name)
            for name in ("title", "ceilings", "provenance", "rows")
        ),
    ],
    ids=lambda value: "" if isinstance(value, bytes | None) else value,
)
def test_what_is_no_measurement_is_one_clean_line(content: bytes | None, says: str, command: Command, tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    if content is not None:
        file.write_bytes(content)
    assert_clean(command("bench", "--load", file), "InvalidInput", str(file), says)


def test_a_good_measurement_of_the_test_above_is_read(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(GOOD))
    code, output, stderr = command("bench", "--load", file)
    assert (code, stderr) == (0, "")
    assert cells(output) == [["8", "balanced", "7", "* psum", "50.0", "1.0", "2.00", "", "160", "6", "1.0", "0.0300"]]


def test_without_matplotlib_a_picture_is_refused_before_anything_is_measured(
    command: Command, fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert_clean(command("bench", "--buckets", "8", "--png", tmp_path / "picture.png"), "MissingBackend", "pip install matplotlib", "--load")
    assert fake.made == []
    assert command("bench", "--buckets", "8")[0] == 0


@pytest.mark.parametrize(("option", "name"), [("--json", "absent/out.json"), ("--png", "absent/out.png"), ("--png", "out.words")])
def test_what_cannot_be_written_is_one_clean_line_after_the_table(option: str, name: str, command: Command, fake: Any, tmp_path: Path) -> None:
    result = command("bench", "--buckets", "8", option, tmp_path / name)
    assert_clean(result, "InvalidInput", "cannot be written to", str(tmp_path / name))
    assert len(cells(result[1])) == 2
