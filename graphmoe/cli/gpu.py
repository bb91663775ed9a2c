"""The GPU that `tune` and `bench` measure."""

from __future__ import annotations

import torch

from graphmoe.device import resolve_device
from graphmoe.errors import InvalidInput


def measured_gpu() -> tuple[torch.device, str]:
    """The current CUDA device, and its name as torch gives it.

    Raises:
        InvalidInput: there is none.
    """
    if not torch.cuda.is_available():
        raise InvalidInput(f"there is nothing to measure: torch {torch.__version__} sees no CUDA device; `graphmoe plan` needs none")
    device = resolve_device("cuda")
    return device, torch.cuda.get_device_name(device)
