"""Where a number comes from: the device and the versions of everything that made it."""

from __future__ import annotations

import importlib.metadata

import torch


def provenance(device: torch.device) -> dict[str, str]:
    """Device, driver and library versions of this process, for what is measured in it."""
    facts = {"device": "cpu", "driver": "none"}
    if device.type == "cuda":
        facts = {"device": torch.cuda.get_device_name(device), "driver": _driver()}
    return facts | {"torch": torch.__version__, **{name: version_of(name) for name in ("triton", "sgl-deep-gemm", "graphmoe")}}


def _driver() -> str:
    try:
        from cuda.bindings import driver
    except ImportError:
        return "unknown"
    error, version = driver.cuDriverGetVersion()
    return f"CUDA {version // 1000}.{version % 1000 // 10}" if int(error) == 0 else "unknown"


def version_of(distribution: str, missing: str = "absent") -> str:
    """Of an installed distribution, or `missing`."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return missing
