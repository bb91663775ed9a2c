"""How a layer's router turns logits into experts and weights: numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graphmoe.errors import SpecError
from graphmoe.spec import require_int

_MOST_EXPERTS = 4096


@dataclass(frozen=True)
class Router:
    """Scores of all experts of the model, a choice of `top_k` per token, and their weights.

    Scores are `softmax(logits)` or `sigmoid(logits)` in float32. Experts are chosen by score plus correction bias (where the layer has one); with
    groups, only among the `top_groups` groups of consecutive experts whose two best such sums are largest together (DeepSeek-V3). Of equals the
    expert or group with the lower number comes first. Weights are the scores, without the bias, divided by their sum where `renormalize` says so.
    A `routed_scaling_factor` is none of its business: the layer applies it, once.

    Args:
        num_experts: of the model, not of this rank.
        top_k: experts a token.
        scoring: `"softmax"` (Qwen3-MoE, Mixtral) or `"sigmoid"` (DeepSeek-V3, Kimi-K2, GLM-4.5, MiniMax-M2).
        renormalize: whether a token's weights sum to 1 (`norm_topk_prob`).
        groups: `n_group`.
        top_groups: `topk_group`.

    Raises:
        SpecError: numbers that name no choice.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        require_int("num_experts", self.num_experts, 1, _MOST_EXPERTS)
        require_int("groups", self.groups, 1, self.num_experts)
        require_int("top_groups", self.top_groups, 1, self.groups)
        if self.scoring not in ("softmax", "sigmoid"):
            raise SpecError(f"scoring={self.scoring!r} must be 'softmax' or 'sigmoid'")
        if self.num_experts % self.groups:
            raise SpecError(f"num_experts={self.num_experts} do not divide into groups={self.groups} of one size")
        if self.groups > 1 and self.group_size < 2:
            raise SpecError(f"groups={self.groups} of {self.group_size} expert: a group is judged by its two best")
        require_int("top_k", self.top_k, 1, self.top_groups * self.group_size)

    @property
    def group_size(self) -> int:
        return self.num_experts // self.groups
