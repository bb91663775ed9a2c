"""Programmatic dependent launch: a kernel's blocks become resident while its predecessor drains.

The rule that makes it safe: every block waits first, on every path, and signals its dependents only after its own wait. Then a kernel that has waited
knows that everything before it is complete, and before its wait only the outputs of its immediate predecessor are unsafe to read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_and_signal(PDL: tl.constexpr):
    """First statement of a kernel."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def pdl_flags() -> dict[str, bool]:
    """Keyword arguments of a launch: the constexpr for the kernel, the attribute for the launch. Hopper and later."""
    on = not triton.knobs.runtime.interpret and torch.cuda.get_device_capability() >= (9, 0)
    return {"PDL": on, "launch_pdl": on}
