"""The KV cache: one row a sequence, every row with its own length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys and values of all layers, allocated once.

    Attributes:
        keys: a layer's tensor `[rows, key_heads, length, key_dim]` each.
        values: likewise `[rows, value_heads, length, value_dim]`.
    """

    def __init__(self, shapes: Sequence[tuple[tuple[int, int], tuple[int, int]]], rows: int, length: int, dtype: torch.dtype, device: torch.device):
        """`shapes`: (heads, dim) of keys and of values, a layer each."""
        self.rows, self.length = rows, length
        self.keys = [torch.zeros(rows, heads, length, dim, dtype=dtype, device=device) for (heads, dim), _ in shapes]
        self.values = [torch.zeros(rows, heads, length, dim, dtype=dtype, device=device) for _, (heads, dim) in shapes]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def append(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token `[B, heads, 1, dim]` of each of the first B rows at its position `[B]`; returns those rows' whole tensors."""
        batch = positions.shape[0]
        for cache, new in ((self.keys[layer], keys), (self.values[layer], values)):
            where = positions.view(batch, 1, 1, 1).expand(-1, cache.shape[1], 1, cache.shape[3])
            cache[:batch].scatter_(2, where, new.to(cache.dtype))
        return self.keys[layer][:batch], self.values[layer][:batch]

    def extend(self, layer: int, keys: Tensor, values: Tensor, row: int, first: int) -> tuple[Tensor, Tensor]:
        """Write tokens `[1, heads, C, dim]` of one row from position `first` on; returns its prefix up to their end, `[1, heads, first + C, dim]`."""
        end = first + keys.shape[2]
        for cache, new in ((self.keys[layer], keys), (self.values[layer], values)):
            cache[row : row + 1, :, first:end].copy_(new)
        return self.keys[layer][row : row + 1, :, :end], self.values[layer][row : row + 1, :, :end]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's first `length` positions to another row."""
        for cache in (*self.keys, *self.values):
            cache[target, :, :length].copy_(cache[source, :, :length])
