"""UE8M0 scales: powers of two, held as float32 or packed as exponent bytes. Exact at and next to powers of two: exponent bits, never a logarithm.

A scale is the smallest power of two `s` with `amax <= 448 * s`, clamped to `2^-126 .. 2^127`. `448 = 1.75 * 2^8`, so with `amax = m * 2^x` and
`1 <= m < 2`: `s = 2^(x - 8)` if `m <= 1.75`, else `2^(x - 7)`. The format is that of DeepSeek-V3.1 checkpoints (`scale_fmt: ue8m0`) and of
deep_gemm on SM100, which takes four exponents of one row packed into an int32, the lowest group in the lowest byte, rows contiguous and padded
to 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.errors import WeightsError
from graphmoe.formats import BLOCK, SCALES_PER_WORD, fp8_block
from graphmoe.formats.fp8_block import E4M3_MAX, holds_nan, to_e4m3

TMA_ROWS = 4
"""Rows of packed words are padded to this many: 16 bytes, what a TMA copy needs."""


def scale_of(amax: Tensor) -> Tensor:
    """float32 power-of-two scale of blocks whose largest magnitude is `amax` (float32 or float64, any shape); NaN and infinity give NaN."""
    mantissa, exponent = torch.frexp(amax.double())  # amax = mantissa * 2^exponent, mantissa in [0.5, 1); 448 = 0.875 * 2^9
    power = (exponent - 9 + (mantissa > 0.875).to(exponent.dtype)).clamp(-126, 127)
    power = torch.where(amax == 0, -126, power)
    scale = ((power + 127).to(torch.int32) << 23).view(torch.float32)
    return torch.where(amax.isfinite(), scale, torch.nan)


def is_power_of_two(scale: Tensor) -> Tensor:
    """Whether each float32 scale is exactly a UE8M0 value in `2^-126 .. 2^127`."""
    bits = scale.float().contiguous().view(torch.int32)
    return (bits & 0x7FFFFF == 0) & (bits >= 1 << 23) & (bits < 255 << 23)


def quantize_rows(x: Tensor, *, group: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Activations straight to UE8M0: the scale is rounded up first and the payload quantised with the rounded scale.

    Args:
        x: float `[..., K]`, `K` a multiple of `group`.
        group: columns that share a scale.

    Returns:
        e4m3 `[..., K]` and float32 power-of-two scales `[..., K/group]`; a group with NaN or infinity gets the scale NaN.
    """
    return fp8_block.quantize_rows(x, group=group, scale_of=scale_of)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8_block.quantize_weight` straight to power-of-two scales."""
    return fp8_block.quantize_weight(weight, scale_of=scale_of)


def requantize_ue8m0(weight: Tensor, scale_inv: Tensor, block: tuple[int, int] = (BLOCK, BLOCK)) -> tuple[Tensor, Tensor]:
    """Block FP8 with any scales -> block FP8 with power-of-two scales: scale *and* payload are requantised.

    The new scale is exact for the block's true values (`payload * scale`), so every element is within half an e4m3 step at the new scale.
    Applied again it changes no value (it may halve a scale and double the payload where rounding left a block's largest value at 224).

    Args:
        weight: e4m3 `[..., N, K]`.
        scale_inv: floating `[..., ceil(N/block[0]), ceil(K/block[1])]`, finite, not negative.
        block: rows and columns of a block; the last ones may be ragged.

    Returns:
        e4m3 `[..., N, K]` and float32 powers of two, in new tensors.

    Raises:
        WeightsError: a dtype or shape that does not fit, a scale that is NaN, infinite or negative, or NaN in the payload.
    """
    _check(weight, scale_inv, block)
    n, k = weight.shape[-2:]
    rows, columns = block
    padded = torch.nn.functional.pad(weight.float(), (0, -k % columns, 0, -n % rows))
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    old = scale_inv.double()
    new = scale_of(blocks.abs().amax(dim=(-3, -1)).double() * old)
    ratio = (old / new.double())[..., :, None, :, None]
    payload = to_e4m3(_to_e4m3_grid(blocks.double().mul_(ratio)))
    return payload.flatten(-4, -3).flatten(-2)[..., :n, :k].contiguous(), new


def _to_e4m3_grid(values: Tensor) -> Tensor:
    """Round float64 values in place to the nearest e4m3 value, ties to even. torch's cast goes through float32, which moves what is next to a tie."""
    exponent = torch.frexp(values).exponent.sub_(1).clamp_(-6, 8).sub_(3)
    step = torch.ones_like(values).ldexp_(exponent)
    return values.div_(step).round_().mul_(step)


def pack(scale: Tensor) -> Tensor:
    """Power-of-two scales as deep_gemm's packed words, in its own layout.

    Args:
        scale: float32 `[..., rows, S]`, every value a power of two (or NaN).

    Returns:
        int32 `[..., rows, ceil(S/4)]` with strides `(1, round_up(rows, 4))` in the last two dimensions: rows are contiguous and padded to 16 bytes.
        Byte `j` of word `w` is the biased exponent of column `4w + j`; columns beyond `S` are 0.
    """
    rows, columns = scale.shape[-2:]
    words = -(-columns // SCALES_PER_WORD)
    exponents = (scale.float().contiguous().view(torch.int32) >> 23).to(torch.uint8)
    padded = torch.nn.functional.pad(exponents, (0, words * SCALES_PER_WORD - columns, 0, -rows % TMA_ROWS))
    by_row = padded.view(torch.int32)  # [..., stored rows, words]
    # `contiguous()` would keep the strides of a single word as they are, and deep_gemm asserts them.
    stored = torch.empty(*by_row.shape[:-2], words, by_row.shape[-2], dtype=torch.int32, device=scale.device)
    return stored.copy_(by_row.transpose(-1, -2))[..., :rows].transpose(-1, -2)


def pack_weight_scale(scale: Tensor, rows: int) -> Tensor:
    """Block scales of a weight as deep_gemm on SM100 takes them: one per (row, 128 columns), packed.

    Args:
        scale: float32 `[E, ceil(N/128), K/128]`, powers of two.
        rows: `N`.

    Returns:
        int32 `[E, N, ceil(K/512)]` in the layout of `pack`.
    """
    return pack(scale.repeat_interleave(BLOCK, -2)[..., :rows, :])


def unpack(words: Tensor, columns: int) -> Tensor:
    """float32 scales `[..., rows, columns]` of packed words `[..., rows, ceil(columns/4)]`; exponent 255 is NaN."""
    shifts = torch.arange(0, 32, 8, device=words.device, dtype=torch.int32)
    exponents = ((words[..., None] >> shifts) & 0xFF).flatten(-2)[..., :columns]
    scale = (exponents << 23).view(torch.float32)
    return torch.where(exponents == 255, torch.nan, scale)


def _check(weight: Tensor, scale_inv: Tensor, block: tuple[int, int]) -> None:
    if weight.dtype != torch.float8_e4m3fn:
        raise WeightsError(f"weight is {weight.dtype}, expected torch.float8_e4m3fn")
    want = (*weight.shape[:-2], -(-weight.shape[-2] // block[0]), -(-weight.shape[-1] // block[1]))
    if tuple(scale_inv.shape) != want or not scale_inv.dtype.is_floating_point:
        raise WeightsError(
            f"scale_inv is {scale_inv.dtype} {tuple(scale_inv.shape)}, expected floating {want} for {tuple(weight.shape)} in blocks of {block}"
        )
    if not bool((scale_inv.float().isfinite() & (scale_inv.float() >= 0)).all()):
        raise WeightsError("scale_inv holds a scale that is NaN, infinite or negative")
    if holds_nan(weight):
        raise WeightsError("weight holds NaN: its block would become NaN as a whole")


assert E4M3_MAX == 0.875 * 2**9
