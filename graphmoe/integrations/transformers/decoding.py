"""A model of Transformers for `GraphedDecoder`: its forward pass over our KV cache and our attention."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphmoe.buckets import BucketLadder
from graphmoe.decode.attention import attend
from graphmoe.decode.kv import KVCache, LayerKV
from graphmoe.decode.model import DecodeModel
from graphmoe.device import device_guard
from graphmoe.errors import GraphMoEError, InvalidInput, WeightsMismatch
from graphmoe.integrations.transformers.experts import Owner, Settings, is_experts, owner_of, running
from graphmoe.integrations.transformers.judging import why_not
from graphmoe.integrations.transformers.unchanged import Snapshot

ATTENTION = "graphmoe"
_HARMLESS = (
    "dropout",
    "is_causal",
    "position_ids",
    "cache_position",
    "position_embeddings",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
)
"""Arguments of an attention function that change nothing for one token a row, or that the projections before it have used."""
_PADDED_TABLE = 2
"""Rows that a table of learned positions may have beyond them (OPT keeps two for padding)."""
_STATIC_ROPE = ("default", "linear", "yarn", "llama3", "proportional")


def adapt(model: Any, token_counts: Sequence[int]) -> DecodeModel | None:
    """For `graphmoe.decode.model.adapters`."""
    from transformers import PreTrainedModel

    return TransformersModel(model, token_counts) if isinstance(model, PreTrainedModel) else None


class TransformersModel:
    """A `DecodeModel`. See there."""

    def __init__(self, model: Any, token_counts: Sequence[int]) -> None:
        """Raises InvalidInput, with the reason, for a model whose decode step cannot be captured faithfully."""
        name, reason = type(model).__name__, _why_not(model)
        if reason is not None:
            raise InvalidInput(f"{name} cannot be decoded in a graph: {reason}")
        self._model = model
        self._argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.device = model.device
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.stop_tokens = _stop_tokens(getattr(model.generation_config, "eos_token_id", None))
        self.max_positions = _max_positions(model)
        self.nbytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}.values())
        self._owner = Owner(Settings(BucketLadder(token_counts, "chunk"), owner_of(model.config).settings.path))
        probe, zero = _Probe(), torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        try:
            logits = self._run(zero, zero, probe)
        except (GraphMoEError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a model's own code raises when it meets another cache and attention than it knows
            raise InvalidInput(f"{name} cannot be decoded in a graph: its forward pass fails with {type(error).__name__}: {error}") from error
        if logits.shape[-1] != self.vocab_size:
            raise InvalidInput(
                f"{name} cannot be decoded in a graph: it has logits for {logits.shape[-1]} tokens and embeddings for {self.vocab_size}"
            )
        if sorted(probe.layers) != list(range(model.config.num_hidden_layers)):
            raise InvalidInput(
                f"{type(model).__name__} cannot be decoded in a graph: of its {model.config.num_hidden_layers} layers only {sorted(probe.layers)} "
                "keep keys and values"
            )
        self._snapshot = Snapshot(model)
        self.kv_layers: Sequence[LayerKV] = [probe.layers[layer] for layer in sorted(probe.layers)]
        self.kv_dtype = probe.dtype

    def check_weights(self) -> None:
        complaint = self._snapshot.complaint()
        if complaint:
            raise WeightsMismatch(
                f"the model has changed since the decoder captured its steps: {complaint}. Build a new decoder; values alone may be changed in place"
            )

    @property
    def arena_bytes(self) -> int:
        return sum(runtime.report().arena_bytes for runtime in self._owner.runtimes.values())

    def rows_bound(self, tokens: int) -> int:
        reports = (runtime.report() for runtime in self._owner.runtimes.values())
        return max((bucket.rows for report in reports for bucket in report.buckets if bucket.tokens == tokens), default=0)

    def decode(self, tokens: Tensor, positions: Tensor, live: Tensor, cache: KVCache) -> Tensor:
        return self._run(tokens[:, None], positions[:, None], _Decode(cache, positions), live)

    def prefill(self, tokens: Tensor, first: int, count: int, row: int, cache: KVCache) -> None:
        steps = torch.arange(tokens.shape[0], device=self.device)
        positions = first + steps.clamp(max=count - 1)  # padding has no position of its own, which might lie beyond a table
        self._run(tokens[None], positions[None], _Prefill(cache, row, first, count), steps < count)

    def _run(self, tokens: Tensor, positions: Tensor, view: _View, live: Tensor | None = None) -> Tensor:
        """Logits `[B, V]` of the last token."""
        with torch.no_grad(), device_guard(self.device), running(self._owner, live), _attending(self._model.config, view):
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
        """Positions are given. A model that asks all the same would compute with what this returns, and rows differ in it."""
        raise InvalidInput("it cannot be decoded in a graph: it asks its cache for one length of all sequences")


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
    count: int

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.cache.extend(layer_idx, keys, values, self.row, self.first, self.count)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        group = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        if self.first == 0:
            return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
        steps = torch.arange(keys.shape[2], device=query.device)
        seen = steps <= steps[self.first :, None]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scale)


class _Ambient(threading.local):
    """What a thread's forward pass attends through."""

    view: _View | None = None


_ambient = _Ambient()
_one_at_a_time = threading.RLock()
"""Around forward passes of decoders: a model's configuration says how it attends, to all threads."""


@contextmanager
def _attending(config: Any, view: _View) -> Iterator[None]:
    """Within it, the model attends through `view` in this thread, and not at all in others."""
    with _one_at_a_time:
        before, _ambient.view = (config._attn_implementation, _ambient.view), view
        config._attn_implementation = ATTENTION
        try:
            yield
        finally:
            config._attn_implementation, _ambient.view = before


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What Transformers calls for an attention module: `[B, Hq, C, Dk]` to `[B, C, Hq, Dv]`."""
    view = _ambient.view
    if view is None:
        raise InvalidInput(
            "the attention implementation 'graphmoe' works inside GraphedDecoder only: keep 'sdpa' for forward passes of your own, and run them "
            "while no decoder works on the same model in another thread"
        )
    reason = _why_not_attend(module, attention_mask, kwargs)
    if reason is not None:
        raise InvalidInput(f"{type(module).__name__} cannot be decoded in a graph: {reason}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return view.attend(query, key, value, scale).transpose(1, 2).contiguous(), None


def _why_not_attend(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> str | None:
    """Whether it asks for more than softmax attention of each token to those before it."""
    if attention_mask is not None:
        return "its attention has a mask of its own"
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return "its attention is not causal"
    for name, value in kwargs.items():
        if name not in _HARMLESS and value is not None and value is not False:
            return f"its attention has {name}={value!r}" if isinstance(value, (int, float, str)) else f"its attention has {name}"
    return None


def _stop_tokens(eos: Any) -> frozenset[int]:
    if isinstance(eos, Tensor):
        eos = eos.tolist()
    return frozenset(eos if isinstance(eos, (list, tuple)) else () if eos is None else (eos,))


def _max_positions(model: Any) -> int | None:
    """How many positions a table of learned ones has; None without such a table."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module is not model.get_input_embeddings()]
    known = getattr(model.config, "max_position_embeddings", None)
    sizes = [table.num_embeddings for table in tables if known is not None and known <= table.num_embeddings <= known + _PADDED_TABLE]
    return int(known) if sizes and known is not None else None


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
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type not in ("cuda", "cpu"):
        return f"its weights lie on {', '.join(sorted(map(str, devices))) or 'no device'}; all of them must be on one GPU or CPU"
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
