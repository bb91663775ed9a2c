"""Which device a runtime uses, and which arch a plan for it names."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from graphmoe.errors import InvalidInput


def resolve_device(device: torch.device | str) -> torch.device:
    """A device that a runtime can use, with its index.

    Raises:
        InvalidInput: neither a CUDA device that torch sees nor the CPU.
    """
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(f"device {device!r} is not supported; supported: cuda, cpu") from error
    if resolved.type not in ("cpu", "cuda"):
        raise InvalidInput(f"device {resolved} is not supported; supported: cuda, cpu")
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"device {resolved} was asked for, but torch {torch.__version__} sees no CUDA device; use device='cpu'")
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if resolved.type == "cuda" and resolved.index >= torch.cuda.device_count():
        raise InvalidInput(f"device {resolved} was asked for, but torch sees {torch.cuda.device_count()} CUDA device(s)")
    return resolved


def arch_of(device: torch.device) -> str:
    """The plan's arch of a resolved device: `"cpu"`, or `"sm90"` for a Hopper GPU."""
    if device.type == "cpu":
        return "cpu"
    major, _ = torch.cuda.get_device_capability(device)
    return f"sm{major}0"


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one."""
    if device.type == "cpu" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)
