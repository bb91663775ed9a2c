"""The next token of every row from its logits, on the device and without a generator's state."""

from __future__ import annotations

import torch
from torch import Tensor

_ONE = 1 << 38  # a probability of 1 in fixed point: sums are exact, and times a 24-bit number they fit 64 bits
_COLDEST = 1e-6  # below it the likeliest token has it all anyway, and a division could overflow
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, the constants of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)
_MIX = (-4658895280553007687, -7723592293110705685)  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row `[B, V]`, int64 `[B]`; -1 where a logit is NaN or the largest is infinite."""
    best, token = logits.max(-1)
    return torch.where(best.isfinite(), token, -1)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, key: Tensor, positions: Tensor) -> Tensor:
    """A token of each row, drawn by its own settings.

    Probabilities are summed in fixed point, so that a row's token depends on its logits and its own settings alone.

    Args:
        logits: `[B, V]`.
        temperature: float32 `[B]`; 0 takes the likeliest token.
        top_k: int64 `[B]`; 0 means all.
        top_p: float32 `[B]`; 1 means all.
        key: int64 `[B]`, see `key_of`.
        positions: int64 `[B]`; with the key they name a row's random number.

    Returns:
        int64 `[B]`; -1 where a logit is NaN or the largest is infinite.
    """
    likeliest = greedy(logits)
    values, order = logits.float().sort(stable=True, dim=-1, descending=True)
    values = (values - values[:, :1]) / torch.where(temperature > 0, temperature.clamp(min=_COLDEST), 1.0)[:, None]
    ranks = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill((ranks >= top_k[:, None]) & (top_k > 0)[:, None], float("-inf"))
    share = (values.softmax(-1).nan_to_num(0.0) * _ONE).long()
    before = share.cumsum(-1) - share
    dropped = (before >= (top_p.double() * _ONE).long()[:, None]) & (top_p < 1)[:, None] & (ranks > 0)
    reached = share.masked_fill(dropped, 0).cumsum(-1)
    threshold = (uniform24(key, positions)[:, None] * reached[:, -1:]) >> 24
    rank = (reached <= threshold).sum(-1, keepdim=True).clamp_(max=values.shape[-1] - 1)
    drawn = order.gather(-1, rank)[:, 0]
    return torch.where((temperature > 0) & (likeliest >= 0), drawn, likeliest)


def uniform24(key: Tensor, positions: Tensor) -> Tensor:
    """Random 24-bit numbers, int64: output `position` of the splitmix64 stream that starts at `key`. A pure function of both."""
    x = key + (positions + 1) * _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX[0]
    x = (x ^ _shift(x, 27)) * _MIX[1]
    return _shift(x ^ _shift(x, 31), 40)


def _shift(x: Tensor, bits: int) -> Tensor:
    """A logical right shift; torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
