"""What an MoE layer is: the numbers every other part starts from. Integers only; importing this touches no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from graphmoe.errors import SpecError, UnsupportedSpec

_MAX_EXPERTS = 1024
_MAX_DIM = 1 << 20
_MAX_FLOAT32 = 3.4028234663852886e38
_Ids = TypeVar("_Ids")


@dataclass(frozen=True)
class MoESpec:
    """One routed MoE layer as one rank sees it.

    Args:
        num_experts: all routed experts of the layer (`E_global`).
        top_k: experts per token (`K`).
        hidden_size: `H`.
        intermediate_size: `I`, of one expert on this rank.
        num_local_experts: experts on this rank (`E`); 0, the default, means all of them.
        expert_offset: global id of this rank's first expert.
        routed_scaling_factor: multiplies the routed sum once, in float32. Leave it 1.0 if your router's weights already carry the model's factor.
        activation: of the gate; `"silu"`.
        gated: `silu(gate) * up` (`w13` is `[E, 2I, H]`) rather than one projection.
        distinct_topk: a token's experts are distinct, as top-k selection guarantees. Tightens every bound;
            a token that breaks the promise becomes NaN and raises a flag.

    Raises:
        SpecError: impossible numbers.
        UnsupportedSpec: a possible layer that is not supported yet.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_local_experts: int = 0
    expert_offset: int = 0
    routed_scaling_factor: float = 1.0
    activation: str = "silu"
    gated: bool = True
    distinct_topk: bool = True

    def __post_init__(self) -> None:
        if type(self.num_local_experts) is int and self.num_local_experts == 0 and self.expert_offset == 0:
            object.__setattr__(self, "num_local_experts", self.num_experts)
        for name, low, high in (
            ("num_experts", 1, _MAX_EXPERTS),
            ("top_k", 1, _MAX_EXPERTS),
            ("hidden_size", 1, _MAX_DIM),
            ("intermediate_size", 1, _MAX_DIM),
            ("num_local_experts", 1, _MAX_EXPERTS),
            ("expert_offset", 0, _MAX_EXPERTS),
        ):
            require_int(name, getattr(self, name), low, high)
        for name in ("gated", "distinct_topk"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.expert_offset + self.num_local_experts > self.num_experts:
            raise SpecError(
                f"local experts [{self.expert_offset}, {self.expert_offset + self.num_local_experts}) exceed num_experts={self.num_experts}"
            )
        if self.distinct_topk and self.top_k > self.num_experts:
            raise SpecError(f"top_k={self.top_k} distinct experts cannot come from num_experts={self.num_experts}; pass distinct_topk=False")
        factor = self.routed_scaling_factor
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not abs(factor) <= _MAX_FLOAT32:
            raise SpecError(f"routed_scaling_factor={factor!r} must be a number that is finite in float32")
        object.__setattr__(self, "routed_scaling_factor", float(factor))
        if self.activation != "silu":
            raise UnsupportedSpec(f"activation={self.activation!r} is not supported yet; supported: 'silu'")
        if not self.gated:
            raise UnsupportedSpec("non-gated experts (gated=False) are not supported yet; supported: gated experts, w13 [E, 2I, H]")

    @property
    def max_experts_per_token(self) -> int:
        """Most assignments of one token that can land on this rank: `min(K, E)` if distinct, else `K`."""
        return min(self.top_k, self.num_local_experts) if self.distinct_topk else self.top_k

    def assignments(self, tokens: int) -> int:
        """`A`: assignments of `tokens` tokens that can land on this rank."""
        return tokens * self.max_experts_per_token

    def shard(self, *, tp: int = 1, ep: int = 1, ep_rank: int = 0, block: int = 1) -> MoESpec:
        """This rank's part under `tp`-way tensor parallelism (splits `I`) and `ep`-way expert parallelism (splits `E`).

        Args:
            tp: ranks that split the intermediate size; all get the same spec.
            ep: ranks that split the experts.
            ep_rank: which of the `ep` ranks this is; it holds experts `[ep_rank * E/ep, (ep_rank + 1) * E/ep)`.
            block: columns of `I` that share a scale: 128 in block FP8, 64 in bf16. A rank then stores every whole block that its part touches, as
                `ExpertWeights.shard` and `.load(tp=)` do: 192 of 768 columns are stored as 256. With 1, the default, it is `I / tp`.

        Raises:
            SpecError: a size that does not divide, or a rank that does not exist.
        """
        for name, parts, total, what in (
            ("tp", tp, self.intermediate_size, "intermediate_size"),
            ("ep", ep, self.num_local_experts, "num_local_experts"),
        ):
            require_int(name, parts, 1, _MAX_DIM)
            if total % parts:
                raise SpecError(f"{name}={parts} does not divide {what}={total}; these do: {_divisors(total)}")
        require_int("ep_rank", ep_rank, 0, ep - 1)
        require_int("block", block, 1, _MAX_DIM)
        if self.intermediate_size % block:
            raise SpecError(f"intermediate_size={self.intermediate_size} is not a multiple of block={block}: it cannot be cut along whole blocks")
        local = self.num_local_experts // ep
        return replace(
            self,
            intermediate_size=shard_width(self.intermediate_size, tp, block),
            num_local_experts=local,
            expert_offset=self.expert_offset + ep_rank * local,
        )

    def to_local(self, topk_ids: _Ids) -> _Ids:
        """Global expert ids -> this rank's local ids; every id of another rank (and every sentinel) becomes -1.

        Args:
            topk_ids: int32 or int64, any shape, numpy or torch; ids in `[0, num_experts)`, anything else is a sentinel.

        Raises:
            SpecError: no tensor or array, or one of another dtype.
        """
        ids: Any = topk_ids
        if not hasattr(ids, "dtype"):
            raise SpecError(f"topk_ids is a {type(ids).__name__}; pass a torch tensor or numpy array of int32 or int64")
        if str(ids.dtype).removeprefix("torch.") not in ("int32", "int64"):
            raise SpecError(f"topk_ids is {ids.dtype}; pass int32 or int64 (sentinels are negative)")
        local = ids - self.expert_offset
        here = (ids >= self.expert_offset) & (ids < self.expert_offset + self.num_local_experts)
        return (local + 1) * here - 1


def require_int(name: str, value: object, low: int, high: int) -> None:
    """Raise SpecError unless `value` is an int (not a bool) in `[low, high]`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SpecError(f"{name}={value!r} must be an int in [{low}, {high}]")


def shard_width(size: int, parts: int, block: int) -> int:
    """Columns that each of `parts` ranks stores of `size`, a multiple of both: the most whole blocks of `block` that any rank's part touches."""
    own = size // parts
    return max(-(-(rank + 1) * own // block) * block - rank * own // block * block for rank in range(min(parts, block)))  # then it repeats


def _divisors(total: int) -> str:
    """`1, 2, 3, 4, 6, 8, 12, 16, ...`: the first numbers that divide `total`."""
    all_ = [number for number in range(1, min(total, 1024) + 1) if total % number == 0]
    return ", ".join(map(str, all_[:8])) + (", ..." if len(all_) > 8 else "")


_MODELS: dict[str, MoESpec] = {
    "qwen3-30b-a3b": MoESpec(128, 8, 2048, 768),
    "qwen3-235b-a22b": MoESpec(128, 8, 4096, 1536),
    "deepseek-v3": MoESpec(256, 8, 7168, 2048, routed_scaling_factor=2.5),
    "mixtral-8x7b": MoESpec(8, 2, 4096, 14336),
    "minimax-m2": MoESpec(256, 8, 3072, 1536),
    "kimi-k2": MoESpec(384, 8, 7168, 2048, routed_scaling_factor=2.827),
    "glm-4.5-air": MoESpec(128, 8, 4096, 1408, routed_scaling_factor=1.0),
}


def model_names() -> tuple[str, ...]:
    """Names that `named_spec` knows."""
    return tuple(_MODELS)


def named_spec(model: str) -> MoESpec:
    """The routed experts of a published model (its Hugging Face `config.json`), unsharded, with its `routed_scaling_factor`.

    Raises:
        SpecError: an unknown name.
    """
    try:
        return _MODELS[model]
    except KeyError:
        raise SpecError(f"unknown model {model!r}; known: {', '.join(_MODELS)}") from None
