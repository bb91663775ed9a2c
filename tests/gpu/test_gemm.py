"""deep_gemm on identical inputs against float64: one stage at a time, so that a small fault cannot hide in the layer's quantisation noise."""

from __future__ import annotations

import pytest
import torch

from graphmoe import reference
from graphmoe.formats import ue8m0
from graphmoe.formats.fp8_block import dequantize_rows, dequantize_weight, quantize_rows
from graphmoe.gemm.deep_gemm import DeepGemm
from graphmoe.layout import RowLayout
from tests.checks import GROUPED, routings
from tests.gpu.cases import CASES, Case, weights_of

# bf16 output: half a step is 2^-9. FP8: Hopper's reduced accumulation over 128 products adds about 2^-10 of the row's norm.
LIMIT = {"bf16": 2.0**-8, "fp8_block": 2.0**-8, "ue8m0": 2.0**-8}


@pytest.mark.parametrize("case", [case for case in CASES if case.recipe in GROUPED], ids=lambda case: case.name)
def test_live_rows_equal_float64(case: Case, compiled: None) -> None:
    spec, weights, t = case.spec, weights_of(case.shape, case.fmt), 64
    options = dict(case.recipe.options)
    kind = case.recipe.path
    layout = RowLayout.masked(spec, t, options["row_tile"]) if kind == "masked" else RowLayout.contiguous(kind, spec, t, options["block_e"])  # type: ignore[arg-type]
    quantise = ue8m0.quantize_rows if case.fmt == "ue8m0" else quantize_rows
    gemm = DeepGemm(case.fmt, torch.device("cuda", 0))
    for _, ids in routings(spec, t, seed=3, device="cuda"):
        row_of = torch.empty(ids.shape, dtype=torch.int32, device="cuda")
        groups = torch.empty(layout.group_entries, dtype=torch.int32, device="cuda")
        flags = torch.zeros(1, dtype=torch.int32, device="cuda")
        counts = torch.empty(1, spec.num_local_experts, dtype=torch.int32, device="cuda")
        reference.count(ids, distinct=True, block_counts=counts, flags=flags)
        reference.route(ids, layout, distinct=True, block_counts=counts, row_of=row_of, groups=groups)
        for weight, scale in ((weights.w13, weights.w13_scale_inv), (weights.w2, weights.w2_scale_inv)):
            columns = weight.shape[2]
            values = torch.randn(layout.segments, layout.segment_rows, columns, device="cuda").bfloat16()
            a, a_scales = (values, None) if scale is None else quantise(values)
            exact = values.double() if a_scales is None else dequantize_rows(a, a_scales).double()
            padding = torch.ones(layout.rows, dtype=torch.bool, device="cuda")
            padding[row_of[row_of >= 0].long()] = False
            if a_scales is None:
                a.flatten(0, 1)[padding] = torch.nan
            else:
                a.view(torch.uint8).flatten(0, 1)[padding] = 0x7F  # NaN in e4m3
                a_scales.flatten(0, 1)[padding] = torch.nan
            stored = None if a_scales is None else a_scales.transpose(1, 2).contiguous()
            out = torch.full((layout.segments, layout.segment_rows, weight.shape[1]), torch.nan, device="cuda", dtype=torch.bfloat16)
            gemm(layout, a, stored, weight, scale, groups, out, 4)
            for expert in ids[(ids >= 0) & (ids < spec.num_local_experts)].unique().tolist()[:24]:
                rows = row_of[ids == expert].long()
                dense = weight[expert].double() if scale is None else dequantize_weight(weight[expert], scale[expert]).double()
                want = exact.flatten(0, 1)[rows] @ dense.T
                error = (out.flatten(0, 1)[rows].double() - want).norm(dim=-1) / want.norm(dim=-1)
                assert float(error.max()) < LIMIT[case.fmt], f"expert {expert}: {float(error.max()):.5f}"
