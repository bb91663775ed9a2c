"""Environment variables with their former names, and the one that says what tokens travel as."""

from __future__ import annotations

import warnings

import pytest

from graphmoe.environment import DISPATCH_PAYLOAD, Variable
from graphmoe.errors import BadSetting
from graphmoe.formats import FORMATS, Rounding
from graphmoe.payload import dispatch_payload

RENAMED = Variable("NEW", ("on", "off"), former=("OLD", "OLDER"))
QUANTISES, LEAVES_BF16 = Rounding(), Rounding(quantise=False)


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DISPATCH_PAYLOAD.name, raising=False)


@pytest.mark.parametrize("environ", [{}, {"NEW": ""}, {"OLD": ""}, {"ELSE": "on"}], ids=str)
def test_a_variable_that_is_not_set_is_none(environ: dict[str, str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RENAMED.read(environ) is None


def test_the_name_of_today_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RENAMED.read({"NEW": "on", "OLD": ""}) == "on"


@pytest.mark.parametrize("former", ["OLD", "OLDER"])
@pytest.mark.parametrize("also", [{}, {"NEW": "off"}], ids=str)
def test_a_former_name_is_read_with_a_warning_that_names_both(former: str, also: dict[str, str]) -> None:
    with pytest.warns(DeprecationWarning, match=f"{former} is called NEW now") as caught:
        assert RENAMED.read({former: "off"} | also) == "off"
    assert [one.filename for one in caught] == [__file__]


@pytest.mark.parametrize("name", ["NEW", "OLD"])
@pytest.mark.parametrize("value", ["ON", "1", " on"])
def test_a_value_that_is_not_legal_is_refused_with_the_legal_ones(name: str, value: str) -> None:
    with pytest.raises(BadSetting, match=f"{name}='{value}'.*legal are 'on' and 'off'"):
        RENAMED.read({name: value})


@pytest.mark.parametrize("names", [("NEW", "OLD"), ("OLD", "OLDER"), ("NEW", "OLDER")])
def test_names_that_contradict_each_other_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(BadSetting, match=f"{names[0]}='on', {names[1]}='off'.*keep NEW alone"):
        RENAMED.read(dict(zip(names, ("on", "off"), strict=True)))


def test_the_environment_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DISPATCH_PAYLOAD.read() is None
    monkeypatch.setenv("GRAPHMOE_DISPATCH_PAYLOAD", "bf16")
    assert DISPATCH_PAYLOAD.read() == "bf16"


@pytest.mark.parametrize("fmt", FORMATS)
def test_tokens_travel_as_fp8_wherever_the_experts_take_it(fmt: str) -> None:
    assert dispatch_payload(FORMATS[fmt], QUANTISES) == ("bf16" if fmt == "bf16" else "fp8")
    assert dispatch_payload(FORMATS[fmt], LEAVES_BF16) == "bf16"
    assert dispatch_payload(FORMATS[fmt], QUANTISES, "bf16") == "bf16"


@pytest.mark.parametrize("by_environment", [False, True])
@pytest.mark.parametrize(("fmt", "rounding", "who"), [("bf16", QUANTISES, "format 'bf16'"), ("fp8_block", LEAVES_BF16, "the path")])
def test_fp8_for_experts_that_take_bf16_is_refused(
    fmt: str, rounding: Rounding, who: str, by_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_environment:
        monkeypatch.setenv("GRAPHMOE_DISPATCH_PAYLOAD", "fp8")
    with pytest.raises(BadSetting, match=f"payload='fp8', but {who} takes bf16 tokens"):
        dispatch_payload(FORMATS[fmt], rounding, None if by_environment else "fp8")


def test_wish_and_environment_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHMOE_DISPATCH_PAYLOAD", "bf16")
    assert dispatch_payload(FORMATS["ue8m0"], QUANTISES) == "bf16"
    assert dispatch_payload(FORMATS["ue8m0"], QUANTISES, "bf16") == "bf16"
    with pytest.raises(BadSetting, match="payload='fp8', but the environment says GRAPHMOE_DISPATCH_PAYLOAD='bf16'"):
        dispatch_payload(FORMATS["ue8m0"], QUANTISES, "fp8")


def test_another_payload_is_refused() -> None:
    with pytest.raises(BadSetting, match="payload='int8'; legal are 'fp8' and 'bf16'"):
        dispatch_payload(FORMATS["fp8_block"], QUANTISES, "int8")
