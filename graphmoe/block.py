"""A whole MoE block in one call: router, routed experts, shared experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from graphmoe.errors import InvalidInput, SpecError
from graphmoe.op import recorded_block, register
from graphmoe.router import Router
from graphmoe.runtime import MoELayer


@dataclass(frozen=True)
class SharedExperts:
    """Experts that see every token, as one dense gated MLP in bf16, computed by torch.

    Args:
        w13: bf16 `[2 * I_shared, H]`, gate first.
        w2: bf16 `[H, I_shared]`.
        gate: bf16 `[1, H]`; where there is one, its sigmoid scales each token's result (Qwen2-MoE, Qwen3-Next).
    """

    w13: Tensor
    w2: Tensor
    gate: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """bf16 `[T, H]` to bf16 `[T, H]`."""
        gate, up = F.linear(hidden, self.w13).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, self.w2)
        return out if self.gate is None else F.linear(hidden, self.gate).sigmoid() * out

    def check(self, hidden_size: int, device: torch.device) -> None:
        """Raises InvalidInput: tensors that do not fit together, or not to a layer."""
        shared = self.w2.shape[-1]
        wanted = {"w13": (2 * shared, hidden_size), "w2": (hidden_size, shared), "gate": (1, hidden_size)}
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != torch.bfloat16 or tensor.device != device):
                raise InvalidInput(
                    f"shared {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, expected torch.bfloat16 {shape} on {device}"
                )


class MoEBlock:
    """From hidden states to hidden states: logits, choice of experts (one launch), the layer's step, and what shared experts add.

    Around the layer's graph it runs plain torch, whose intermediates come from torch's allocator: inside a graph of yours from that graph's pool.

    Args:
        layer: one of a runtime's `layers`.
        router: how experts are chosen.
        gate: `[num_experts, H]`, bf16 or float32; logits are computed in its dtype.
        correction_bias: float32 `[num_experts]` (`e_score_correction_bias`) or None.
        shared: shared experts, or None.

    Raises:
        SpecError: a router of other numbers than the layer's.
        InvalidInput: tensors that do not fit.
    """

    def __init__(
        self, layer: MoELayer, router: Router, gate: Tensor, *, correction_bias: Tensor | None = None, shared: SharedExperts | None = None
    ) -> None:
        spec = layer.spec
        if (router.num_experts, router.top_k) != (spec.num_experts, spec.top_k):
            raise SpecError(
                f"the router chooses {router.top_k} of {router.num_experts} experts, the layer has {spec.num_experts} and takes {spec.top_k} a token"
            )
        if tuple(gate.shape) != (spec.num_experts, spec.hidden_size) or gate.dtype not in (torch.bfloat16, torch.float32):
            raise InvalidInput(
                f"gate is {gate.dtype} {tuple(gate.shape)}, expected bfloat16 or float32 {(spec.num_experts, spec.hidden_size)}: [num_experts, H]"
            )
        if correction_bias is not None and (tuple(correction_bias.shape) != (spec.num_experts,) or correction_bias.dtype != torch.float32):
            raise InvalidInput(f"correction_bias is {correction_bias.dtype} {tuple(correction_bias.shape)}, expected float32 {(spec.num_experts,)}")
        for name, tensor in (("gate", gate), ("correction_bias", correction_bias)):
            if tensor is not None and tensor.device != layer.device:
                raise InvalidInput(f"{name} is on {tensor.device}, the layer on {layer.device}")
        if shared is not None:
            shared.check(spec.hidden_size, layer.device)
        self.layer, self.router, self.gate, self.correction_bias, self.shared = layer, router, gate, correction_bias, shared
        self.number = register(self)

    def __call__(self, hidden: Tensor) -> Tensor:
        """bf16 `[T, H]` to a new bf16 `[T, H]`, T up to the largest bucket (beyond it, where the runtime's overflow policy is `"chunk"`).

        Raises:
            InvalidInput, BatchTooLarge: see `MoERuntime.__call__`.
        """
        if torch.compiler.is_compiling():
            return recorded_block(hidden, self.number)
        return self.call(hidden, torch.empty_like(hidden))

    def call(self, hidden: Tensor, out: Tensor) -> Tensor:
        """`__call__` into bf16 `out` `[T, H]`, which shares no memory with `hidden`."""
        width = self.layer.spec.hidden_size
        if hidden.dim() != 2 or hidden.shape[1] != width or hidden.dtype != torch.bfloat16 or hidden.device != self.layer.device:
            raise InvalidInput(
                f"hidden is {hidden.dtype} {tuple(hidden.shape)} on {hidden.device}, expected torch.bfloat16 [T, {width}] on {self.layer.device}"
            )
        with torch.no_grad():
            topk_ids, topk_weights = self.route(hidden)
            self.layer(hidden, topk_ids, topk_weights, out=out)
            return out if self.shared is None else out.add_(self.shared(hidden))

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token of bf16 `[T, H]`: int32 `[T, K]` local ids, float32 `[T, K]` weights."""
        spec = self.layer.spec
        logits = F.linear(hidden.to(self.gate.dtype), self.gate)
        topk_ids = torch.empty(hidden.shape[0], spec.top_k, dtype=torch.int32, device=hidden.device)
        topk_weights = torch.empty(hidden.shape[0], spec.top_k, dtype=torch.float32, device=hidden.device)
        self.layer.ops.select_experts(
            logits, self.correction_bias, self.router, offset=spec.expert_offset, experts=spec.num_local_experts, topk_ids=topk_ids,
            topk_weights=topk_weights,
        )  # fmt: skip
        return topk_ids, topk_weights
