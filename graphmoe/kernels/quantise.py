"""Device functions that several kernels share: rounding a row to e4m3 groups, as `formats/fp8_block.py` and `formats/ue8m0.py` mean it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphmoe.formats import ScaleFormat


@triton.jit
def quantise_groups(values, POWER_OF_TWO: tl.constexpr):
    """float32 `[GROUPS, 128]` -> (e4m3 `[GROUPS, 128]`, float32 scales `[GROUPS]`); a group with NaN or infinity gets the scale NaN."""
    magnitude = tl.abs(values)
    amax = tl.max(magnitude, axis=1)
    finite = tl.min((magnitude < float("inf")).to(tl.int32), axis=1)
    if POWER_OF_TWO:
        # amax = m * 2^x with 1 <= m < 2, and 448 = 1.75 * 2^8: the exponent is x - 8, one more where m > 1.75 (mantissa bits above 0x600000).
        bits = amax.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        scale = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.maximum(tl.div_rn(amax, 448.0), 1.1754943508222875e-38)
    scale = tl.where(finite == 1, scale, float("nan"))
    # One division a group: dividing every value is what bounded `act`.
    scaled = values * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    return tl.clamp(scaled, -448.0, 448.0).to(tl.float8e4nv), scale


@triton.jit
def store_scales(scales, scale, row, group, live, COLUMNS: tl.constexpr, SEGMENT_ROWS: tl.constexpr, PACKED: tl.constexpr):
    """Store the scales of `group`s of a row (or of a row each) where `live`.

    float32 `[S, COLUMNS, R]`; or packed, bytes of int32 words `[S, ceil(COLUMNS/4), R]`, 0 beyond COLUMNS.
    """
    segment, slot = row // SEGMENT_ROWS, row % SEGMENT_ROWS
    if PACKED:
        WORDS: tl.constexpr = (COLUMNS + 3) // 4
        exponent = tl.where(group < COLUMNS, (scale.to(tl.int32, bitcast=True) >> 23) & 0xFF, 0)
        at = ((segment * WORDS + group // 4) * SEGMENT_ROWS + slot) * 4 + group % 4
        tl.store(scales + at, exponent.to(tl.uint8), mask=live & (group < WORDS * 4))
    else:
        at = (segment * COLUMNS + group) * SEGMENT_ROWS + slot
        tl.store(scales + at, scale, mask=live & (group < COLUMNS))


def scale_arguments(rows: Tensor, scales: Tensor | None, scale_format: ScaleFormat | None) -> tuple[Tensor, dict[str, bool]]:
    """A kernel's scale pointer (packed words as bytes; any pointer where there are no scales) and its scale flags."""
    packed = scale_format is ScaleFormat.UE8M0_PACKED
    pointer = rows if scales is None else scales.view(torch.uint8) if packed else scales
    return pointer, {"QUANTISE": scales is not None, "POWER_OF_TWO": scale_format in (ScaleFormat.UE8M0, ScaleFormat.UE8M0_PACKED), "PACKED": packed}
