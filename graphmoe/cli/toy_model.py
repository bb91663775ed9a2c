"""A small MoE language model over bytes: enough of one to drive the layers as a decode loop does. Random weights, no tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphmoe.checkpoint import INDEX_NAME, CheckpointReader, expert_key
from graphmoe.spec import MoESpec
from graphmoe.weights import ExpertWeights

SPEC = MoESpec(num_experts=16, top_k=4, hidden_size=256, intermediate_size=128, routed_scaling_factor=1.5)
LAYERS = 2
_SEED = 20


class ToyModel:
    """Byte embedding; per layer a causal running mean, a router and experts; logits over bytes.

    The experts are what graphmoe runs; everything else is a few lines of torch.
    """

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        h = SPEC.hidden_size
        self.embedding = torch.randn(256, h, generator=generator).to(device)
        self.routers = [torch.randn(h, SPEC.num_experts, generator=generator).to(device) / h**0.5 for _ in range(LAYERS)]

    def route(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`(x bf16 [t, H], topk_ids int64 [t, K], topk_weights float32 [t, K])` of a layer for hidden states `[t, H]`."""
        x = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:]).bfloat16()
        weights, ids = (x.float() @ self.routers[layer]).softmax(-1).topk(SPEC.top_k, dim=-1)
        return x, ids, weights / weights.sum(-1, keepdim=True)

    def next_bytes(self, hidden: Tensor) -> Tensor:
        """The most likely next byte of each sequence."""
        return (torch.nn.functional.rms_norm(hidden, hidden.shape[-1:]) @ self.embedding.T).argmax(-1)


def write_checkpoint(directory: Path) -> bool:
    """Write the experts as a block-FP8 checkpoint under Hugging Face names, a layer only once. Returns whether any was written now."""
    known = set(CheckpointReader(directory).keys()) if (directory / INDEX_NAME).is_file() else set()
    generator = torch.Generator().manual_seed(_SEED + 1)
    e, h, i = SPEC.num_experts, SPEC.hidden_size, SPEC.intermediate_size
    wrote = False
    for layer in range(LAYERS):
        w13 = torch.randn(e, 2 * i, h, generator=generator).bfloat16() / h**0.5
        w2 = torch.randn(e, h, i, generator=generator).bfloat16() / i**0.5
        if expert_key(layer, e - 1, "down_proj") not in known:
            ExpertWeights.from_bf16(SPEC, w13, w2).save(directory, layer)
            wrote = True
    return wrote
