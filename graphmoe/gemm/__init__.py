"""Grouped GEMMs that `paths/grouped.py` calls: `deep_gemm` on a GPU, `torch` on a CPU."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from graphmoe.layout import RowLayout


class GroupedGemm(Protocol):
    """`out[row] = a[row] @ b[expert of row].T` for every live row, in bfloat16; whole tiles are stored, padding included."""

    name: str

    def __call__(
        self,
        layout: RowLayout,
        a: Tensor,
        a_scales: Tensor | None,
        b: Tensor,
        b_scales: Tensor | None,
        groups: Tensor,
        out: Tensor,
        expected_rows: int,
    ) -> None:
        """Launch one grouped GEMM.

        Args:
            layout: where rows live and what `groups` means.
            a: e4m3 or bf16 `[segments, segment_rows, K]`.
            a_scales: float32 `[segments, K/128, segment_rows]`, packed int32 `[segments, ceil(K/512), segment_rows]`, or None for bf16.
            b: e4m3 or bf16 `[E, N, K]`.
            b_scales: float32 `[E, ceil(N/128), K/128]`, packed int32 `[E, N, ceil(K/512)]`, or None for bf16.
            groups: int32, see RowLayout.
            out: bf16 `[segments, segment_rows, N]`.
            expected_rows: rows an expert gets on average; a tuning hint.
        """
