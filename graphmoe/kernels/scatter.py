"""Scatter: every token into the rows of its experts, quantised on the way where the format is FP8.

x       bf16  [T, H]               static     row_of  int32 [T, K]           arena, negative: no row
rows    e4m3 or bf16 [S, R, H]     arena      scales  [S, H/128, R] float32, or [S, ceil(H/512), R] packed int32; None for bf16

A program reads its columns of a token once, rounds them once, and stores them K times.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.formats import BLOCK as GROUP
from graphmoe.formats import ScaleFormat
from graphmoe.kernels.pdl import pdl_flags, wait_and_signal
from graphmoe.kernels.quantise import quantise_groups, scale_arguments, store_scales


@triton.jit
def _scatter_kernel(
    x, row_of, rows, scales,
    COLUMNS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, SEGMENT_ROWS: tl.constexpr,
    QUANTISE: tl.constexpr, POWER_OF_TWO: tl.constexpr, PACKED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_signal(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < COLUMNS
    values = tl.load(x + token * COLUMNS + column, mask=inside, other=0.0)
    if QUANTISE:
        payload, scale = quantise_groups(values.to(tl.float32), POWER_OF_TWO)
    else:
        payload = values
    slot = tl.arange(0, SLOTS)
    own_rows = tl.load(row_of + token * TOP_K + slot, mask=slot < TOP_K, other=-1)
    for k in range(TOP_K):
        row = tl.sum(tl.where(slot == k, own_rows, 0), axis=0).to(tl.int64)
        if row >= 0:
            tl.store(rows + row * COLUMNS + column, payload, mask=inside)
            if QUANTISE:
                store_scales(scales, scale, row, group, row >= 0, COLUMNS // GROUP, SEGMENT_ROWS, PACKED)


def scatter(x: Tensor, row_of: Tensor, *, rows: Tensor, scales: Tensor | None, scale_format: ScaleFormat | None) -> None:
    """Write each token into the rows of its assignments; rows that no assignment owns are left as they are. One launch, no allocation."""
    tokens, columns = x.shape
    groups = min(8, max(4, triton.next_power_of_2(triton.cdiv(columns, GROUP))))
    scale_pointer, flags = scale_arguments(rows, scales, scale_format)
    _scatter_kernel[(tokens, triton.cdiv(columns, groups * GROUP))](
        x, row_of, rows, scale_pointer,
        COLUMNS=columns, TOP_K=row_of.shape[1], SLOTS=triton.next_power_of_2(row_of.shape[1]), SEGMENT_ROWS=rows.shape[1],
        GROUPS=groups, GROUP=GROUP, **flags, **pdl_flags(),
    )  # fmt: skip
