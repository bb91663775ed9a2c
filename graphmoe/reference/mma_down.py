"""Twin of `kernels/mma_down.py`, which computes what `gemv_down` does."""

from __future__ import annotations

from typing import Any

from graphmoe.reference.gemv_down import gemv_down


def mma_down(*tensors: Any, stages: int, **launch: Any) -> None:
    """The second GEMM and the combine; the launch's sizes mean nothing here. See `graphmoe.kernels.mma_down`."""
    gemv_down(*tensors, **launch)
