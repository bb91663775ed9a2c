"""Timing a model's decode step: what is run, how kernels are told apart, and `graphmoe bench-decode` on a small checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import graphmoe
from graphmoe import GraphedDecoder
from graphmoe.cli import app, main
from graphmoe.decode.timing import graph_timing, loop_timing, prompts_of, shares, shares_of
from graphmoe.errors import BatchTooLarge, CallError, InvalidInput, RuntimeClosed
from tests.tiny_models import tiny_model

pytest.importorskip("transformers")


@pytest.fixture
def decoder() -> GraphedDecoder:
    graphmoe.register_transformers()
    return GraphedDecoder(tiny_model("Qwen3Moe", experts="graphmoe"), [1, 2, 4], 64, progress=False)


def test_a_rehearsal_runs_the_step_that_serving_runs_and_leaves_nothing_behind(decoder: GraphedDecoder) -> None:
    prompts = prompts_of(3, 9, 32)
    before = decoder.generate(prompts, 12)
    with decoder.rehearsal(3, 40) as step:
        for _ in range(24):
            step()
        with pytest.raises(CallError, match="at position 40 was rehearsed 24 times: max_cache_len=64"):
            step()
        with pytest.raises(CallError, match="serving already"):
            decoder.generate(prompts, 1)
    assert decoder.generate(prompts, 12) == before


def test_what_cannot_be_rehearsed_is_refused(decoder: GraphedDecoder) -> None:
    with pytest.raises(BatchTooLarge), decoder.rehearsal(5, 0):
        pass
    serving = decoder.serve([graphmoe.Request([1], 1), graphmoe.Request([1], 9)])
    next(serving)
    with pytest.raises(CallError, match="serving already"), decoder.rehearsal(1, 0):
        pass
    serving.close()
    decoder.close()
    with pytest.raises(RuntimeClosed), decoder.rehearsal(1, 0):
        pass


def test_times_are_of_the_steps_that_were_asked_for(decoder: GraphedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert graph_timing(decoder, 2, 16, repeats=4).median_us > 0
    assert shares(decoder, 2, 16) is None  # no GPU, no kernels
    lengths: list[int] = []
    generate = decoder.generate
    monkeypatch.setattr(decoder, "generate", lambda prompts, length, **how: [lengths.append(length), generate(prompts, length, **how)])
    loop_timing(decoder, prompts_of(2, 5, 32), steps=6, repeats=2)
    assert lengths == [8, 14, 8, 14, 8]
    assert decoder.report().buckets[1].steps == 8 * 3 + 14 * 2


def test_kernels_are_told_apart_as_a_profiler_names_them() -> None:
    names = {
        "_gather_up_kernel": 3.0,
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 128u>(float*, int*)": 2.0,
        "_attend_kernel": 1.5,
        "_weigh_kernel": 0.5,
        "void at::native::reduce_kernel<512, 1>(at::native::ReduceOp)": 2.0,
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": 1.0,
    }
    found = shares_of(list(names.items()))
    assert found is not None
    assert (found.moe, found.attention, found.rest) == pytest.approx((0.5, 0.2, 0.3))
    assert shares_of([]) is None


def test_rivals_run_in_their_own_code_and_leave_the_model_as_it_was() -> None:
    from graphmoe.integrations.transformers.rivals import FORMS, step_timing

    model = tiny_model("Qwen3Moe", experts="graphmoe")
    generation, ran = model.generation_config, set()

    def forward(module: Any, arguments: Any, output: Any) -> None:
        ran.add(module.config._experts_implementation)

    model.model.layers[0].mlp.experts.register_forward_hook(forward)
    prompts = torch.tensor(prompts_of(2, 4, 32))
    for form in FORMS:
        assert isinstance(step_timing(model, form, prompts, steps=2, repeats=2).median_us, float)
    assert ran == {"grouped_mm", "batched_mm", "eager"}
    assert (model.config._experts_implementation, model.generation_config) == ("graphmoe", generation)
    with pytest.raises(InvalidInput, match="'fastest' is not one of"):
        step_timing(model, "fastest", prompts)


def test_a_named_model_has_its_published_sizes_and_can_be_cut() -> None:
    from graphmoe.integrations.transformers import loading

    for name in loading.RANDOM_MODELS:
        sizes, spec = loading._sizes(name), graphmoe.named_spec(name)
        assert (sizes["hidden_size"], sizes["moe_intermediate_size"], sizes["num_experts"]) == (
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_experts,
        )
    graphmoe.register_transformers()
    with pytest.raises(InvalidInput, match="which has 48: give 1 to 48"):
        loading.load("qwen3-30b-a3b", torch.device("cpu"), 49)
    with pytest.raises(InvalidInput, match="neither a directory"):
        loading.load("gpt-0", torch.device("cpu"))


def test_random_weights_are_the_same_every_time_and_disturb_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphmoe.integrations.transformers import loading

    graphmoe.register_transformers()
    small = {"vocab_size": 64, "hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    monkeypatch.setattr(loading, "_sizes", lambda name: {**small, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3})
    before = torch.get_rng_state()
    models = [loading.load("qwen3-30b-a3b", torch.device("cpu"), 2) for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state())
    first, second = ([*model.parameters()] for model in models)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert models[0].config.num_hidden_layers == len(models[0].model.layers) == 2
    assert {parameter.dtype for parameter in first} == {torch.bfloat16}
    assert GraphedDecoder(models[0], [1], 16, progress=False).generate([[1, 2]], 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench-decode") / "model"
    sizes = {"vocab_size": 64, "hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}
    tiny_model("Qwen3Moe", **sizes).save_pretrained(folder)
    return folder


def test_the_command_prints_and_writes_what_it_measured(checkpoint: Path, tmp_path: Path) -> None:
    small = ("--batches", "1,2", "--steps", "2", "--prompt", "3", "--device", "cpu", "--rivals", "eager,compiled")
    result = CliRunner().invoke(app, ["bench-decode", "--model", str(checkpoint), *small, "--json", str(tmp_path / "x.json")])
    assert result.exit_code == 0, result.output
    measured = json.loads((tmp_path / "x.json").read_text())
    assert measured["schema"] == "graphmoe.bench-decode/1"
    assert [(step["batch"], step["fmt"]) for step in measured["steps"]] == [(1, "bf16"), (2, "bf16"), (1, "fp8_block"), (2, "fp8_block")]
    assert {form: sorted(times) for form, times in measured["rivals"].items()} == {"eager": ["1", "2"], "compiled": ["1", "2"]}
    assert "2 layers, prompts of 3 tokens, on cpu" in result.output
    assert "the times say nothing about one" in result.output
    for step in measured["steps"]:
        assert step["graph_us"] > 0
        assert f"{step['graph_us'] / 1e3:.3f}" in result.output


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--rivals", "fastest"), ("--rivals 'fastest'", "grouped_mm")),
        (("--formats", "fp8,bf16"), ("--formats fp8_block,bf16", "bf16 first")),
        (("--formats", "fp8,ue8m0"), ("--formats fp8_block,ue8m0",)),
        (("--steps", "0"), ("--steps 0",)),
        (("--prompt", "200"), ("--cache 256", "at least 264")),
        (("--layers", "3"), ("layers=3", "1 to 2")),
        (("--model", "gpt-0"), ("'gpt-0'", "qwen3-30b-a3b")),
    ],
    ids=lambda each: each[0] if len(each) == 2 and each[0].startswith("--") else "",
)
def test_what_cannot_be_measured_is_one_clean_line(
    arguments: tuple[str, ...], parts: tuple[str, ...], checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [] if "--model" in arguments else ["--model", str(checkpoint)]
    monkeypatch.setattr(sys, "argv", ["graphmoe", "bench-decode", "--device", "cpu", *given, *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert said.count("\n") == 1
    assert all(part in said for part in parts), said
