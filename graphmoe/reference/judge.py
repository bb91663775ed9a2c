"""How correct is judged: every single row by its relative error. A lost expert hides in a batch's norm, not in its row."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.formats import Rounding

ROW_ERROR = {"fp8_block": 0.06, "ue8m0": 0.06, "w4afp8": 0.06, "bf16": 0.01}
"""Largest relative error of one row against `moe_layer`, which rounds where the format does.

bf16: gate, up, the product and the result are each rounded by at most 2^-9, which adds up to about 0.3 %.
fp8_block, ue8m0, w4afp8 (against its own int4 weights): Hopper accumulates FP8 products in fewer than 24 bits, about 2^-10 of a row's norm. That is
enough to move gate and up by a bf16 step, a group's scale with them, and so where its values fall on the e4m3 grid. Rounding to that grid costs about
2.6 % of a row's norm; two roundings that have lost all relation differ by sqrt(2) times that, 3.7 %, and single rows by up to half as much again.

A lost expert moves its row by about its share of the row's norm: 1/sqrt(K) at equal router weights, but one of little weight hides below this limit.
So what must never be lost is tested with router weights that are nearly equal.
"""


def row_limit(fmt: str, rounding: Rounding) -> float:
    """`ROW_ERROR` of a path that rounds like this: as small as bf16's where activations are not quantised."""
    return ROW_ERROR[fmt if rounding.quantise else "bf16"]


def row_errors(y: Tensor, want: Tensor) -> Tensor:
    """Relative error of each row of `y` `[t, H]` against the float64 oracle `want` `[t, H]`.

    Infinity where the oracle is NaN or zero and `y` is not exactly that, or where `y` alone is NaN.
    """
    want_nan, want_zero = want.isnan().all(-1), (want == 0).all(-1)
    error = (y.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    error = torch.where(error.isnan(), torch.inf, error)
    error = torch.where(want_zero, torch.where((y == 0).all(-1), 0.0, torch.inf), error)
    return torch.where(want_nan, torch.where(y.isnan().all(-1), 0.0, torch.inf), error)
