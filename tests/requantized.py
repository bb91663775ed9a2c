"""Rows that are requantised to one scale, as functions that CPU and GPU tests share: laid out in memory in any way, poisoned, run, and judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphmoe.formats import ue8m0
from tests.strategies import ScaledRows

LAYOUTS = ("plain", "wide", "turned")
"""Contiguous; columns 5 to K + 5 of wider rows; columns outermost in their matrix."""


def laid_out(values: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """`values` of one byte or four, with other strides; and all the memory that the result lies in, as bytes, 0xFF wherever it holds no value."""
    *lead, rows, columns = values.shape
    stored = {"plain": (*lead, rows + 1, columns), "wide": (*lead, rows, columns + 8), "turned": (*lead, columns + 1, rows)}[layout]
    memory = torch.full((int(np.prod(stored)) * values.element_size(),), 0xFF, dtype=torch.uint8, device=values.device)
    whole = memory.view(torch.uint8 if values.element_size() == 1 else values.dtype).view(stored)
    view = {"plain": whole[..., :rows, :], "wide": whole[..., 5 : 5 + columns], "turned": whole[..., :columns, :].transpose(-1, -2)}[layout]
    view.copy_(values.view(view.dtype))
    return view.view(values.dtype), memory


def requantized(
    ops: Any, rows: ScaledRows, *, packed: bool, layouts: tuple[str, str, str], device: str = "cpu", **launch: int
) -> tuple[Tensor, Tensor]:
    """The result's bytes (rows that are not live hold their poison), and all the memory that they lie in."""
    x, _ = laid_out(torch.from_numpy(rows.codes).to(device).view(torch.float8_e4m3fn), layouts[0])
    scales = torch.from_numpy(rows.scales).to(device)
    if packed:
        scales = ue8m0.pack(scales).contiguous()
    scales, _ = laid_out(scales, layouts[1])
    poison = torch.from_numpy(np.random.default_rng(1).integers(0, 256, rows.codes.shape, dtype=np.uint8)).to(device)
    out, memory = laid_out(poison.view(torch.float8_e4m3fn), layouts[2])
    live = None if rows.live is None else torch.from_numpy(np.stack([rows.live, ~rows.live], axis=1)).to(device)[:, 0]
    named = {"masked_m": live, "row_map": None} if x.dim() == 3 else {"masked_m": None, "row_map": live}
    ops.requantize_per_tensor(x, scales, torch.tensor([rows.out_scale], dtype=torch.float32, device=device), **named, **launch, out=out)
    got = out.view(torch.uint8)
    dead = torch.from_numpy(~rows.alive).to(device)
    assert torch.equal(got[dead], poison[dead]), "rows that are not live were written"
    expected, _ = laid_out(got, layouts[2])
    assert torch.equal(memory, laid_out(expected, layouts[2])[1]), "something was written beside the rows"
    return got, memory


def exact_bytes(rows: ScaledRows, table: np.ndarray) -> np.ndarray:
    """The bytes of live rows whose quotients are e4m3 values (of `table`, by their byte) or saturate."""
    scales = np.repeat(rows.scales, 128, axis=-1)[..., : rows.codes.shape[-1]].astype(np.float64)
    values = np.clip(table[rows.codes] * scales / rows.out_scale, -448, 448)[rows.alive]
    order = np.argsort(table[:0x7F])
    found = order[np.searchsorted(table[:0x7F][order], np.abs(values))].astype(np.uint8)
    assert (table[found] == np.abs(values)).all(), "these rows are not exact"
    return found | np.where(np.signbit(values), 0x80, 0).astype(np.uint8)
