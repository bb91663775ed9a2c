"""The experts implementation `graphmoe`: every experts module of a model becomes a layer of one runtime, at its first forward pass."""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphmoe.buckets import BucketLadder
from graphmoe.errors import InvalidInput
from graphmoe.integrations.transformers.judging import format_of, spec_of, why_not
from graphmoe.op import recorded
from graphmoe.recipe import Recipe
from graphmoe.runtime import MoERuntime
from graphmoe.weights import ExpertWeights

logger = logging.getLogger("graphmoe")

_JOINED = "_graphmoe_joined"
_said: set[tuple[type, str]] = set()


@dataclass(frozen=True)
class Settings:
    """How the runtimes of models that have not run yet are made."""

    buckets: BucketLadder
    path: Recipe | str | Mapping[int, Recipe | str] = "auto"


settings = Settings(BucketLadder.preset("vllm", overflow="chunk"))


class Owner:
    """Runtimes of one user of a model's experts: one a shape and format (in most models one), each with all its layers on one arena.

    A model's own forward passes are one user, each decoder is another: neither changes the other's buckets, and so its bits.
    """

    def __init__(self, chosen: Settings) -> None:
        self.settings = chosen
        self.runtimes: dict[tuple[Any, ...], MoERuntime] = {}
        self.joined: weakref.WeakKeyDictionary[nn.Module, _Joined] = weakref.WeakKeyDictionary()


class _Ambient(threading.local):
    """What a thread's forward pass is part of: a decoder's step, or (None) nothing."""

    owner: Owner | None = None
    live: Tensor | None = None


_ambient = _Ambient()


@contextmanager
def running(owner: Owner, live: Tensor | None) -> Iterator[None]:
    """Within it, this thread's experts run in `owner`'s runtimes; tokens whose entry in `live` (bool `[tokens]`, read when the step runs) is False
    are routed nowhere: they cost nothing."""
    before = _ambient.owner, _ambient.live
    _ambient.owner, _ambient.live = owner, live
    try:
        yield
    finally:
        _ambient.owner, _ambient.live = before


def forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What Transformers calls for an experts module.

    Args:
        module: the experts module.
        hidden_states: `[T, H]`.
        top_k_index: int64 `[T, K]`, local ids; `num_experts` (and -1) means "not on this rank".
        top_k_weights: `[T, K]`.

    Returns:
        `[T, H]`, the weighted sum over experts.
    """
    owner, live = (None, None) if torch.compiler.is_compiling() else (_ambient.owner, _ambient.live)
    joined = module.__dict__.get(_JOINED) if owner is None else owner.joined.get(module)
    if not torch.compiler.is_compiling() and (joined is None or not joined.holds(module)):
        joined = _join(module, top_k_index.shape[-1], owner, joined)
    if joined is None or joined.number is None or hidden_states.dtype != torch.bfloat16:
        return _fall_back(module, joined, hidden_states, top_k_index, top_k_weights)
    if live is not None and live.shape[0] == top_k_index.shape[0]:
        top_k_index = torch.where(live[:, None], top_k_index, -1)
    if getattr(module.config, "zero_expert_num", None):  # what such a router sends to no expert, it sends to any, with weight 0
        top_k_index = torch.where(top_k_weights != 0, top_k_index, -1)
    weights = top_k_weights.float()
    with torch.no_grad():
        out = recorded(hidden_states.detach(), top_k_index, weights.detach(), None, joined.number, joined.layer)
    if torch.is_grad_enabled() and (hidden_states.requires_grad or weights.requires_grad):
        return _NoGradient.apply(out, hidden_states, weights)
    return out


def quantize_experts(model: nn.Module, fmt: str = "fp8_block") -> int:
    """Quantise a BF16 model's experts in place, one layer at a time: its peak memory is the model and one layer. Only graphmoe runs them then.

    int4 is repacked once more when it runs, into a copy.

    Args:
        model: a Transformers model whose experts implementation is `graphmoe`.
        fmt: `"fp8_block"`, `"ue8m0"` or `"w4afp8"`.

    Returns:
        How many layers were quantised.

    Raises:
        InvalidInput: experts that graphmoe does not compute, or a model that runs its experts otherwise; nothing has changed then.
        UnsupportedShape: H or I that the format cannot take.
    """
    found = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    for name, module in found:
        if module.config._experts_implementation != "graphmoe":
            raise InvalidInput("quantised experts run in graphmoe only: call model.set_experts_implementation('graphmoe') first")
        reason = why_not(module)
        if reason is not None:
            raise InvalidInput(f"{name} cannot be quantised: {reason}")
        if format_of(module) != "bf16":
            raise InvalidInput(f"{name} is of format {format_of(module)!r} already")
    for _, module in found:
        _leave(module)
        w13, w2 = _weights_of(module)
        weights = ExpertWeights.from_bf16(spec_of(module, 1), w13, w2, fmt=fmt)
        del w13, w2
        for name, tensor in weights.tensors().items():
            attribute = name.replace("w13", "gate_up_proj").replace("w2", "down_proj")
            setattr(module, attribute, nn.Parameter(tensor, requires_grad=False))
        module.__dict__["graphmoe_format"] = fmt
    return len(found)


def is_experts(module: nn.Module) -> bool:
    """Whether it dispatches to an experts implementation."""
    return all(hasattr(module, name) for name in ("has_gate", "config", "down_proj", "_apply_gate"))


_owners: dict[int, tuple[weakref.ref[Any], Owner]] = {}
"""Of models' own forward passes, by the identity of the configuration that all modules of one model share."""


def owner_of(config: Any) -> Owner:
    """Of a model's own forward passes."""
    key = id(config)
    if key not in _owners:
        _owners[key] = (weakref.ref(config, lambda _: _owners.pop(key, None)), Owner(settings))
    return _owners[key][1]


def runtimes_of(config: Any) -> list[MoERuntime]:
    """The runtimes that a model's own forward passes have made so far."""
    return list(owner_of(config).runtimes.values())


class _Joined:
    """A module's place in a runtime; `number` is None where Transformers' own code runs instead."""

    def __init__(self, module: nn.Module, owner: Owner, runtime: MoERuntime | None, reason: str | None) -> None:
        self.owner = owner
        self.runtime = runtime
        self.reason = reason
        self.number = None if runtime is None else runtime.number
        self.layer = 0 if runtime is None else len(runtime.layers) - 1
        self._weights = tuple((weight, weight.data_ptr()) for weight in _weights_of(module))

    def holds(self, module: nn.Module) -> bool:
        """Whether the module's weights are still those that joined, in a runtime that its owner still uses."""
        if self.runtime is not None and self.runtime not in self.owner.runtimes.values():
            return False
        return all(
            weight is mine and weight.data_ptr() == pointer for weight, (mine, pointer) in zip(_weights_of(module), self._weights, strict=True)
        )

    def __deepcopy__(self, memo: object) -> None:
        """A copied module joins anew, with its own weights."""
        return


def _weights_of(module: nn.Module) -> tuple[Tensor, ...]:
    names = ("gate_up_proj", "down_proj", "gate_up_proj_scale_inv", "down_proj_scale_inv")
    found = (getattr(module, name, None) for name in names)
    return tuple(weight for weight in found if isinstance(weight, Tensor))


def _join(module: nn.Module, top_k: int, decoder: Owner | None, before: _Joined | None) -> _Joined:
    """Give the module a place in a runtime of the decoder, or of its model's own forward passes."""
    owner = owner_of(module.config) if decoder is None else decoder
    joined = _joined(module, top_k, owner, before)
    if decoder is None:
        module.__dict__[_JOINED] = joined  # where torch.compile finds it
    else:
        owner.joined[module] = joined
    return joined


def _joined(module: nn.Module, top_k: int, owner: Owner, before: _Joined | None) -> _Joined:
    reason = why_not(module, top_k)
    if reason is not None:
        return _Joined(module, owner, None, reason)
    if module.training:
        raise InvalidInput("graphmoe computes no gradients and the model is in training mode: call model.eval()")
    weights = _weights(module, top_k)
    key = (weights.spec, weights.fmt, weights.device)
    if before is not None:  # weights have moved: all layers of that runtime join a new one, each at its next call
        owner.runtimes = {kept: runtime for kept, runtime in owner.runtimes.items() if runtime is not before.runtime}
    if key in owner.runtimes:
        owner.runtimes[key].add_layer(weights)
    else:
        chosen = owner.settings
        owner.runtimes[key] = MoERuntime(weights.spec, weights, buckets=chosen.buckets, path=chosen.path, capture=False, progress=False)
    return _Joined(module, owner, owner.runtimes[key], None)


def _leave(module: nn.Module) -> None:
    """Let go of the runtime that holds the module's weights."""
    joined = module.__dict__.pop(_JOINED, None)
    if joined is not None:
        joined.owner.runtimes.clear()


def _weights(module: nn.Module, top_k: int) -> ExpertWeights:
    spec, fmt = spec_of(module, top_k), format_of(module)
    w13, w2, *scales = _weights_of(module)
    if fmt == "w4afp8":
        one = {f"{short}_input_scale": getattr(module, f"{name}_input_scale", None) for short, name in (("w13", "gate_up_proj"), ("w2", "down_proj"))}
        return ExpertWeights.from_int4(spec, w13, scales[0], w2, scales[1], **one)
    if fmt == "bf16":
        return ExpertWeights.from_bf16(spec, w13, w2, fmt="bf16")
    return ExpertWeights.from_fp8(spec, w13, scales[0], w2, scales[1], fmt=fmt)


def _fall_back(module: nn.Module, joined: _Joined | None, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    reason = joined.reason if joined is not None and joined.reason else f"hidden states are {hidden_states.dtype}, not torch.bfloat16"
    if not torch.compiler.is_compiling() and (type(module), reason) not in _said:
        _said.add((type(module), reason))
        logger.warning("%s runs in Transformers' own eager code, not in graphmoe: %s", type(module).__name__, reason)
    original = inspect.unwrap(type(module).forward)  # FP8 classes are decorated once for every module
    return original(module, hidden_states, top_k_index, top_k_weights)


class _NoGradient(torch.autograd.Function):
    """Passes the result on, and says that it has no gradient when one is asked for."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise InvalidInput("graphmoe computes no gradients; train with another experts implementation")
