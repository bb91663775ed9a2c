"""Samples: random experts, inputs and named routings of every kind that the field has met; what tests, trials and `verify` run on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from graphmoe import bounds
from graphmoe.formats import get_format
from graphmoe.spec import MoESpec
from graphmoe.weights import ExpertWeights

Routing = Callable[[MoESpec, np.random.Generator, int], np.ndarray]


def random_weights(spec: MoESpec, fmt: str, *, seed: int = 0, device: torch.device | str = "cpu") -> ExpertWeights:
    """Random experts of about unit gain."""
    generator = torch.Generator(device=device).manual_seed(seed)
    e, h, i = spec.num_local_experts, spec.hidden_size, spec.intermediate_size

    def draw(rows: int, columns: int) -> Tensor:
        values = torch.empty(e, rows, columns, dtype=torch.bfloat16, device=device)
        return values.normal_(0.0, columns**-0.5, generator=generator)

    return ExpertWeights.from_bf16(spec, draw(2 * i, h), draw(h, i), fmt=fmt)


def unwritten_weights(spec: MoESpec, fmt: str, *, device: torch.device | str) -> ExpertWeights:
    """Experts whose values are whatever the memory holds: enough to compile what runs on them."""
    e, h, i = spec.num_local_experts, spec.hidden_size, spec.intermediate_size
    of, shapes = get_format(fmt), ((2 * i, h), (h, i))
    dtype, scale_dtype = getattr(torch, of.weight_dtype), getattr(torch, of.scale_dtype)
    payloads = [torch.empty(e, *of.stored_shape(*shape), dtype=dtype, device=device) for shape in shapes]
    scales = [torch.ones(e, *of.scale_shape(*shape), dtype=scale_dtype, device=device) for shape in shapes] if of.scales is not None else []
    return ExpertWeights(spec, fmt, *payloads, *scales)


def random_inputs(spec: MoESpec, tokens: int, *, seed: int = 0, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """`x` bf16 `[t, H]` and router weights float32 `[t, K]`, every one large enough that a lost expert shows in its row."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(tokens, spec.hidden_size, generator=generator, device=device).bfloat16()
    weights = torch.rand(tokens, spec.top_k, generator=generator, device=device) + 0.5
    return x, weights / weights.sum(-1, keepdim=True)


def _distinct(spec: MoESpec, rng: np.random.Generator, tokens: int, bias: np.ndarray) -> np.ndarray:
    """Top-k of biased Gumbel noise over all experts of the model, as local ids."""
    noise = rng.gumbel(size=(tokens, spec.num_experts)) + bias
    order = np.argsort(-noise, axis=1)[:, : spec.top_k]
    ids = np.full((tokens, spec.top_k), -1, dtype=np.int64)
    ids[:, : order.shape[1]] = spec.to_local(order)
    return ids


def _balanced(spec: MoESpec, rng: np.random.Generator, tokens: int) -> np.ndarray:
    return _distinct(spec, rng, tokens, np.zeros(spec.num_experts))


def _zipf(spec: MoESpec, rng: np.random.Generator, tokens: int) -> np.ndarray:
    return _distinct(spec, rng, tokens, -1.5 * np.log(1 + rng.permutation(spec.num_experts)))


def _one_expert(spec: MoESpec, rng: np.random.Generator, tokens: int) -> np.ndarray:
    """One expert gets every token and nothing else is local."""
    ids = np.full((tokens, spec.top_k), spec.num_local_experts, dtype=np.int64)
    ids[:, rng.integers(spec.top_k)] = rng.integers(spec.num_local_experts)
    return ids


def _sentinels(spec: MoESpec, rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Balanced, with a third of the slots replaced by every kind of sentinel."""
    ids = _balanced(spec, rng, tokens)
    e = spec.num_local_experts
    return np.where(rng.random(ids.shape) < 0.33, rng.choice([-1, e, e + 7, np.iinfo(np.int32).max], size=ids.shape), ids)


def _none_local(spec: MoESpec, rng: np.random.Generator, tokens: int) -> np.ndarray:
    return rng.choice([-1, spec.num_local_experts], size=(tokens, spec.top_k)).astype(np.int64)


def _all_local(spec: MoESpec, rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Every token names experts of this rank alone, as many as there are."""
    order = rng.random((tokens, spec.num_local_experts)).argsort(axis=1)[:, : spec.top_k]
    ids = np.full((tokens, spec.top_k), -1, dtype=np.int64)
    ids[:, : order.shape[1]] = order
    return ids


def _witness(block_e: int) -> Routing:
    def build(spec: MoESpec, rng: np.random.Generator, tokens: int) -> np.ndarray:
        ids = bounds.worst_case_topk_ids(tokens, spec.top_k, spec.num_local_experts, block_e, distinct=spec.distinct_topk)
        return rng.permuted(ids, axis=1)

    return build


ROUTINGS: dict[str, Routing] = {
    "balanced": _balanced,
    "zipf": _zipf,
    "one_expert": _one_expert,
    "sentinels": _sentinels,
    "none_local": _none_local,
    "witness64": _witness(64),
    "witness128": _witness(128),
    "witness16": _witness(16),
    "all_local": _all_local,
}
"""Name -> how to draw local ids int64 `[T, K]`. A witness attains the row bound of its alignment."""


def routing(name: str, spec: MoESpec, tokens: int, *, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """A named routing of `tokens` tokens: int64 `[tokens, K]`."""
    number = list(ROUTINGS).index(name)
    return torch.from_numpy(ROUTINGS[name](spec, np.random.default_rng(seed * 100 + number), tokens)).to(device)
