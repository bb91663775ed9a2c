"""Block FP8: e4m3 payload, one float32 scale per 128x128 weight block or per 1x128 activation group; `value = payload * scale`.

The format of DeepSeek-V3 and Qwen3 FP8 checkpoints (`weight_scale_inv` is this scale). All in plain torch, on any device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graphmoe.formats import BLOCK

E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-126
"""Smallest normal float32: the scale of a block of zeros, so that no scale is ever 0 and no division makes a NaN."""


def scale_of(amax: Tensor) -> Tensor:
    """The float32 scale of a block whose largest magnitude is `amax`.

    Divides by a tensor: on CUDA torch turns a division by a Python number into a product with its reciprocal, one bit off.
    """
    return (amax / torch.full_like(amax, E4M3_MAX)).clamp(min=SMALLEST_SCALE)


def quantize_weight(weight: Tensor, *, scale_of: Callable[[Tensor], Tensor] = scale_of) -> tuple[Tensor, Tensor]:
    """Quantise weights per 128x128 block.

    Args:
        weight: float `[..., N, K]`, finite.
        scale_of: from a block's largest magnitude to its scale; `amax / 448` by default.

    Returns:
        e4m3 `[..., N, K]` and float32 scales `[..., ceil(N/128), ceil(K/128)]`.
    """
    n, k = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    scale = scale_of(blocks.abs().amax(dim=(-3, -1)))
    payload = to_e4m3(blocks / scale[..., :, None, :, None])
    return payload.flatten(-4, -3).flatten(-2)[..., :n, :k].contiguous(), scale


def dequantize_weight(payload: Tensor, scale: Tensor) -> Tensor:
    """float32 `[..., N, K]` of an e4m3 payload and its `[..., ceil(N/128), ceil(K/128)]` scales."""
    n, k = payload.shape[-2:]
    return payload.float() * scale.float().repeat_interleave(BLOCK, -2)[..., :n, :].repeat_interleave(BLOCK, -1)[..., :k]


def quantize_rows(x: Tensor, *, group: int = BLOCK, scale_of: Callable[[Tensor], Tensor] = scale_of) -> tuple[Tensor, Tensor]:
    """Quantise activations per row and group of columns.

    Args:
        x: float `[..., K]`, `K` a multiple of `group`.
        group: columns that share a scale.
        scale_of: from a group's largest magnitude to its scale; `amax / 448` by default.

    Returns:
        e4m3 `[..., K]` (values times the reciprocal of their scale) and float32 scales `[..., K/group]`. A group that holds NaN or infinity gets NaN:
        what is not finite going in is NaN coming out, never a plausible number.
    """
    groups = x.float().unflatten(-1, (-1, group))
    scale = scale_of(groups.abs().amax(dim=-1))
    scale = torch.where(groups.isfinite().all(dim=-1), scale, torch.nan)
    return to_e4m3(groups * scale.reciprocal()[..., None]).flatten(-2), scale


def dequantize_rows(payload: Tensor, scale: Tensor) -> Tensor:
    """float32 `[..., K]` of e4m3 rows and their `[..., K/group]` scales."""
    return payload.float() * scale.repeat_interleave(payload.shape[-1] // scale.shape[-1], -1)


def to_e4m3(values: Tensor) -> Tensor:
    """Saturating cast: beyond +-448 becomes +-448 (torch versions differ on overflow), NaN stays NaN."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def holds_nan(payload: Tensor) -> bool:
    """Whether an e4m3 tensor holds NaN: 0x7F is the largest signed byte, 0xFF the largest unsigned one. Makes no temporary."""
    return payload.numel() > 0 and (int(payload.view(torch.int8).max()) == 0x7F or int(payload.view(torch.uint8).max()) == 0xFF)
