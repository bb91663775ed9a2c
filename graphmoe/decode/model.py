"""What a decoder needs of a model, and how it finds that for a model of another library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from graphmoe.decode.kv import KVCache, LayerKV
from graphmoe.errors import InvalidInput


@runtime_checkable
class DecodeModel(Protocol):
    """A causal language model whose keys and values live in a `KVCache` that it is given.

    Attributes:
        device: where it runs.
        vocab_size: tokens are below it.
        stop_tokens: tokens that end a sequence, unless a request says otherwise.
        nbytes: device memory of its weights.
        kv_dtype: dtype of keys and values.
        kv_layers: what each layer keeps.
        max_positions: positions are below it; None: of any number.
    """

    device: torch.device
    vocab_size: int
    stop_tokens: frozenset[int]
    nbytes: int
    kv_dtype: torch.dtype
    kv_layers: Sequence[LayerKV]
    max_positions: int | None

    def decode(self, tokens: Tensor, positions: Tensor, live: Tensor, cache: KVCache) -> Tensor:
        """One token for each of the cache's first B rows. It is captured: no host synchronisation, no Python state that changes between steps.

        Args:
            tokens: int64 `[B]`.
            positions: int64 `[B]`, where each row's keys and values go.
            live: bool `[B]`; rows that are not are computed and mean nothing.
            cache: keys and values; row i of the batch is row i of the cache.

        Returns:
            Logits `[B, vocab_size]`.
        """
        ...

    def prefill(self, tokens: Tensor, first: int, count: int, row: int, cache: KVCache) -> None:
        """Fill one row's keys and values from position `first` on. `tokens` int64 `[C]` is padded; only its first `count` tokens matter."""
        ...

    def check_weights(self) -> None:
        """Raises WeightsMismatch: the model is no longer what it was when steps were captured. Asked before every prefill."""
        ...

    @property
    def arena_bytes(self) -> int:
        """Device memory that its experts' runtimes have planned."""
        ...

    def rows_bound(self, tokens: int) -> int:
        """The proven row bound of its MoE layers in a batch of so many tokens; 0 where there are none."""
        ...


Adapter = Callable[[Any, Sequence[int]], DecodeModel | None]

adapters: list[Adapter] = []
"""Each makes a `DecodeModel` of a library's model, given the token counts that will be run; or returns None: not its library's."""


def adapt(model: Any, token_counts: Sequence[int]) -> DecodeModel:
    """Raises InvalidInput where nothing here can run the model."""
    if isinstance(model, DecodeModel):
        return model
    for adapter in adapters:
        adapted = adapter(model, token_counts)
        if adapted is not None:
            return adapted
    hint = "" if adapters else "; for a Transformers model call graphmoe.register_transformers() first"
    raise InvalidInput(f"GraphedDecoder cannot run a {type(model).__name__}: it is no graphmoe.decode.DecodeModel{hint}")
