"""One scale for a whole tensor of activations, in place of one per row and 128 columns: what a W4AFP8 checkpoint's input scales mean. Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.errors import InvalidInput
from graphmoe.formats import BLOCK, SCALES_PER_WORD
from graphmoe.formats.fp8_block import to_e4m3
from graphmoe.formats.ue8m0 import unpack


def requantize_per_tensor(
    x: Tensor, scales: Tensor, out_scale: Tensor, *, masked_m: Tensor | None = None, row_map: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """e4m3 rows with a scale per row and 128 columns -> e4m3 rows with one scale: `clamp(x * scale / out_scale, +-448)`, rounded to the nearest.

    Rows that are not live are neither read nor written. What is NaN, or has the scale NaN, is NaN; everything else is a number, saturated at +-448.
    An `out_scale` that is not finite and positive makes all of it NaN.

    Args:
        x: e4m3 `[E, slots, K]` or `[R, K]`, any strides.
        scales: float32 `[..., ceil(K/128)]`, or int32 `[..., ceil(K/512)]`, four exponents a word as `ue8m0.pack` makes them; any strides.
        out_scale: float32, one element.
        masked_m: int32 `[E]`, live rows of each expert; for `[E, slots, K]` alone. By default all rows are live.
        row_map: int32 `[R]`, negative on rows that are not live, as in the layout `compact`; for `[R, K]` alone.
        out: e4m3 of `x`'s shape, any strides; may be `x` itself. By default a new tensor, in which rows that are not live are 0.

    Returns:
        `out`.

    Raises:
        InvalidInput: a shape, dtype or device that does not fit.
    """
    _check(x, scales, out_scale, masked_m, row_map, out)
    if out is None:
        out = torch.zeros(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    live = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    if masked_m is not None:
        live = torch.arange(x.shape[1], device=x.device) < masked_m[:, None]
    if row_map is not None:
        live = row_map >= 0
    payload = x.view(torch.uint8)[live].view(torch.float8_e4m3fn)
    scale = scales[live]
    if scale.dtype == torch.int32:
        scale = unpack(scale, -(-x.shape[-1] // BLOCK))
    values = payload.float() * ratio_of(scale, out_scale).repeat_interleave(BLOCK, -1)[:, : x.shape[-1]]
    out.view(torch.uint8)[live] = to_e4m3(values).view(torch.uint8)
    return out


def ratio_of(scale: Tensor, out_scale: Tensor) -> Tensor:
    """`scale / out_scale`, what a payload is multiplied with; finite, so that zeros stay zeros, unless something is NaN.

    The division comes first: `payload * scale` alone may overflow, or lose its last bits among the subnormals, where the result does not.
    """
    one = out_scale.reshape(())
    largest = torch.finfo(torch.float32).max
    return torch.where(one.isfinite() & (one > 0), (scale / one).clamp(-largest, largest), torch.nan)


def _check(x: Tensor, scales: Tensor, out_scale: Tensor, masked_m: Tensor | None, row_map: Tensor | None, out: Tensor | None) -> None:
    if x.dtype != torch.float8_e4m3fn or x.dim() not in (2, 3):
        raise InvalidInput(f"x is {x.dtype} {tuple(x.shape)}, expected torch.float8_e4m3fn [E, slots, K] or [R, K]")
    if scales.dtype not in (torch.float32, torch.int32):
        raise InvalidInput(f"scales are {scales.dtype}, expected torch.float32, or torch.int32 for packed exponents")
    columns = BLOCK if scales.dtype == torch.float32 else BLOCK * SCALES_PER_WORD
    wanted: list[tuple[str, Tensor | None, torch.dtype, tuple[int, ...]]] = [
        ("scales", scales, scales.dtype, (*x.shape[:-1], -(-x.shape[-1] // columns))),
        ("masked_m", masked_m, torch.int32, tuple(x.shape[:1])),
        ("row_map", row_map, torch.int32, tuple(x.shape[:1])),
        ("out", out, torch.float8_e4m3fn, tuple(x.shape)),
    ]
    for name, tensor, dtype, shape in wanted:
        if tensor is not None and (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            raise InvalidInput(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape} for x {tuple(x.shape)}")
    if out_scale.dtype != torch.float32 or out_scale.numel() != 1:
        raise InvalidInput(f"out_scale is {out_scale.dtype} {tuple(out_scale.shape)}, expected one torch.float32")
    if (masked_m is not None and x.dim() != 3) or (row_map is not None and x.dim() != 2):
        raise InvalidInput(f"x is {tuple(x.shape)}: masked_m goes with [E, slots, K], row_map with [R, K]")
    for tensor in (scales, out_scale, masked_m, row_map, out):
        if tensor is not None and tensor.device != x.device:
            raise InvalidInput(f"x is on {x.device}, another tensor on {tensor.device}; move them to one device")
