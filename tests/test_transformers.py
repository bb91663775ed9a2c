"""The experts implementation `graphmoe` inside Transformers: the tokens of the model's own code, its memory, and what falls back."""

from __future__ import annotations

import copy
import gc
import logging
import re
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import graphmoe
from graphmoe import BucketLadder, MoESpec
from graphmoe.errors import InvalidInput
from tests.checks import random_weights
from tests.tiny_models import SUPPORTED, clear_prompts, tiny_model

pytest.importorskip("transformers", minversion="5.17", reason="needs the extra `transformers`")

from graphmoe.integrations.transformers import experts, quantize_experts
from graphmoe.integrations.transformers.judging import why_not

BUCKETS = [1, 2, 4, 8, 64]
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_said", set())
    graphmoe.register_transformers(BUCKETS)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "graphmoe"]


def generated(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    ids = torch.tensor(prompts)
    said = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, disable_compile=True)
    return said[:, ids.shape[1] :].tolist()


def stepped(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy decoding without a cache: the whole sequence anew for every token."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_tokens_are_those_of_the_models_own_code(architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(architecture)
    prompts = clear_prompts(model, (5, 9), 12) + clear_prompts(model, (5,), 12, seed=1)
    model.set_experts_implementation("graphmoe")
    for prompt in prompts:
        assert stepped(model, prompt.tokens, 12) == prompt.answer
        assert generated(model, [prompt.tokens], 12) == [prompt.answer]
    together = [prompt for prompt in prompts if len(prompt.tokens) == 5]
    assert generated(model, [prompt.tokens for prompt in together], 12) == [prompt.answer for prompt in together]
    assert not warned(caplog)
    (runtime,) = experts.runtimes_of(model.config)
    assert len(runtime.layers) == sum(experts.is_experts(module) for module in model.modules())


@pytest.mark.parametrize("architecture", ["GptOss", "Qwen3Next"])
def test_other_models_compute_what_their_own_code_does(architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    """gpt-oss has biases, interleaved rows and a gate of its own: its code runs, to the bit. Qwen3-Next attends otherwise."""
    own, ours = tiny_model(architecture), tiny_model(architecture, experts="graphmoe")
    with torch.no_grad():
        expected, got = own(IDS).logits, ours(IDS).logits
    if architecture == "GptOss":
        assert torch.equal(got, expected)
        assert ["its experts have biases" in line for line in warned(caplog)] == [True]  # once, not once a layer or call
        assert experts.runtimes_of(ours.config) == []
    else:
        assert float((got - expected).norm() / expected.norm()) < 0.02
        assert not warned(caplog)


def config_of(**values: Any) -> Any:
    from transformers import PretrainedConfig

    config = PretrainedConfig(**values)
    config._experts_implementation = "graphmoe"
    return config


class Experts(nn.Module):
    """An experts module as Transformers' decorator leaves it."""

    def __init__(self, spec: MoESpec, **changes: Any) -> None:
        super().__init__()
        self.config = config_of()
        self.num_experts, self.act_fn = spec.num_experts, nn.SiLU()
        self.has_gate, self.has_bias, self.is_transposed, self.is_concatenated = True, False, False, True
        w13, w2 = torch.randn(spec.num_experts, 2 * spec.intermediate_size, spec.hidden_size), torch.randn(spec.num_experts, spec.hidden_size, 64)
        self.gate_up_proj, self.down_proj = nn.Parameter(w13.bfloat16() / 8), nn.Parameter(w2.bfloat16() / 8)
        for name, value in changes.items():
            setattr(self, name, value)
        self.eval()

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        from transformers.integrations.moe import _default_apply_gate

        return _default_apply_gate(self, gate_up)

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        raise AssertionError("graphmoe computes this module")


def _experts(**changes: Any) -> Experts:
    from transformers.integrations.moe import _default_apply_gate

    module = Experts(MoESpec(4, 2, 64, 64), **changes)
    type(module)._apply_gate = _default_apply_gate
    return module


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"has_gate": False}, "no gate"),
        ({"has_bias": True}, "biases"),
        ({"is_transposed": True}, "transposed"),
        ({"is_concatenated": False}, "interleaved"),
        ({"has_post_expert_norm": True}, "norm"),
        ({"act_fn": nn.GELU()}, "GELU, not SiLU"),
        ({"gate_up_proj": nn.Parameter(torch.zeros(4, 128, 64))}, "torch.float32 .* dtype=torch.bfloat16"),
        ({"gate_up_proj": nn.Parameter(torch.zeros(4, 64, 128).bfloat16())}, r"\(4, 64, 128\)"),
        ({"gate_up_proj": nn.Parameter(torch.zeros(4, 127, 64).bfloat16())}, r"\(4, 127, 64\)"),
        ({"gate_up_proj": None}, "no gate_up_proj"),
        ({"gate_up_proj_scale_inv": torch.ones(4, 1, 1)}, "float8"),
        ({"_apply_gate": None}, ""),
    ],
)
def test_what_is_not_computed_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    assert why_not(_experts()) is None
    if "_apply_gate" in changes:
        module = _experts()
        type(module)._apply_gate = lambda self, gate_up: gate_up
        changes, reason = {}, "gate function of its own"
    else:
        module = _experts(**changes)
    found = why_not(module)
    assert found is not None
    assert re.search(reason, found), found


def test_both_sentinels_mean_another_rank() -> None:
    module = _experts()
    x = torch.randn(3, 64).bfloat16()
    weights = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])
    mixed = torch.tensor([[0, 3], [1, 4], [-1, 2]])  # 4 = num_experts is Transformers' sentinel
    out = experts.forward(module, x, mixed, weights)
    first = experts.forward(module, x, torch.tensor([[0, 3], [1, -1], [4, 2]]), weights)
    assert torch.equal(out, first)
    alone = experts.forward(module, x[1:2], torch.tensor([[1, -1]]), weights[1:2])
    assert torch.allclose(out[1:2].float(), alone.float(), atol=0.02)
    assert bool((experts.forward(module, x, torch.full((3, 2), 4), weights) == 0).all())


def test_tokens_that_are_not_live_are_routed_nowhere() -> None:
    module, x = _experts(), torch.randn(3, 64).bfloat16()
    ids, weights = torch.tensor([[0, 1], [2, 3], [1, 2]]), torch.full((3, 2), 0.5)
    full = experts.forward(module, x, ids, weights)
    with experts.running(experts.owner_of(module.config), torch.tensor([True, False, True])):
        part = experts.forward(module, x, ids, weights)
    assert torch.equal(part[[0, 2]], full[[0, 2]])
    assert bool((part[1] == 0).all())
    assert torch.equal(experts.forward(module, x, ids, weights), full)


def test_weights_are_not_copied() -> None:
    model = tiny_model("Qwen3Moe", experts="graphmoe")
    with torch.no_grad():
        model(IDS)
    (runtime,) = experts.runtimes_of(model.config)
    mine = [module for module in model.modules() if experts.is_experts(module)]
    for module, weights in zip(mine, runtime._core.open().weights, strict=True):
        assert weights.w13.data_ptr() == module.gate_up_proj.data_ptr()
        assert weights.w2.data_ptr() == module.down_proj.data_ptr()


def test_weights_that_change_or_move_are_followed() -> None:
    model, other = tiny_model("Qwen3Moe", experts="graphmoe"), tiny_model("Qwen3Moe", seed=5)
    with torch.no_grad():
        model(IDS)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
        expected = other(IDS).logits
        in_place = model(IDS).logits
        assert float((in_place - expected).norm() / expected.norm()) < 0.02
        for module in model.modules():
            if experts.is_experts(module):
                module.gate_up_proj = nn.Parameter(module.gate_up_proj.detach().clone() * 0.5)
        moved = model(IDS).logits
        assert not torch.equal(moved, in_place)
        other.load_state_dict(model.state_dict())
        assert float((moved - other(IDS).logits).norm() / moved.norm()) < 0.02
    assert len(experts.runtimes_of(model.config)) == 1


def test_a_copied_model_has_its_own_weights_and_both_can_be_freed() -> None:
    model = tiny_model("Qwen3Moe", experts="graphmoe")
    with torch.no_grad():
        before = model(IDS).logits
        twin = copy.deepcopy(model)
        for parameter in twin.parameters():
            parameter.mul_(0.5)
        halved = twin(IDS).logits
        assert torch.equal(model(IDS).logits, before)
        assert not torch.equal(halved, before)
    runtime = weakref.ref(experts.runtimes_of(model.config)[0])
    del model, twin
    gc.collect()
    assert runtime() is None


def test_a_model_in_training_mode_and_gradients_are_refused() -> None:
    model = tiny_model("Qwen3Moe", experts="graphmoe").train()
    with pytest.raises(InvalidInput, match=r"model\.eval\(\)"):
        model(IDS)
    model.eval()
    logits = model(IDS).logits  # gradients are on: the forward pass works
    with pytest.raises(InvalidInput, match="no gradients"):
        logits.sum().backward()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, logits)


def test_float32_hidden_states_run_in_the_models_own_code(caplog: pytest.LogCaptureFixture) -> None:
    own, ours = tiny_model("Qwen3Moe", dtype=torch.float32), tiny_model("Qwen3Moe", dtype=torch.float32, experts="graphmoe")
    with torch.no_grad():
        assert torch.equal(own(IDS).logits, ours(IDS).logits)
    assert ["torch.float32" in line for line in warned(caplog)] == [True]


@pytest.mark.parametrize("fmt", ["fp8_block", "ue8m0", "w4afp8"])
def test_experts_are_quantised_in_place(fmt: str) -> None:
    torch.manual_seed(0)
    model = tiny_model("Qwen3Moe", experts="graphmoe", hidden_size=128, moe_intermediate_size=128)
    layer = next(module for module in model.modules() if experts.is_experts(module))
    x, ids, scales = torch.randn(4, 128).bfloat16(), torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]]), torch.rand(4, 2)
    with torch.no_grad():
        model(IDS)
        exact = layer(x, ids, scales).float()
        assert quantize_experts(model, fmt) == 2
        assert experts.runtimes_of(model.config) == []  # nothing holds the old weights
        rounded = layer(x, ids, scales).float()
        assert bool(model(IDS).logits.isfinite().all())
    (runtime,) = experts.runtimes_of(model.config)
    assert runtime.plan.fmt == fmt
    assert bool(((rounded - exact).norm(dim=-1) / exact.norm(dim=-1) < (0.3 if fmt == "w4afp8" else 0.12)).all())
    assert not torch.equal(rounded, exact)
    sizes = {module.gate_up_proj.element_size() for module in model.modules() if experts.is_experts(module)}
    assert sizes == {1}
    with pytest.raises(InvalidInput, match="already"):
        quantize_experts(model, fmt)


def test_what_cannot_be_quantised_is_refused_before_anything_changes() -> None:
    model = tiny_model("Qwen3Moe")
    with pytest.raises(InvalidInput, match="set_experts_implementation"):
        quantize_experts(model)
    model = tiny_model("GptOss", experts="graphmoe")
    before = [parameter.dtype for parameter in model.parameters()]
    with pytest.raises(InvalidInput, match="biases"):
        quantize_experts(model)
    assert [parameter.dtype for parameter in model.parameters()] == before


@pytest.mark.parametrize("fmt", ["fp8_block", "ue8m0"])
def test_fp8_modules_run_through_the_second_registry(fmt: str, caplog: pytest.LogCaptureFixture) -> None:
    """Fine-grained FP8 checkpoints are run by a class with a registry of its own."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    spec = MoESpec(4, 2, 256, 128)
    weights = random_weights(spec, fmt, seed=3)
    config = config_of(hidden_size=256, num_experts=4, moe_intermediate_size=128, hidden_act="silu", num_local_experts=4)
    decorated = use_experts_implementation(FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS, has_bias=False, has_gate=True)
    module = decorated(config, block_size=(128, 128), scale_fmt="ue8m0" if fmt == "ue8m0" else "float").eval()
    with torch.no_grad():
        for name, tensor in weights.tensors().items():
            getattr(module, name.replace("w13", "gate_up_proj").replace("w2", "down_proj")).copy_(tensor)
    x, ids = torch.randn(5, 256).bfloat16(), torch.tensor([[0, 1], [2, 3], [1, 3], [0, 3], [2, 1]])
    scales = torch.rand(5, 2)
    with torch.no_grad():
        got = module(x, ids, scales).clone()
    with graphmoe.MoERuntime(spec, weights, buckets=BUCKETS) as runtime:
        assert torch.equal(got, runtime(x, ids, scales))
    assert not warned(caplog)
    module.gate_softcap = 30.0
    assert "gate function" in (why_not(module) or "")


def test_settings_are_those_of_the_last_registration_before_a_model_runs() -> None:
    model = tiny_model("Mixtral", experts="graphmoe")
    graphmoe.register_transformers([16], path="masked")
    with torch.no_grad():
        model(IDS)
        graphmoe.register_transformers(BUCKETS)
        model(IDS)
    (runtime,) = experts.runtimes_of(model.config)
    assert runtime.plan.ladder.sizes == (16,)
    assert runtime.plan.buckets[0].recipe.path == "masked"


def test_longer_prompts_than_the_largest_bucket_run_in_pieces() -> None:
    own, ours = tiny_model("Qwen3Moe"), tiny_model("Qwen3Moe", experts="graphmoe")
    ids = torch.randint(0, 32, (1, 150), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = own(ids).logits
        assert float((ours(ids).logits - expected).norm() / expected.norm()) < 0.05


def test_each_owner_has_its_own_runtimes_and_bits() -> None:
    """Another ladder rounds otherwise: what one user of a model plans must not reach the others."""
    model = tiny_model("Mixtral", experts="graphmoe")
    other = experts.Owner(experts.Settings(BucketLadder.of([16], "chunk"), "psum"))
    with torch.no_grad():
        before = model(IDS).logits
        with experts.running(other, None):
            theirs = model(IDS).logits
        assert torch.equal(model(IDS).logits, before)
    (mine,), (runtime,) = experts.runtimes_of(model.config), other.runtimes.values()
    assert runtime.plan.ladder.sizes == (16,)
    assert len(runtime.layers) == len(mine.layers) == 2
    assert 0 < float((theirs - before).norm() / before.norm()) < 0.02


def test_a_compiled_model_has_one_op_a_layer() -> None:
    model = tiny_model("Qwen3Moe", experts="graphmoe")
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        seen.append(sum("graphmoe" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    with torch.no_grad():
        expected = model(IDS).logits  # layers join at the first call, eagerly
        compiled = torch.compile(model, backend=backend)
        got = compiled(IDS).logits
    assert float((got - expected).abs().max()) < 0.05
    assert sum(seen) == 2
    torch._dynamo.reset()


def test_importing_graphmoe_imports_no_transformers() -> None:
    code = "import sys, graphmoe; assert 'transformers' not in sys.modules; graphmoe.register_transformers(); assert 'transformers' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_log_names_the_class_and_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "graphmoe"), torch.no_grad():
        tiny_model("GptOss", experts="graphmoe")(IDS)
    (line,) = warned(caplog)
    assert line == "GptOssExperts runs in Transformers' own eager code, not in graphmoe: its experts have biases"
