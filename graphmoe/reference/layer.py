"""The dense oracle: one MoE layer in float64, expert by expert, with no layout and no graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graphmoe.formats import Rounding, ScaleFormat, fp8_block, get_format, requantize_per_tensor, ue8m0, w4afp8
from graphmoe.formats.fp8_block import dequantize_rows, dequantize_weight

if TYPE_CHECKING:
    from graphmoe.weights import ExpertWeights


def moe_layer(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: ExpertWeights, *, rounding: Rounding | None = Rounding()) -> Tensor:  # noqa: B008 - frozen
    """What the layer means.

    Args:
        x: bf16 `[t, H]`.
        topk_ids: int `[t, K]`, local ids; ids outside `[0, E)` contribute nothing.
        topk_weights: float32 `[t, K]`.
        weights: the experts; dequantised to float64 one at a time.
        rounding: where activations are rounded, see `Path.rounding`. Then only accumulation order and the last bf16 rounding separate a path from
            this oracle. None rounds nothing: the accuracy of the format itself.

    Returns:
        float64 `[t, H]`. A token with duplicate ids under `distinct_topk` is NaN.
    """
    spec = weights.spec
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    scales = get_format(weights.fmt).scales
    quantised = rounding is not None and rounding.quantise and scales is not None
    quantise = fp8_block.quantize_rows if scales is ScaleFormat.FLOAT32 else ue8m0.quantize_rows
    source = dequantize_rows(*quantise(x)) if quantised else x
    per_tensor = rounding is not None and rounding.per_tensor
    if per_tensor:
        assert weights.w13_input_scale is not None
        source = requantize_per_tensor(*quantise(x), weights.w13_input_scale).float() * weights.w13_input_scale
    for e in range(spec.num_local_experts):
        token, slot = (topk_ids == e).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        dense = _dense_int4 if weights.fmt == "w4afp8" else _dense
        w13, w2 = (dense(payload, scale, e) for payload, scale in ((weights.w13, weights.w13_scale_inv), (weights.w2, weights.w2_scale_inv)))
        gate_up = source[token].double() @ w13.T
        gate, up = (gate_up.to(torch.bfloat16).double() if rounding is not None and rounding.gate_up else gate_up).chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate) * up
        if per_tensor:
            hidden = _to_one_scale(hidden, weights.w2_input_scale).double()
        elif rounding is not None and quantised:
            hidden = dequantize_rows(*quantise(hidden, group=rounding.group)).double()
        elif rounding is not None:
            hidden = hidden.to(torch.bfloat16).double()
        out.index_add_(0, token, (hidden @ w2.T) * topk_weights[token, slot, None].double())
    out *= spec.routed_scaling_factor
    if spec.distinct_topk:
        out[_names_an_expert_twice(topk_ids, spec.num_local_experts)] = torch.nan
    return out


def _dense(payload: Tensor, scale: Tensor | None, e: int) -> Tensor:
    return payload[e].double() if scale is None else dequantize_weight(payload[e], scale[e]).double()


def _dense_int4(packed: Tensor, scale: Tensor | None, e: int) -> Tensor:
    assert scale is not None
    return w4afp8.dequantize_weight(packed[e], scale[e]).double()


def _to_one_scale(values: Tensor, scale: Tensor | None) -> Tensor:
    assert scale is not None
    finite = torch.where(values.isfinite(), values.float(), torch.nan)
    return fp8_block.to_e4m3(finite / scale).float() * scale


def _names_an_expert_twice(topk_ids: Tensor, num_experts: int) -> Tensor:
    ids = topk_ids.sort(dim=-1).values
    return ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0) & (ids[:, 1:] < num_experts)).any(-1)
