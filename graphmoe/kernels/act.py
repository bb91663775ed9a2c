"""Act: SwiGLU of every live row, quantised on the way where the format is FP8.

gate_up bf16 [S, R, 2I]            arena      row_of  int32 [T, K]           arena, negative: no row
rows    e4m3 or bf16 [S, R, I]     arena      scales  [S, I/128, R] float32, or [S, ceil(I/512), R] packed int32; None for bf16
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.formats import BLOCK as GROUP
from graphmoe.formats import SCALES_PER_WORD, ScaleFormat
from graphmoe.kernels.pdl import pdl_flags, wait_and_signal
from graphmoe.kernels.quantise import quantise_groups, scale_arguments, store_scales

_PAIRS = 16
"""(assignment, group of 128 columns) pairs of a program."""


@triton.jit
def _act_kernel(
    gate_up, row_of, rows, scales,
    ASSIGNMENTS: tl.constexpr, COLUMNS: tl.constexpr, SEGMENT_ROWS: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr, GROUP: tl.constexpr,
    QUANTISE: tl.constexpr, POWER_OF_TWO: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_signal(PDL)
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    assignment, group = pair // GROUPS, pair % GROUPS
    row = tl.load(row_of + assignment, mask=assignment < ASSIGNMENTS, other=-1).to(tl.int64)
    live = row >= 0
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = live[:, None] & (column < COLUMNS)
    gate_at = gate_up + row[:, None] * (2 * COLUMNS) + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + COLUMNS, mask=inside, other=0.0).to(tl.float32)
    values = gate / (1.0 + tl.exp(-gate)) * up
    if QUANTISE:
        payload, scale = quantise_groups(values, POWER_OF_TWO)
        store_scales(scales, scale, row, group, live, COLUMNS // GROUP, SEGMENT_ROWS, PACKED)
        tl.store(rows + row[:, None] * COLUMNS + column, payload, mask=inside)
    else:
        tl.store(rows + row[:, None] * COLUMNS + column, values.to(tl.bfloat16), mask=inside)


def act(gate_up: Tensor, row_of: Tensor, *, rows: Tensor, scales: Tensor | None, scale_format: ScaleFormat | None) -> None:
    """`silu(gate) * up` in float32 of every live row, stored as bf16 or as e4m3 with a scale per 128 columns. One launch, no allocation."""
    columns, assignments = rows.shape[2], row_of.numel()
    scale_pointer, flags = scale_arguments(rows, scales, scale_format)
    groups = triton.cdiv(columns, GROUP)
    if flags["PACKED"]:
        groups = triton.cdiv(groups, SCALES_PER_WORD) * SCALES_PER_WORD
    _act_kernel[(triton.cdiv(assignments * groups, _PAIRS),)](
        gate_up, row_of, rows, scale_pointer,
        ASSIGNMENTS=assignments, COLUMNS=columns, SEGMENT_ROWS=rows.shape[1], GROUPS=groups, PAIRS=_PAIRS, GROUP=GROUP, **flags, **pdl_flags(),
    )  # fmt: skip
