"""Hypothesis profiles, and Triton's interpreter where there is no GPU (the variable is read when a kernel is decorated, so it is set first)."""

import os

import torch
from hypothesis import HealthCheck, settings

# Tests run in parallel processes; small tensors gain nothing from threads of their own.
torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Too slow and too large inputs are a matter of the machine, not of the property.
_relaxed = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("ci", max_examples=60, deadline=None, suppress_health_check=_relaxed, derandomize=False)
settings.register_profile("deep", max_examples=3000, deadline=None, suppress_health_check=_relaxed)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
