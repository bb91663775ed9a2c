"""W4AFP8: int4 weights, two in a byte, one scale per row and group of 128 columns, beside FP8 activations; `value = int4 * scale`.

The format of DeepSeek-R1 checkpoints in W4AFP8 as SGLang runs them (`quant_method: w4afp8`). Weights are signed, -8 to 7, the even column in the low
nibble. A group's scale is of either sign, float32 or bf16 in a checkpoint and bf16 at run time. Each projection of an expert may have an input scale,
one number for its activations. All in plain torch, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.errors import UnsupportedShape, WeightsError
from graphmoe.formats import BLOCK
from graphmoe.formats.fp8_block import SMALLEST_SCALE

LOWEST, HIGHEST = -8, 7
"""The int4 values."""

GROUPS = (32, 64, BLOCK)
"""Columns that may share a scale."""

_CLIPPED = tuple(HIGHEST + quarters / 4 for quarters in range(1, 21))
"""The clipping search also tries scales at which a group's largest magnitude is so many steps; all beyond 7 (or -8) saturates."""


def pack(values: Tensor) -> Tensor:
    """int8 `[..., K/2]` of int8 values `[..., K]` in -8 to 7: byte `j` holds column `2j` in its low nibble and column `2j + 1` in its high one.

    Raises:
        WeightsError: another dtype, an odd number of columns, or a value that is no int4.
    """
    if values.dtype != torch.int8:
        raise WeightsError(f"values are {values.dtype}, expected torch.int8")
    if values.shape[-1] % 2:
        raise WeightsError(f"{values.shape[-1]} columns cannot be packed two in a byte; pad them with a zero")
    if values.numel() and not LOWEST <= int(values.min()) <= int(values.max()) <= HIGHEST:
        raise WeightsError(f"values from {int(values.min())} to {int(values.max())} are no int4, which is {LOWEST} to {HIGHEST}")
    return (values[..., ::2] & 0xF) | (values[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """int8 values `[..., K]` in -8 to 7 of packed bytes int8 `[..., K/2]`; every byte has a meaning.

    Raises:
        WeightsError: another dtype.
    """
    if packed.dtype != torch.int8:
        raise WeightsError(f"packed weights are {packed.dtype}, expected torch.int8")
    low = ((packed & 0xF) ^ 8) - 8
    return torch.stack([low, packed >> 4], dim=-1).flatten(-2)


def quantize_weight(weight: Tensor, *, group: int = BLOCK, clip_search: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise weights per row and group of columns, symmetrically: the scale is `amax / 7`, rounded to bf16 before values are divided by it.

    Values go to the nearest int4, ties to even, so that each is within half a scale of what it was. A group of zeros has the smallest normal scale.

    Args:
        weight: float `[..., N, K]`.
        group: columns that share a scale; `K` is a multiple of it.
        clip_search: per group, also try smaller scales, at which the largest values saturate, and keep the one of the least squared error.

    Returns:
        packed int8 `[..., N, K/2]` and float32 scales `[..., N, K/group]` that bf16 holds exactly. A group that holds NaN or infinity gets the scale
        NaN: what is not finite going in is NaN coming out, never a plausible number.

    Raises:
        UnsupportedShape: another group size, or `K` that is no multiple of it.
    """
    if group not in GROUPS or weight.shape[-1] % group:
        raise UnsupportedShape(
            f"{weight.shape[-1]} columns cannot be quantised in groups of {group}; take a group of {_or(GROUPS)} that divides the columns"
        )
    groups = weight.float().unflatten(-1, (-1, group))
    amax = groups.abs().amax(dim=-1)
    scale = _least_error(groups, amax) if clip_search else scale_of(amax)
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    values = groups.div(scale[..., None]).round_().clamp_(LOWEST, HIGHEST).nan_to_num_(nan=0.0)
    return pack(values.to(torch.int8).flatten(-2)), scale


def dequantize_weight(packed: Tensor, scale: Tensor) -> Tensor:
    """float32 `[..., N, K]` of packed int8 `[..., N, K/2]` and floating scales `[..., N, K/group]`, whose shape says the group.

    Raises:
        UnsupportedShape: a group that is none of `GROUPS`.
    """
    group = group_of(2 * packed.shape[-1], scale.shape[-1])
    values = unpack(packed).float().unflatten(-1, (-1, group))
    return (values * scale.float()[..., None]).flatten(-2)


def prepare(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Weights as kernels read them: no shuffle widens them to e4m3, and scales of neighbouring rows lie side by side.

    A byte holds columns `j` and `64 + j` of a group of 128, the first in its low nibble, each as `value + 8`: a number `c` of 0 to 15, and the e4m3
    code `c` is `c * 2^-9` (the subnormals and the smallest normals), so that masking a byte widens it.

    Args:
        packed: int8 `[..., N, K/2]`.
        scale: floating `[..., N, K/128]`.

    Returns:
        uint8 `[..., N, K/2]` and scales `[..., K/128, N]`, dense.

    Raises:
        UnsupportedShape: groups of another size.
    """
    columns = 2 * packed.shape[-1]
    if group_of(columns, scale.shape[-1]) != BLOCK:
        raise UnsupportedShape(f"these weights have groups of {group_of(columns, scale.shape[-1])} columns, kernels take {BLOCK}: quantise them anew")
    codes = (unpack(packed) + (-LOWEST)).view(torch.uint8).unflatten(-1, (-1, 2, BLOCK // 2))
    return (codes[..., 0, :] | (codes[..., 1, :] << 4)).flatten(-2), scale.transpose(-1, -2).contiguous()


def dequantize_prepared(prepared: Tensor, scale: Tensor) -> Tensor:
    """float32 `[..., N, K]` of what `prepare` returned."""
    groups = prepared.unflatten(-1, (-1, BLOCK // 2))
    values = torch.cat([groups & 0xF, groups >> 4], dim=-1).float() + LOWEST
    return (values * scale.float().transpose(-1, -2)[..., None]).flatten(-2)


def group_of(columns: int, scales: int) -> int:
    """How many columns share a scale, of a row with so many of each.

    Raises:
        UnsupportedShape: a number that is none of `GROUPS`.
    """
    group, rest = divmod(columns, max(scales, 1))
    if rest or group not in GROUPS:
        raise UnsupportedShape(f"{scales} scales for {columns} columns make no group size that 'w4afp8' has: {_or(GROUPS)}")
    return group


def scale_of(amax: Tensor, steps: float = HIGHEST) -> Tensor:
    """The float32 scale, of a value that bf16 holds, at which `amax` is `steps` int4 steps."""
    return (amax / torch.full_like(amax, steps)).bfloat16().float().clamp(min=SMALLEST_SCALE)


def one_input_scale(scales: Tensor) -> Tensor:
    """The one float32 scale, shape `[]`, of a GEMM's activations, from those of its experts and projections, float of any shape.

    The largest: a token is rounded once, before it goes to several experts, so they share a scale, and the largest is the one at which no expert's
    calibrated range saturates; the others lose at most the ratio of the two scales in resolution, of which e4m3 has plenty.

    Raises:
        WeightsError: no scale, or one that is NaN, infinite, zero or negative.
    """
    scales = scales.float()
    if not scales.numel() or not bool((scales.isfinite() & (scales > 0)).all()):
        raise WeightsError(f"input scales {scales.flatten()[:5].tolist()} must be finite and positive")
    return scales.amax()


def _least_error(groups: Tensor, amax: Tensor) -> Tensor:
    """Per group, the scale of the least squared error; of equal ones the largest."""
    full = best = scale_of(amax)
    least = torch.full_like(amax, torch.inf)
    for steps in (HIGHEST, *_CLIPPED):
        scale = scale_of(amax, steps)
        quotient = groups / scale[..., None]
        error = quotient.round().clamp_(LOWEST, HIGHEST).sub_(quotient).square_().sum(dim=-1) * (scale / full).square()
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


def _or(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
