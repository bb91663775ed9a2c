"""Models to decode: a checkpoint's, or a published one's sizes with random weights, whole or cut to its first layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from graphmoe.errors import InvalidInput
from graphmoe.spec import named_spec

RANDOM_MODELS: dict[str, dict[str, int]] = {
    "qwen3-30b-a3b": {"num_hidden_layers": 48, "num_attention_heads": 32},
    "qwen3-235b-a22b": {"num_hidden_layers": 94, "num_attention_heads": 64},
}
"""What their `config.json` says beside the sizes of the experts (`named_spec`) and `_QWEN3`."""
_QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6}


def load(model: str, device: torch.device, layers: int | None = None) -> Any:
    """A BF16 (or, from an FP8 checkpoint on a GPU, FP8) model in inference mode, its experts in graphmoe: call `register_transformers` before.

    Args:
        model: a checkpoint's directory, or a name of `RANDOM_MODELS`: random weights then.
        device: where to.
        layers: keep only so many; None: all.

    Raises:
        InvalidInput: neither a directory nor a known name, or a number of layers that the model does not have.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

    if model not in RANDOM_MODELS and not Path(model).is_dir():
        raise InvalidInput(f"model {model!r} is neither a directory nor one of {', '.join(RANDOM_MODELS)}")
    config = Qwen3MoeConfig(**_sizes(model)) if model in RANDOM_MODELS else AutoConfig.from_pretrained(model)
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise InvalidInput(f"layers={layers} of {model}, which has {config.num_hidden_layers}: give 1 to {config.num_hidden_layers}")
        config.num_hidden_layers = layers
    if model not in RANDOM_MODELS:
        how: dict[str, Any] = {"config": config, "dtype": torch.bfloat16, "experts_implementation": "graphmoe", "device_map": str(device)}
        return AutoModelForCausalLM.from_pretrained(model, **how).eval()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    made.set_experts_implementation("graphmoe")
    return made


def _sizes(model: str) -> dict[str, Any]:
    spec = named_spec(model)
    experts = {"num_experts": spec.num_experts, "num_experts_per_tok": spec.top_k, "norm_topk_prob": True}
    width = {"hidden_size": spec.hidden_size, "moe_intermediate_size": spec.intermediate_size}
    return {**_QWEN3, **experts, **width, **RANDOM_MODELS[model], "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
