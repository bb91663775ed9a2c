"""The KV cache: one row a sequence, every row with its own length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphmoe.errors import ArenaTooLarge


@dataclass(frozen=True)
class LayerKV:
    """What one layer keeps of a token: keys `[key_heads, key_dim]` and values `[value_heads, value_dim]`."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int


class KVCache:
    """Keys and values of all layers, allocated once.

    Attributes:
        keys: a layer's tensor `[rows, key_heads, length, key_dim]` each.
        values: likewise `[rows, value_heads, length, value_dim]`.
    """

    def __init__(self, layers: Sequence[LayerKV], rows: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ArenaTooLarge: it does not fit into the device's memory."""
        self.rows, self.length = rows, length
        keys = [(rows, layer.key_heads, length, layer.key_dim) for layer in layers]
        values = [(rows, layer.value_heads, length, layer.value_dim) for layer in layers]
        try:
            self.keys, self.values = ([torch.zeros(shape, dtype=dtype, device=device) for shape in shapes] for shapes in (keys, values))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            nbytes = dtype.itemsize * sum(map(math.prod, keys + values))
            raise ArenaTooLarge(
                f"the KV cache of {rows} rows of {length} positions takes {nbytes / 2**30:.1f} GiB, more than {device} can give: take smaller "
                "capture_sizes or a smaller max_cache_len"
            ) from error

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

    def extend(self, layer: int, keys: Tensor, values: Tensor, row: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Write the first `count` of the tokens `[1, heads, C, dim]` of one row from position `first` on, and zeros for the others: whatever padding
        computed, a product with it must not be NaN. Returns the row's prefix up to their end, `[1, heads, first + C, dim]`."""
        end = first + keys.shape[2]
        for cache, new in ((self.keys[layer], keys), (self.values[layer], values)):
            cache[row : row + 1, :, first : first + count].copy_(new[:, :, :count])
            cache[row : row + 1, :, first + count : end].zero_()
        return self.keys[layer][row : row + 1, :, :end], self.values[layer][row : row + 1, :, :end]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's first `length` positions to another row."""
        for cache in (*self.keys, *self.values):
            cache[target, :, :length].copy_(cache[source, :, :length])
