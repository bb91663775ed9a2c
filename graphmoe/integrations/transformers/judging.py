"""Which expert modules of Transformers graphmoe computes, and why not the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphmoe.errors import PlanError, SpecError
from graphmoe.formats import BLOCK, get_format
from graphmoe.spec import MoESpec

_SILU = ("SiLU", "SiLUActivation")


def spec_of(module: Any, top_k: int) -> MoESpec:
    """The layer that an experts module holds. Transformers' routers apply the model's scaling factor themselves."""
    experts, rows, hidden = module.gate_up_proj.shape
    return MoESpec(int(experts), top_k, int(hidden) * get_format(format_of(module)).per_element, int(rows) // 2)


def format_of(module: Any) -> str:
    """The format that its weights are stored in."""
    scale = getattr(module, "gate_up_proj_scale_inv", None)
    if scale is None:
        return "bf16"
    return getattr(module, "graphmoe_format", None) or ("ue8m0" if scale.dtype == torch.float8_e8m0fnu else "fp8_block")


def why_not(module: Any, top_k: int = 1) -> str | None:
    """Why graphmoe cannot compute this experts module, or None."""
    return _why_not_its_kind(module) or _why_not_its_weights(module, top_k)


def _why_not_its_kind(module: Any) -> str | None:
    for attribute, value, why in (
        ("has_gate", False, "its experts have no gate"),
        ("has_bias", True, "its experts have biases"),
        ("is_transposed", True, "its weights are stored transposed"),
        ("is_concatenated", False, "its gate and up rows are interleaved"),
        ("has_post_expert_norm", True, "a norm follows each expert"),
    ):
        if getattr(module, attribute, not value) == value:
            return why
    if _gates_itself(module):
        return "it has a gate function of its own"
    if type(getattr(module, "act_fn", None)).__name__ not in _SILU and getattr(module, "act_fn", None) is not nn.functional.silu:
        return f"its activation is {type(getattr(module, 'act_fn', None)).__name__}, not SiLU"
    return None


def _gates_itself(module: Any) -> bool:
    """Whether it computes anything but act(gate) * up; FP8 modules do if a limit is set."""
    from transformers.integrations.finegrained_fp8 import FP8Experts
    from transformers.integrations.moe import _default_apply_gate

    if isinstance(module, FP8Experts):
        limits = ("swiglu_alpha", "swiglu_limit", "limit", "gate_softcap", "up_softcap")
        return type(module)._apply_gate is not FP8Experts._apply_gate or any(getattr(module, name, None) is not None for name in limits)
    return getattr(type(module), "_apply_gate", _default_apply_gate) is not _default_apply_gate


def _why_not_its_weights(module: Any, top_k: int) -> str | None:
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights):
        return "it has no gate_up_proj [E, 2I, H] and down_proj [E, H, I]"
    gate_up, down = weights
    assert gate_up is not None
    assert down is not None
    if type(gate_up.data) is not Tensor:
        return f"its weights are {type(gate_up.data).__name__}s, not plain tensors"
    of = get_format(format_of(module))
    experts, rows, hidden = gate_up.shape
    if tuple(down.shape) != (experts, *of.stored_shape(hidden * of.per_element, rows // 2)) or rows % 2:
        return f"gate_up_proj is {tuple(gate_up.shape)} and down_proj {tuple(down.shape)}, not [E, 2I, H] and [E, H, I]"
    scaled, payload = of.scales is not None, getattr(torch, of.weight_dtype)
    if gate_up.dtype != payload or down.dtype != payload:
        remedy = "" if scaled else "; load the model with dtype=torch.bfloat16"
        return f"its weights are {gate_up.dtype} and {down.dtype}, not {payload}{remedy}"
    if scaled and getattr(module, "activation_scheme", "dynamic") != "dynamic":
        return "its activations have static scales"
    if scaled and tuple(getattr(module, "block_size", None) or (BLOCK, BLOCK)) != (BLOCK, BLOCK):
        return f"its scale blocks are {tuple(module.block_size)}, not ({BLOCK}, {BLOCK})"
    try:
        get_format(format_of(module)).check(spec_of(module, min(top_k, int(experts))))
    except (SpecError, PlanError) as error:
        return str(error)
    return None
