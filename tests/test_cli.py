"""The command line as a user meets it: what it prints, what it writes, how it exits, and that no mistake ends in a traceback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import graphmoe
from graphmoe import BucketLadder, MoESpec, Plan, Recipe, model_names, named_spec, reference
from graphmoe.cli import app, main
from graphmoe.cli.options import in_options
from graphmoe.profile import find_profile

ROOT = Path(__file__).resolve().parents[1]
LADDER = "1,8,64"


@pytest.fixture(autouse=True)
def _one_thread():
    """Many small matrices: more threads than free cores make each of them wait for the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def _short_demo(monkeypatch):
    """8 bytes instead of 64 in the longest sequence, for tests of something other than the decode loop."""
    monkeypatch.setattr(sys.modules["graphmoe.cli.demo"], "_LONGEST", 8)


short_demo = pytest.mark.usefixtures("_short_demo")


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `graphmoe ARGS` in this process: exit code, stdout, stderr. An exception that `main` lets through fails the test."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["graphmoe", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        return (caught.value.code or 0, *capsys.readouterr())

    return run


def assert_clean(result: tuple[int, str, str], error: str, *parts: str) -> None:
    """Exit code 2 and one line on stderr: the error's name, then what is wrong."""
    code, _, stderr = result
    assert code == 2
    assert stderr.endswith("\n")
    assert stderr.count("\n") == 1, f"not one line: {stderr!r}"
    assert stderr.startswith(f"{error}: ")
    for part in parts:
        assert part in stderr


def table(output: str, title: str) -> dict[str, list[str]]:
    """Rows of the table under `title`, by their first cell."""
    rows = {}
    for line in output[output.index(title) :].splitlines()[1:]:
        if line.startswith("│"):
            first, *cells = (cell.strip() for cell in line.strip("│").split("│"))
            rows[first] = cells
        if line.startswith("└"):
            break
    return rows


# plan


def run_plan(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def mib(plan: Plan) -> str:
    return f"{plan.arena_bytes / 2**20:.1f} MiB"


@pytest.mark.parametrize("model", model_names())
def test_every_model_can_be_planned(model):
    output = run_plan("--model", model, "--buckets", LADDER)
    spec = named_spec(model)
    assert f"E={spec.num_experts} of {spec.num_experts}, K={spec.top_k}, H={spec.hidden_size}, I={spec.intermediate_size}, fp8_block" in output
    rows = table(output, "Row bounds")
    assert list(rows) == LADDER.split(",")
    for cells in rows.values():
        distinct_64, arbitrary_64, distinct_128, arbitrary_128, engines_128, slots, engines_slots = map(int, cells[:7])
        assert distinct_64 <= arbitrary_64
        assert distinct_128 <= arbitrary_128 <= engines_128
        assert slots <= engines_slots
    summary = " ".join(output.split())
    for name, recipe in {
        "masked": Recipe("masked"),
        "compact 64": Recipe("compact", block_e=64),
        "compact 128": Recipe("compact", block_e=128),
    }.items():
        assert f"{name} {mib(graphmoe.plan(spec, LADDER, recipes=recipe))}" in summary
    chosen = graphmoe.plan(spec, LADDER, profile=find_profile(spec, "fp8_block", "NVIDIA H200"))
    assert f"this plan: {mib(chosen)} for 3 buckets" in summary


def test_the_numbers_of_one_plan():
    """Worked out by hand. K = 8 of E = 128, T = 64: A = 512 open 128 blocks, and 6 (3) more of 64 (128) rows if experts may repeat."""
    rows = table(run_plan("--model", "qwen3-30b-a3b", "--buckets", LADDER), "Row bounds")
    assert rows["64"][:7] == ["8192", "8576", "16384", "16768", "16768", "128", "256"]
    assert rows["1"][:7] == ["512", "512", "1024", "1024", "16384", "128", "256"]
    sizes = table(run_plan("--model", "qwen3-30b-a3b", "--buckets", LADDER), "Arena MiB")
    assert list(sizes) == LADDER.split(",")
    for column, recipe in enumerate((Recipe("masked"), Recipe("compact", block_e=64), Recipe("compact", block_e=128))):
        alone = [graphmoe.plan(named_spec("qwen3-30b-a3b"), [int(tokens)], recipes=recipe).arena_bytes for tokens in sizes]
        assert [cells[column] for cells in sizes.values()] == [f"{nbytes / 2**20:.1f}" for nbytes in alone]
    # masked at T = 64: 128 experts of 128 rows. Alive together at most: gate_up bf16 [., 2I] and act rows + scales, or the rows around it.
    # 16384 rows * max(H + 4 * H / 128 + 4 * I, 4 * I + I + 4 * I / 128, I + 4 * I / 128 + 2 * H), and x and y.
    h, i = 2048, 768
    peak = 16384 * max(h + h // 32 + 4 * i, 4 * i + i + i // 32, i + i // 32 + 2 * h)
    assert float(sizes["64"][0]) == pytest.approx((peak + 2 * 64 * h * 2) / 2**20, rel=0.01)


def test_distinct_experts_need_fewer_blocks_on_a_small_expert_parallel_shard():
    """E = 8, K = 8, T = 64: no expert gets more than 64 rows, so 8 blocks of 128; arbitrary, (512 - 8) // 128 = 3 more."""
    output = run_plan("--model", "deepseek-v3", "--ep", "32", "--buckets", LADDER, "--device", "none")
    assert "E=8 of 256" in output
    assert "largest bucket 64, block_e 128: 8 blocks for distinct experts, 11 for arbitrary ones" in output
    assert table(output, "Row bounds")["64"][2:4] == ["1024", "1408"]
    summary = " ".join(output.split())
    assert re.search(r"masked [\d.]+ MiB, compact 64 [\d.]+ MiB, compact 128 [\d.]+ MiB", summary)
    assert re.search(r"this plan: [\d.]+ MiB for 3 buckets .* bucket(s 1 to \d+| 1): .*\(auto: no profile, ", summary)
    engines = re.search(r"with the looser bounds: compact ([\d.]+) MiB, masked ([\d.]+) MiB", summary)
    ours = {name: graphmoe.plan(named_spec("deepseek-v3").shard(ep=32), LADDER, recipes=name).arena_bytes / 2**20 for name in ("compact", "masked")}
    assert float(engines[1]) > ours["compact"]
    assert float(engines[2]) > ours["masked"]


def test_every_option_reaches_the_plan(tmp_path):
    file = tmp_path / "plan.json"
    options = ("--model", "mixtral-8x7b", "--tp", "2", "--ep", "4", "--buckets", "3, 5", "--format", "bf16", "--path", "compact", "--arch", "cpu")
    output = run_plan(*options, "--max-arena-gib", "3", "--json", str(file))
    stored = Plan.from_json(json.loads(file.read_text()))
    spec = MoESpec(8, 2, 4096, 7168, num_local_experts=2)
    assert stored == graphmoe.plan(spec, [3, 5], fmt="bf16", arch="cpu", recipes="compact", max_arena_bytes=3 << 30)
    assert stored.fingerprint[:16] in output
    assert "plan written to" in output


@pytest.mark.parametrize(
    ("model", "tp", "fmt", "stored", "own"),
    [
        ("qwen3-30b-a3b", 4, "fp8", 256, "192 of 768 a rank, stored in whole blocks of 128"),
        ("glm-4.5-air", 2, "ue8m0", 768, "704 of 1408 a rank, stored in whole blocks of 128"),
        ("glm-4.5-air", 2, "bf16", 704, ""),
        ("qwen3-30b-a3b", 2, "fp8_block", 384, ""),
    ],
)
def test_a_tensor_parallel_rank_is_planned_as_its_weights_are_stored(model, tp, fmt, stored, own):
    output = run_plan("--model", model, "--tp", str(tp), "--format", fmt, "--buckets", "1,8")
    name = "fp8_block" if fmt == "fp8" else fmt
    assert f"I={stored}{f' ({own})' if own else ''}, {name}\n" in output


def test_options_of_a_path_reach_the_plan():
    output = run_plan("--buckets", "8", "--path", "compact:block_e=128")
    assert table(output, "Row bounds")["8"][-1] == "compact block_e=128: 8192"


def test_a_layer_is_planned_by_its_sizes_or_refused_with_what_is_wrong(command):
    by_sizes = run_plan("--model", "E=128,K=8,H=2048,I=768", "--buckets", "1,64", "--device", "none")
    by_name = run_plan("--model", "qwen3-30b-a3b", "--buckets", "1,64", "--device", "none")
    assert by_sizes.split("\n", 1)[1] == by_name.split("\n", 1)[1]
    assert "I=256 (192 of 1536 a rank" in run_plan("--model", "E=160,K=8,H=5120,I=1536", "--tp", "8", "--buckets", "1")
    whole = "E=128,K=8,H=2048,I=768"
    junk = (
        f"{whole}x",
        f"{whole},ep4",
        f"junk,{whole}",
        f"{whole},",
        "E=128,,K=8,H=2048,I=768",
        f"{whole}0000000000",
        "E=\uff11\uff12\uff18,K=8,H=2048,I=768",
    )
    for wrong in ("E=128,K=8,H=2048", f"{whole},I=768", "E=128,E=8,H=2048,I=768", "E=128,K=8,H=2048,I=x", "e=128,K=8,H=2048,I=768", *junk):
        code, _, error = command("plan", "--model", wrong)
        assert code == 2
        assert "E=160,K=8,H=5120,I=1536" in error
        assert wrong in error


def test_the_help_names_every_choice(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, output, _ = command("plan", "--help")
    assert code == 0
    for known in (("--format", "x"), ("--arch", "x"), ("--path", "x"), ("--model", "x")):
        message = command("plan", *known)[2]
        names = re.search(r"known: (.*?)(?:, or 'auto')?$", message.strip())[1].split(", ")
        assert len(names) > 2
        for name in names:
            assert re.search(rf"\b{re.escape(name)}\b", output), f"{known[0]} lacks {name}"


WRONG_ARGUMENTS = [
    (("--model", "gpt-0"), "SpecError", ("unknown model 'gpt-0'", *model_names())),
    (("--model", "[/]"), "SpecError", ("unknown model '[/]'",)),
    (("--tp", "5"), "SpecError", ("--tp 5 does not divide intermediate_size=768; these do: 1, 2, 3, 4, 6, 8, 12, 16, ...",)),
    (("--ep", "3"), "SpecError", ("--ep 3 does not divide num_local_experts=128; these do: 1, 2, 4, 8, 16, 32, 64, 128",)),
    (("--ep", "0"), "SpecError", ("--ep 0",)),
    (("--arch", "sm100"), "UnsupportedShape", ("use --format ue8m0",)),
    (("--path", "psum:block_e=96"), "UnknownRecipe", ("block_e in (64, 128), not 96",)),
    (("--path", "psum:96"), "UnknownRecipe", ("'96' in recipe 'psum:96'", "psum:block_e=128")),
    (("--path", "fastest"), "UnknownRecipe", ("unknown path 'fastest'", "masked", "compact", "psum")),
    (("--arch", "sm20"), "UnsupportedShape", ("unknown arch 'sm20'",)),
    (("--format", "int3"), "UnsupportedShape", ("unknown format 'int3'",)),
    (("--max-arena-gib", "0.001"), "ArenaTooLarge", ("bucket 64", "--max-arena-gib is 1.02 MiB", "--max-arena-gib must be at least 0.0")),
    (("--max-arena-gib", "0.02", "--path", "masked"), "ArenaTooLarge", ("pass --path ",)),
    (("--max-arena-gib", "nan"), "PlanError", ("nan",)),
    (("--max-arena-gib", "inf"), "PlanError", ("inf",)),
    (("--max-arena-gib", "-1"), "PlanError", ("-1",)),
    (("--buckets", "0,4"), "SpecError", ("positive ints", "0")),
    (("--buckets", "-4"), "SpecError", ("-4",)),
    (("--buckets", ","), "SpecError", ()),
    (("--buckets", ""), "SpecError", ()),
    (("--buckets", "1 2"), "SpecError", ("1 2",)),
    (("--buckets", "1,x"), "SpecError", ("1,x", "vllm", "sglang")),
    (("--buckets", "3000000000"), "UnsupportedShape", ("bucket 3000000000",)),
]


@pytest.mark.parametrize(("arguments", "error", "parts"), WRONG_ARGUMENTS, ids=[" ".join(case[0]) for case in WRONG_ARGUMENTS])
def test_a_wrong_argument_is_one_clean_line(command, arguments, error, parts):
    ladder = () if "--buckets" in arguments else ("--buckets", LADDER)
    assert_clean(command("plan", *ladder, *arguments), error, *parts)


@pytest.mark.parametrize("where", ["absent/plan.json", "."])
def test_a_plan_that_cannot_be_written_is_one_clean_line(command, where, tmp_path):
    code, stdout, stderr = command("plan", "--buckets", "1", "--json", tmp_path / where)
    assert (code, stdout) == (2, "")
    assert stderr.count("\n") == 1
    assert str(tmp_path / where) in stderr


@pytest.mark.parametrize(
    "arguments",
    [("plan", "--model", "gpt-0"), ("demo", "--device", "cpu", "--buckets", "1", "--text", "/absent")],
    ids=" ".join,
)
def test_a_wrong_argument_is_one_clean_line_of_the_real_process(arguments, tmp_path):
    place = ("--dir", str(tmp_path)) if arguments[0] == "demo" else ()
    done = subprocess.run([sys.executable, "-m", "graphmoe", *arguments, *place], cwd=ROOT, capture_output=True, text=True, check=False)
    assert_clean((done.returncode, done.stdout, done.stderr), "SpecError" if arguments[0] == "plan" else "InvalidInput", arguments[-1])
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("module", [True, False])
def test_the_version_is_printed_and_nothing_else_is_asked_for(command, module):
    if module:
        done = subprocess.run([sys.executable, "-m", "graphmoe", "--version"], cwd=ROOT, capture_output=True, text=True, check=False)
        result = (done.returncode, done.stdout, done.stderr)
    else:
        result = command("--version")
    assert result == (0, f"graphmoe {graphmoe.__version__}\n", "")


def test_a_bug_is_a_plain_traceback(monkeypatch):
    """Typer's own prints the locals of every frame."""
    monkeypatch.setattr(sys.modules["graphmoe.cli.plan"], "model_spec", lambda name: 1 // 0)
    monkeypatch.setattr(sys, "argv", ["graphmoe", "plan"])
    with pytest.raises(ZeroDivisionError):
        main()
    assert not app.pretty_exceptions_enable


def test_errors_speak_of_options():
    for message, wanted in {
        "pass path='psum' (1 MiB), or fmt='bf16'; use device='cpu'": "pass --path psum (1 MiB), or --format bf16; use --device cpu",
        "raise it: max_arena_bytes must be at least 1073741825": "raise it: --max-arena-gib must be at least 1.001",
        "tp=5 of spec.shard(tp=, tp_rank=)": "--tp 5 of spec.shard(tp=, tp_rank=)",
        "unknown path 'psum'": "unknown path 'psum'",
    }.items():
        assert in_options(message) == wanted


# demo


def run_demo(folder: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["demo", "--device", "cpu", "--dir", str(folder), *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_demo_checks_every_byte_and_keeps_its_checkpoint(tmp_path):
    """Four prompts of 16, 32, 48 and 64 bytes, as many new ones each: bucket 4 serves 32 steps, buckets 2 and 1 serve 16 each."""
    code, output = run_demo(tmp_path, "--buckets", "1,2,4", "--path", "psum")
    assert code == 0, output
    assert "checkpoint written to" in output
    assert "4 prompts of 16 to 64 bytes" in output
    rows = table(output, "GiB: ")
    assert {name: cells[-1] for name, cells in rows.items()} == {"1": "16", "2": "16", "4": "32"}
    same, of = map(int, re.search(r"(\d+) of (\d+) new bytes are also the first choice", output).groups())
    assert of == 160
    assert 0.8 * of < same
    assert "the same steps run without graphs gave the same bytes; every check has passed" in output

    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    assert {file.name for file in files} >= {"config.json", "model.safetensors"}
    code, output = run_demo(tmp_path, "--buckets", "1", "--path", "masked")
    assert code == 0, output
    assert "checkpoint found in" in output
    assert files == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}


@short_demo
@pytest.mark.parametrize(("path", "rows"), [("gathered:tile=32", 16), ("direct", 16), ("compact:block_e=128", 2048)])
def test_the_demo_runs_every_path(path, rows, tmp_path):
    """K = 4 of E = 16, T = 4: 16 assignments; aligned, each opens a block."""
    code, output = run_demo(tmp_path, "--buckets", "4", "--path", path)
    assert code == 0, output
    assert table(output, "GiB: ")["4"][0] == str(rows)


def _drop_slot(slot):
    combine = reference.combine

    def broken(rows, row_of, topk_weights, *, scale, out):
        row_of = row_of.clone()
        row_of[:, slot] = -1
        combine(rows, row_of, topk_weights, scale=scale, out=out)

    return "combine", broken


def _swap_gate_and_up():
    act = reference.act

    def broken(gate_up, row_of, **out):
        act(torch.cat(gate_up.chunk(2, dim=-1)[::-1], dim=-1), row_of, **out)

    return "act", broken


def _nan_after_a_while():
    combine, calls = reference.combine, []

    def broken(rows, row_of, topk_weights, *, scale, out):
        combine(rows, row_of, topk_weights, scale=scale, out=out)
        calls.append(None)
        if len(calls) > 16:  # the steps are captured and the prompt is read by then
            out[0] = torch.nan

    return "combine", broken


FAULTS = {
    "first expert dropped": lambda: _drop_slot(0),
    "last expert dropped": lambda: _drop_slot(3),
    "gate and up swapped": _swap_gate_and_up,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_demo_fails_when_the_runtime_is_wrong(fault, tmp_path, monkeypatch):
    name, broken = FAULTS[fault]()
    monkeypatch.setattr(reference, name, broken)
    code, output = run_demo(tmp_path, "--buckets", "4", "--path", "psum")
    assert code == 1, output
    assert "MISMATCH: graphmoe and Transformers' own code disagree" in output
    assert "every check has passed" not in output


@short_demo
def test_the_demo_says_where_a_number_was_not_finite(tmp_path, monkeypatch, command):
    name, broken = _nan_after_a_while()
    monkeypatch.setattr(reference, name, broken)
    arguments = ("demo", "--device", "cpu", "--dir", tmp_path, "--buckets", "1", "--path", "psum")
    assert_clean(command(*arguments), "CallError", "the logits after 0 new tokens are not finite")


@short_demo
def test_a_text_that_is_missing_or_too_short_is_one_clean_line(command, tmp_path):
    arguments = ("demo", "--device", "cpu", "--dir", tmp_path / "checkpoint", "--buckets", "1,2,4")
    text = tmp_path / "text"
    assert_clean(command(*arguments, "--text", text), "InvalidInput", str(text), "cannot be read")
    text.write_bytes(b"x" * 3)
    assert_clean(command(*arguments, "--text", text), "InvalidInput", str(text), "3 bytes", "4 prompts need at least one each")
    text.write_bytes(b"four")
    code, output, _ = command(*arguments, "--text", text)
    assert (code, "every check has passed" in output) == (0, True)


@short_demo
def test_a_damaged_checkpoint_is_one_clean_line(command, tmp_path):
    arguments = ("demo", "--device", "cpu", "--dir", tmp_path, "--buckets", "1")
    assert run_demo(tmp_path, "--buckets", "1")[0] == 0
    file = max(tmp_path.rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1000])
    assert_clean(command(*arguments), "CheckpointError", file.name)
    file.unlink()
    assert_clean(command(*arguments), "CheckpointError", file.name)


@short_demo
def test_the_demo_recovers_from_an_interrupted_first_run(tmp_path, monkeypatch):
    module = sys.modules["graphmoe.cli.demo_model"]

    def stop(*arguments):
        module_convert(*arguments)
        raise KeyboardInterrupt

    module_convert = module.convert_checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(module, "convert_checkpoint", stop)
        CliRunner().invoke(app, ["demo", "--device", "cpu", "--dir", str(tmp_path), "--buckets", "1"])
    assert not list(tmp_path.iterdir())
    code, output = run_demo(tmp_path, "--buckets", "1")
    assert code == 0, output


@short_demo
def test_without_what_it_needs_of_transformers_the_demo_says_so_in_one_line(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert_clean(command("demo", "--device", "cpu", "--dir", tmp_path, "--buckets", "1"), "MissingBackend", "pip install 'graphmoe[transformers]'")


@pytest.mark.parametrize("device", ["cuda", "tpu", "mps", "meta"])
def test_a_device_that_is_not_there_is_one_clean_line(command, device, tmp_path):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has that device")
    assert_clean(command("demo", "--device", device, "--dir", tmp_path, "--buckets", "1"), "InvalidInput", device)


def test_a_directory_that_cannot_be_made_is_one_clean_line(command, tmp_path):
    (tmp_path / "file").touch()
    code, _, stderr = command("demo", "--device", "cpu", "--dir", tmp_path / "file", "--buckets", "1")
    assert code == 2
    assert stderr.count("\n") == 1
    assert str(tmp_path / "file") in stderr


@short_demo
def test_a_path_with_brackets_is_printed_as_it_is(tmp_path):
    """Rich reads `[b]` as markup."""
    folder = tmp_path / "odd[b] [/]"
    code, output = run_demo(folder, "--buckets", "1")
    assert code == 0, output
    assert str(folder) in "".join(output.split("\n"))


def test_the_default_text_is_long_enough_for_the_presets_the_help_names():
    """`--buckets vllm` is 512 sequences, which the default text must feed."""
    module = sys.modules["graphmoe.cli.demo"]
    for preset in ("vllm", "sglang"):
        largest = BucketLadder.preset(preset).largest
        assert len(module._prompts(module._DEFAULT_TEXT, largest)) == largest
