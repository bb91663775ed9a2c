"""Tiny random models of Transformers, large enough to have every part that a decode step meets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_SIZES = {
    "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "max_position_embeddings": 512, "initializer_range": 0.1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 64, "intermediate_size": 64, "head_dim": 16, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 4, "intermediate_size": 64, "sliding_window": None},
    "DeepseekV3": {
        "n_routed_experts": 8, "moe_intermediate_size": 64, "intermediate_size": 128, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_shared_experts": 1,
        "num_key_value_heads": 4,
    },
    "Glm4Moe": {
        "n_routed_experts": 8, "moe_intermediate_size": 64, "intermediate_size": 128, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "head_dim": 16, "n_shared_experts": 1, "use_qk_norm": True,
    },
    "GptOss": {"num_local_experts": 4, "intermediate_size": 64, "head_dim": 16, "sliding_window": 32},
    "Qwen3Next": {
        "num_experts": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "intermediate_size": 64, "head_dim": 16,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip
SUPPORTED = ("Qwen3Moe", "Mixtral", "DeepseekV3", "Glm4Moe")
"""Architectures whose whole decode step is captured."""


def tiny_model(architecture: str, *, experts: str = "eager", seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """A model of two layers with random weights, in inference mode. The same seed gives the same weights whatever runs its experts."""
    import transformers

    config = getattr(transformers, f"{architecture}Config")(**{**_SIZES, **_ARCHITECTURES[architecture], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{architecture}ForCausalLM")(config).to(dtype).eval()
    model.set_experts_implementation(experts)
    return model


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what the model's own eager code says to it."""

    tokens: list[int]
    answer: list[int]


def clear_prompts(model: Any, lengths: tuple[int, ...], new_tokens: int, *, margin: float = 0.06, seed: int = 0) -> list[Prompt]:
    """A prompt of each length that `model` (eager) answers greedily with no near tie: roundings below `margin` of a logit change no token."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in lengths:
        drawn = torch.randint(0, model.config.vocab_size, (256, length), generator=generator).to(model.device)
        greedy = {"do_sample": False, "max_new_tokens": new_tokens, "disable_compile": True}
        said = model.generate(drawn, attention_mask=torch.ones_like(drawn), output_logits=True, return_dict_in_generate=True, **greedy)
        best = torch.stack(said.logits, 1).float().topk(2, -1).values
        clearest = int((best[..., 0] - best[..., 1]).amin(1).argmax())
        assert float((best[..., 0] - best[..., 1]).amin(1)[clearest]) > margin, "no prompt has a clear answer; draw more"
        found.append(Prompt(drawn[clearest].tolist(), said.sequences[clearest, length:].tolist()))
    return found
