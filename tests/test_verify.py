"""`verify` finds what it is for: each planted fault is caught, named by a case that reproduces it, and a sound runtime passes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from typer.testing import CliRunner

from graphmoe import BucketLadder, MoESpec, bounds, reference
from graphmoe.cli import app
from graphmoe.errors import InvalidInput, VerifyFailed
from graphmoe.paths import PATHS
from graphmoe.samples import ROUTINGS
from graphmoe.verify import Case, Verifier, soak, verify
from tests.checks import FP8_OF

SPEC = MoESpec(5, 2, 128, 128)
CPU = torch.device("cpu")
SIZES = BucketLadder([1, 3, 8])


@pytest.fixture(params=list(PATHS))
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def build() -> Iterator[Callable[[str], Verifier]]:
    made: list[Verifier] = []

    def one(path: str) -> Verifier:
        made.append(Verifier(SPEC, FP8_OF[path], SIZES, path, CPU))
        return made[-1]

    yield one
    for verifier in made:
        verifier.close()


def first_failure(verifier: Verifier) -> str:
    with pytest.raises(VerifyFailed) as found:
        verify(verifier, 400)
    return str(found.value)


def test_a_sound_runtime_passes_and_every_kind_of_case_is_there(path: str, build: Callable[[str], Verifier]) -> None:
    verifier = build(path)
    cases = verifier.cases()
    assert {case.tokens for case in cases} == {0, 1, 2, 3, 4, 7, 8}
    assert {case.routing for case in cases} == set(ROUTINGS)
    assert {case.layer for case in cases} == {0, 1}
    assert len({case.poison for case in cases}) == 3
    verify(verifier, 40)
    assert verifier.calls == 40
    assert 0 < verifier.worst < 0.06


def test_a_case_reproduces_itself() -> None:
    case = Case(3, "zipf", 1, 0, -1)
    assert Case.parse(str(case)) == case
    for wrong in (
        "",
        "T=3",
        "T=x routing=zipf seed=1 layer=0 poison=-1",
        "T=3 routing=none seed=1 layer=0 poison=-1",
        str(Case(3, "zipf", 1, 7, -1)),
    ):
        with pytest.raises(VerifyFailed):
            Case.parse(wrong)


def test_an_off_by_one_in_the_row_map_is_caught(build: Callable[[str], Verifier], monkeypatch: pytest.MonkeyPatch) -> None:
    sound = reference.route

    def shifted(ids: torch.Tensor, layout: object, *, row_of: torch.Tensor, **rest: object) -> None:
        sound(ids, layout, row_of=row_of, **rest)  # type: ignore[arg-type]
        last = row_of.argmax()
        if row_of.flatten()[last] > 0:
            row_of.view(-1)[last] -= 1

    monkeypatch.setattr(reference, "route", shifted)
    message = first_failure(build("psum"))
    assert re.search(r"T=\d+ routing=\w+ seed=\d layer=\d poison=-?\d+: row \d+ is off", message)


def test_a_missing_padding_mask_is_caught(build: Callable[[str], Verifier], monkeypatch: pytest.MonkeyPatch) -> None:
    """Combine that reads the row of a slot that has none."""
    sound = reference.combine

    def careless(rows: torch.Tensor, row_of: torch.Tensor, *rest: object, **more: object) -> None:
        sound(rows, torch.where(row_of == -1, 0, row_of), *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "combine", careless)
    assert "is off" in first_failure(build("gathered"))


def test_a_buffer_that_is_too_small_is_caught_by_its_guard(build: Callable[[str], Verifier], monkeypatch: pytest.MonkeyPatch) -> None:
    """A scatter that writes one row more than its buffer has."""
    verifier = build("compact")
    sound = reference.scatter

    def beyond(x: torch.Tensor, row_of: torch.Tensor, *, rows: torch.Tensor, **rest: object) -> None:
        sound(x, row_of, rows=rows, **rest)  # type: ignore[arg-type]
        torch.as_strided(rows.view(torch.uint8), (4,), (1,), rows.storage_offset() + rows.nbytes).zero_()

    monkeypatch.setattr(reference, "scatter", beyond)
    assert "wrote behind x_rows" in first_failure(verifier)


def test_a_stale_row_is_caught_by_the_bits_of_an_earlier_call(build: Callable[[str], Verifier], monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that depends on the call before: right against the oracle's limit, but not the same twice."""
    sound, calls = reference.combine, [0]

    def drifting(*arguments: object, out: torch.Tensor, **more: object) -> None:
        sound(*arguments, out=out, **more)  # type: ignore[arg-type]
        calls[0] += 1
        if calls[0] > 50:
            out.mul_(1.01)

    monkeypatch.setattr(reference, "combine", drifting)
    assert "other bits" in first_failure(build("masked"))


def test_a_failure_is_reported_by_its_smallest_batch(build: Callable[[str], Verifier], monkeypatch: pytest.MonkeyPatch) -> None:
    sound = reference.gemv_down

    def broken_from_four_tokens(*arguments: object, out: torch.Tensor, **more: object) -> None:
        sound(*arguments, out=out, **more)  # type: ignore[arg-type]
        if out.shape[0] > 3:
            out[0] += 1

    monkeypatch.setattr(reference, "gemv_down", broken_from_four_tokens)
    assert first_failure(build("direct")).startswith("T=4 ")


def test_a_soak_of_threads_on_two_runtimes_passes_and_shows_a_mix_up(build: Callable[[str], Verifier], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [build("psum"), build("gathered")]
    assert soak(pair, 0.5) > 0
    kept = dict(pair[0]._first)
    pair[0]._first = {key: value + 1 for key, value in kept.items()}
    with pytest.raises(VerifyFailed, match="other bits"):
        soak(pair, 0.5)


def test_too_small_a_bound_cannot_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row bound one block short: the witness writes beyond, whatever the other routings do."""
    sound = bounds.compact_rows
    monkeypatch.setattr(bounds, "compact_rows", lambda *arguments, **named: sound(*arguments, **named) - arguments[3])
    verifier = Verifier(SPEC, "fp8_block", SIZES, "psum", CPU)
    with pytest.raises((VerifyFailed, IndexError, RuntimeError)):
        verify(verifier, 400)
    verifier.close()


def test_the_command_says_what_it_ran_and_reproduces_a_case() -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["verify", "--device", "cpu", "--buckets", "1,2", "--examples", "3", "--path", "psum"])
    assert done.exit_code == 0, done.output
    assert re.search(r"psum: 3 calls, 0 failures, worst row off by 0\.\d+", done.output)
    again = runner.invoke(
        app, ["verify", "--device", "cpu", "--buckets", "1,2", "--path", "psum", "--reproduce", "T=2 routing=zipf seed=1 layer=0 poison=-1"]
    )
    assert again.exit_code == 0, again.output
    assert "T=2 routing=zipf seed=1 layer=0 poison=-1: right" in again.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--examples", "0"), "--examples 0"),
        (("--examples", "-5"), "--examples -5"),
        (("--soak", "-1"), "--soak -1"),
        (("--tp", "8"), "--tp 8 --ep 1 need --model"),
        (("--reproduce", "T=2 routing=zipf seed=1 layer=0 poison=-1"), "--reproduce needs --path"),
    ],
)
def test_the_command_refuses_what_would_verify_nothing_or_something_else(options: tuple[str, ...], said: str) -> None:
    refused = CliRunner().invoke(app, ["verify", "--device", "cpu", *options])
    assert isinstance(refused.exception, InvalidInput)
    assert said in str(refused.exception)
