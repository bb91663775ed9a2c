"""Act: SwiGLU of every live row, quantised on the way where the format is FP8.

gate_up bf16 [S, R, 2I]            arena      row_of  int32 [T, K]           arena, negative: no row
rows    e4m3 or bf16 [S, R, I]     arena      scales  [S, I/128, R] float32, or [S, ceil(I/512), R] packed int32; None for bf16
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.formats import BLOCK as GROUP
from graphmoe.formats import ScaleFormat
from graphmoe.kernels.quantise import quantise_groups, scale_arguments, store_scales


@triton.jit
def _act_kernel(
    gate_up, row_of, rows, scales,
    COLUMNS: tl.constexpr, SEGMENT_ROWS: tl.constexpr,
    QUANTISE: tl.constexpr, POWER_OF_TWO: tl.constexpr, PACKED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.load(row_of + tl.program_id(0)).to(tl.int64)
    if row < 0:
        return
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < COLUMNS
    gate = tl.load(gate_up + row * (2 * COLUMNS) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * COLUMNS) + COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
    values = gate / (1.0 + tl.exp(-gate)) * up
    if QUANTISE:
        payload, scale = quantise_groups(values, POWER_OF_TWO)
        store_scales(scales, scale, row, group, COLUMNS // GROUP, SEGMENT_ROWS, PACKED)
        tl.store(rows + row * COLUMNS + column, payload, mask=inside)
    else:
        tl.store(rows + row * COLUMNS + column, values.to(tl.bfloat16), mask=inside)


def act(gate_up: Tensor, row_of: Tensor, *, rows: Tensor, scales: Tensor | None, scale_format: ScaleFormat | None) -> None:
    """`silu(gate) * up` in float32 of every live row, stored as bf16 or as e4m3 with a scale per 128 columns. One launch, no allocation."""
    columns = rows.shape[2]
    groups = 4
    scale_pointer, flags = scale_arguments(rows, scales, scale_format)
    _act_kernel[(row_of.numel(), triton.cdiv(columns, groups * GROUP))](
        gate_up, row_of, rows, scale_pointer, COLUMNS=columns, SEGMENT_ROWS=rows.shape[1], GROUPS=groups, GROUP=GROUP, **flags,
    )  # fmt: skip
