"""Tensor-parallel shards of an expert's intermediate size, cut along whole scale blocks.

Rank `r` of `tp` owns the intermediate columns `[r * I/tp, (r + 1) * I/tp)`. A block-FP8 scale belongs to 128 of them, so a shard whose borders
fall inside a block keeps the whole block: its local size is the largest cover of any rank, and payload that the rank does not own is zero. Zero rows
of gate and up make zero activations, so the shards' outputs still sum to the whole layer's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphmoe.errors import SpecError, WeightsMismatch
from graphmoe.spec import MoESpec, require_int


@dataclass(frozen=True)
class IntermediateShard:
    """One rank's cut of `I`.

    Attributes:
        block: columns that share a scale; every cut is a multiple of it.
        base: first column that is stored.
        width: columns that are stored, the same on every rank: the shard's own intermediate size.
        first: first column that the rank owns.
        last: one past its last.
    """

    block: int
    base: int
    width: int
    first: int
    last: int

    @classmethod
    def of(cls, spec: MoESpec, tp: int, rank: int, block: int) -> IntermediateShard:
        """Rank `rank` of `tp`, for a format that shares scales over `block` columns.

        Raises:
            WeightsMismatch: `tp` does not divide `I`, `I` is no multiple of the block, or there is no such rank.
        """
        size = spec.intermediate_size
        try:
            width = spec.shard(tp=tp, block=block).intermediate_size
            require_int("tp_rank", rank, 0, tp - 1)
        except SpecError as error:
            raise WeightsMismatch(str(error)) from error
        own = size // tp
        return cls(block, min(rank * own // block * block, size - width), width, rank * own, (rank + 1) * own)

    def cut(self, weight: Tensor, scale: Tensor | None, *, dim: int, per_element: int, per_scale: int) -> tuple[Tensor, Tensor | None]:
        """The stored part of a weight (and its scales) along `dim`, a copy in which columns of other ranks are zero.

        Args:
            weight: any dtype.
            scale: its scales.
            dim: of `weight` and `scale`, which runs over intermediate columns.
            per_element: intermediate columns in one element of `weight` along `dim`.
            per_scale: those that share a scale along `dim`; a divisor of the block.

        Raises:
            WeightsMismatch: a border of what the rank owns falls inside an element.
        """
        edges = [self.base, self.first, self.last, self.base + self.width]
        if any(edge % per_element for edge in edges):
            raise WeightsMismatch(
                f"this rank owns the intermediate columns {self.first} to {self.last - 1}, but {per_element} columns are stored in one byte; "
                f"take a tp at which every rank owns a multiple of {per_element}"
            )
        base, first, last, end = (edge // per_element for edge in edges)
        part = weight.narrow(dim, base, end - base).clone()
        raw = part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part
        raw.narrow(dim, 0, first - base).zero_()
        raw.narrow(dim, last - base, end - last).zero_()
        return part, None if scale is None else scale.narrow(dim, self.base // per_scale, self.width // per_scale)
