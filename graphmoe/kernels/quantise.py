"""Device functions that several kernels share: rounding a row to e4m3 groups, as `formats/fp8_block.py` means it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantise_groups(values):
    """float32 `[GROUPS, 128]` -> (e4m3 `[GROUPS, 128]`, float32 scales `[GROUPS]`); a group with NaN or infinity gets the scale NaN."""
    magnitude = tl.abs(values)
    amax = tl.max(magnitude, axis=1)
    finite = tl.min((magnitude < float("inf")).to(tl.int32), axis=1)
    scale = tl.maximum(tl.div_rn(amax, 448.0), 1.1754943508222875e-38)
    scale = tl.where(finite == 1, scale, float("nan"))
    scaled = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    return tl.clamp(scaled, -448.0, 448.0).to(tl.float8e4nv), scale
