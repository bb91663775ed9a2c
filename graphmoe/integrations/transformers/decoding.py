"""A model of Transformers for `GraphedDecoder`: its forward pass over our KV cache and our attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphmoe.buckets import BucketLadder
from graphmoe.decode.attention import attend
from graphmoe.decode.kv import KVCache
from graphmoe.decode.model import DecodeModel, LayerKV
from graphmoe.device import device_guard
from graphmoe.errors import InvalidInput, WeightsMismatch
from graphmoe.integrations.transformers.experts import is_experts, live_tokens, runtimes_of, use_buckets
from graphmoe.integrations.transformers.judging import why_not

ATTENTION = "graphmoe"
_STATIC_ROPE = ("default", "linear", "yarn", "llama3", "proportional")


def adapt(model: Any, token_counts: Sequence[int]) -> DecodeModel | None:
    """For `graphmoe.decode.model.adapters`."""
    from transformers import PreTrainedModel

    return TransformersModel(model, token_counts) if isinstance(model, PreTrainedModel) else None


class TransformersModel:
    """A `DecodeModel`. See there."""

    def __init__(self, model: Any, token_counts: Sequence[int]) -> None:
        """Raises InvalidInput, with the reason, for a model whose decode step cannot be captured faithfully."""
        reason = _why_not(model)
        if reason is not None:
            raise InvalidInput(f"{type(model).__name__} cannot be decoded in a graph: {reason}")
        self._model = model
        self._argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.device = model.device
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        stop = getattr(model.generation_config, "eos_token_id", None)
        self.stop_tokens = frozenset(stop if isinstance(stop, (list, tuple)) else () if stop is None else (stop,))
        self._places = _places(model)
        self.nbytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}.values())
        use_buckets(model.config, BucketLadder(token_counts, "chunk"))
        probe = _Probe()
        self._run(torch.zeros(1, 1, dtype=torch.int64, device=self.device), torch.zeros(1, 1, dtype=torch.int64, device=self.device), probe)
        if sorted(probe.layers) != list(range(model.config.num_hidden_layers)):
            raise InvalidInput(
                f"{type(model).__name__} cannot be decoded in a graph: of its {model.config.num_hidden_layers} layers only {sorted(probe.layers)} "
                "keep keys and values"
            )
        self._runtimes = runtimes_of(model.config)  # captured steps run on their arenas, even when the model has moved to others
        self.kv_layers: Sequence[LayerKV] = [probe.layers[layer] for layer in sorted(probe.layers)]
        self.kv_dtype = probe.dtype

    def check_weights(self) -> None:
        now = _places(self._model)
        moved = sorted(name for name in now.keys() | self._places.keys() if now.get(name) != self._places.get(name))
        if moved:
            raise WeightsMismatch(
                f"{len(moved)} weights were replaced or moved since the decoder captured its steps ({moved[0]}): build a new decoder. Values may be "
                "changed in place"
            )

    @property
    def arena_bytes(self) -> int:
        return sum(runtime.report().arena_bytes for runtime in self._runtimes)

    def rows_bound(self, tokens: int) -> int:
        reports = (runtime.report() for runtime in self._runtimes)
        return max((bucket.rows for report in reports for bucket in report.buckets if bucket.tokens == tokens), default=0)

    def decode(self, tokens: Tensor, positions: Tensor, live: Tensor, cache: KVCache) -> Tensor:
        with live_tokens(live):
            return self._run(tokens[:, None], positions[:, None], _Decode(cache, positions))

    def prefill(self, tokens: Tensor, first: int, count: int, row: int, cache: KVCache) -> None:
        steps = torch.arange(tokens.shape[0], device=self.device)
        with live_tokens(steps < count):
            self._run(tokens[None], (first + steps)[None], _Prefill(cache, row, first))

    def _run(self, tokens: Tensor, positions: Tensor, view: _View) -> Tensor:
        """Logits `[B, V]` of the last token."""
        with torch.no_grad(), device_guard(self.device), _attending(self._model.config, view):
            said = self._model(input_ids=tokens, position_ids=positions, use_cache=True, logits_to_keep=1, **{self._argument: view})
        return said.logits[:, -1]


class _View:
    """What a forward pass takes for its cache, and how its queries look at it."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """`[B, Hq, C, Dk]` to `[B, Hq, C, Dv]`."""
        raise NotImplementedError

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given, so that nothing depends on it."""
        return 0


class _Probe(_View):
    """Keeps nothing, and learns what a cache would have to."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerKV] = {}
        self.dtype = torch.bfloat16

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.layers[layer_idx] = LayerKV(keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])
        self.dtype = keys.dtype
        return keys, values

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        return values.repeat_interleave(query.shape[1] // values.shape[1], 1)


@dataclass
class _Decode(_View):
    """One token a row, each at its own position."""

    cache: KVCache
    positions: Tensor

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.cache.append(layer_idx, keys, values, self.positions)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        return attend(query[:, :, 0], keys, values, self.positions, scale)[:, :, None]


@dataclass
class _Prefill(_View):
    """A piece of one row's prompt, from position `first` on."""

    cache: KVCache
    row: int
    first: int

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.cache.extend(layer_idx, keys, values, self.row, self.first)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        group = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        if self.first == 0:
            return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
        steps = torch.arange(keys.shape[2], device=query.device)
        seen = steps <= steps[self.first :, None]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scale)


def _places(model: Any) -> dict[str, int]:
    """The address of every weight."""
    return {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


_view: _View | None = None


@contextmanager
def _attending(config: Any, view: _View) -> Iterator[None]:
    """Within it, the model attends through `view`."""
    global _view
    before, _view = (config._attn_implementation, _view), view
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation, _view = before


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What Transformers calls for an attention module: `[B, Hq, C, Dk]` to `[B, C, Hq, Dv]`."""
    if _view is None:
        raise InvalidInput("the attention implementation 'graphmoe' works inside GraphedDecoder only; for forward passes of your own keep 'sdpa'")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise InvalidInput(f"{type(module).__name__} cannot be decoded in a graph: its attention has {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _view.attend(query, key, value, scale).transpose(1, 2).contiguous(), None


def _why_not(model: Any) -> str | None:
    config = model.config
    if model.training:
        return "it is in training mode: call model.eval()"
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    if config.get_text_config() is not config:
        return "it is made of several models; give the language model of its own"
    if not hasattr(model, "lm_head") and model.get_output_embeddings() is None:
        return "it has no language-model head; load it with AutoModelForCausalLM"
    if len({parameter.device for parameter in model.parameters()}) != 1:
        return "its weights lie on several devices"
    reason = _why_not_its_state(model) or _why_not_its_experts(model)
    if reason is None and not getattr(model, "_supports_attention_backend", False):
        return "its attention takes no other implementation"
    return reason


def _why_not_its_state(model: Any) -> str | None:
    """Whatever a step keeps in Python, or beside keys and values, a replay would not advance."""
    config = model.config
    layer_types = getattr(config, "layer_types", None)
    kinds = sorted(set(layer_types or ()) - {"full_attention"})
    if kinds:
        return f"it has layers of {' and '.join(kinds)}, whose state is not keys and values of every position"
    if not layer_types and getattr(config, "sliding_window", None) is not None:
        return f"its attention has a sliding window of {config.sliding_window}; with sliding_window=None it would work"
    for module in model.modules():
        if hasattr(module, "rope_type"):
            kinds = sorted({module.rope_type} if isinstance(module.rope_type, str) else set(module.rope_type.values()))
            unknown = [kind for kind in kinds if kind not in _STATIC_ROPE]
            if unknown:
                return f"its rotary embedding is of type {unknown[0]!r}, which looks at the positions on the host"
    return None


def _why_not_its_experts(model: Any) -> str | None:
    found = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    if found and found[0][1].config._experts_implementation != "graphmoe":
        chosen = found[0][1].config._experts_implementation
        return f"its experts run in {chosen!r}: call model.set_experts_implementation('graphmoe')"
    for name, module in found:
        reason = why_not(module)
        if reason is not None:
            return f"{name} is computed by Transformers' own code, which cannot be captured: {reason}"
    return None
