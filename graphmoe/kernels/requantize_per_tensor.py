"""Requantise: e4m3 rows with a scale per row and 128 columns become e4m3 rows with one scale, as `formats/per_tensor.py` means it.

x         e4m3 [E, slots, K] or [R, K]         scales   float32 [..., ceil(K/128)], or packed int32 [..., ceil(K/512)]; any strides, all of them
masked_m  int32 [E], live rows; or row_map int32 [R], negative: not live; or neither
out_scale float32, one element                 out      e4m3, of x's shape; may be x

A program takes some rows of one expert, and of them some groups of 128 columns. Rows that are not live are neither read nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.formats import BLOCK as GROUP
from graphmoe.kernels.pdl import pdl_flags, wait_and_signal


@triton.jit(do_not_specialize=["rows"])
def _requantize_per_tensor_kernel(
    x, scales, out_scale, live, out, rows, LIVE_STRIDE: tl.constexpr,
    X_SEGMENT: tl.constexpr, X_ROW: tl.constexpr, X_COLUMN: tl.constexpr, SCALE_SEGMENT: tl.constexpr, SCALE_ROW: tl.constexpr,
    SCALE_COLUMN: tl.constexpr, OUT_SEGMENT: tl.constexpr, OUT_ROW: tl.constexpr, OUT_COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr, MAPPED: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_signal(PDL)
    segment = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    alive = row < rows
    if MASKED:
        alive = alive & (row < tl.load(live + segment * LIVE_STRIDE))
    if MAPPED:
        alive = alive & (tl.load(live + row * LIVE_STRIDE, mask=alive, other=-1) >= 0)
    if tl.sum(alive.to(tl.int32)) > 0:
        group = tl.program_id(1).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
        scaled = alive[:, None] & (group * GROUP < COLUMNS)[None, :]
        at = scales + segment * SCALE_SEGMENT + (row * SCALE_ROW)[:, None]
        if PACKED:
            word = tl.load(at + (group // 4 * SCALE_COLUMN)[None, :], mask=scaled, other=0)
            exponent = (word >> (group % 4 * 8).to(tl.int32)[None, :]) & 0xFF
            scale = tl.where(exponent == 255, float("nan"), (exponent << 23).to(tl.float32, bitcast=True))
        else:
            scale = tl.load(at + (group * SCALE_COLUMN)[None, :], mask=scaled, other=0.0)
        one = tl.load(out_scale)
        ratio = tl.clamp(tl.div_rn(scale, one), -3.4028234663852886e38, 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
        ratio = tl.where((one > 0) & (one < float("inf")), ratio, float("nan"))
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = alive[:, None, None] & (column < COLUMNS)[None, :, :]
        payload = tl.load(x + segment * X_SEGMENT + (row * X_ROW)[:, None, None] + (column * X_COLUMN)[None, :, :], mask=inside, other=0.0)
        values = tl.clamp(payload.to(tl.float32) * ratio[:, :, None], -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        out_at = out + segment * OUT_SEGMENT + (row * OUT_ROW)[:, None, None] + (column * OUT_COLUMN)[None, :, :]
        tl.store(out_at, values.to(tl.float8e4nv), mask=inside)


def requantize_per_tensor(
    x: Tensor,
    scales: Tensor,
    out_scale: Tensor,
    *,
    masked_m: Tensor | None,
    row_map: Tensor | None,
    block_rows: int,
    block_groups: int,
    warps: int,
    out: Tensor,
) -> None:
    """`out = e4m3(clamp(x * (scale / out_scale), +-448))` of live rows. One launch, no allocation.

    `block_rows` rows and `block_groups` groups of 128 columns, both powers of two, are a program's, in `warps` warps.
    """
    if not x.numel():
        return
    x, scales, out = (tensor if tensor.dim() == 3 else tensor[None] for tensor in (x, scales, out))
    segments, rows, columns = x.shape
    live = next((tensor for tensor in (masked_m, row_map) if tensor is not None), None)
    _requantize_per_tensor_kernel[(triton.cdiv(rows, block_rows), triton.cdiv(columns, block_groups * GROUP), segments)](
        x, scales, out_scale, scales if live is None else live, out, rows, 0 if live is None else live.stride(0),
        *x.stride(), *scales.stride(), *out.stride(),
        COLUMNS=columns, MASKED=masked_m is not None, MAPPED=row_map is not None, PACKED=not scales.dtype.is_floating_point,
        ROWS=block_rows, GROUPS=block_groups, GROUP=GROUP, num_warps=warps, **pdl_flags(),
    )  # fmt: skip
