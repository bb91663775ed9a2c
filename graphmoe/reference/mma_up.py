"""Twin of `kernels/mma_up.py`, which computes what `gemv_up` does."""

from graphmoe.reference.gemv_up import gemv_up as mma_up

__all__ = ["mma_up"]
