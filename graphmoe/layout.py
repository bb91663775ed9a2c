"""Where an expert's rows live: the three row layouts of a grouped GEMM, as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graphmoe import bounds
from graphmoe.spec import MoESpec

LayoutKind = Literal["masked", "compact", "psum"]


@dataclass(frozen=True)
class RowLayout:
    """A row layout of one bucket.

    Activation rows are `[segments, segment_rows, columns]` and their scales `[segments, columns/128, segment_rows]`. A *row* is an index into
    `segments * segment_rows`. `masked` has a segment an expert; `compact` and `psum` have one, in which an expert's rows start
    at a multiple of `align`. The *groups* tensor tells a GEMM which rows are live (int32):

    - `masked` `[E]`: rows of each expert.
    - `compact` `[segment_rows]`: the expert of each row, -1 on padding rows to the end.
    - `psum` `[E]`: end row of each expert; the next starts there, rounded up to `align`.
    """

    kind: LayoutKind
    num_experts: int
    align: int
    segments: int
    segment_rows: int

    @classmethod
    def masked(cls, spec: MoESpec, tokens: int, row_tile: int) -> RowLayout:
        slots = bounds.masked_slots(tokens, spec.top_k, row_tile, distinct=spec.distinct_topk)
        return cls("masked", spec.num_local_experts, row_tile, spec.num_local_experts, slots)

    @classmethod
    def contiguous(cls, kind: LayoutKind, spec: MoESpec, tokens: int, block_e: int) -> RowLayout:
        """`compact` or `psum`, sized by the compact bound."""
        rows = bounds.compact_rows(tokens, spec.top_k, spec.num_local_experts, block_e, distinct=spec.distinct_topk)
        return cls(kind, spec.num_local_experts, block_e, 1, rows)

    @property
    def rows(self) -> int:
        return self.segments * self.segment_rows

    @property
    def group_entries(self) -> int:
        return self.segment_rows if self.kind == "compact" else self.num_experts
