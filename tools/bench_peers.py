"""Peers beside graphmoe's own layer, in one run and one protocol: `python -m tools.bench_peers --model qwen3-30b-a3b --buckets 1,8,64`.

- *dg masked / psum64 / compact64*: only deep_gemm's two grouped GEMMs in that layout, no routing, scatter, activation or combine.
- *torch grouped_mm*: only torch's two BF16 grouped products over rows that are sorted already.
Each is captured over the same layers (L2-cold), median of the same timer, and printed as time over the same floor.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from graphmoe import BucketLadder, MoESpec, kernels, named_spec
from graphmoe.cli.console import make_console
from graphmoe.formats import BLOCK
from graphmoe.gemm.deep_gemm import DeepGemm
from graphmoe.layout import RowLayout
from graphmoe.measure import graph_timing
from graphmoe.planner import plan
from graphmoe.profile import find_profile
from graphmoe.trial import Batch, Bench
from graphmoe.weights import ExpertWeights


def deep_gemm_pair(kind: str, spec: MoESpec, batch: Batch, weights: ExpertWeights, gemm: DeepGemm) -> Callable[[], None]:
    """Both grouped GEMMs of one layer in one layout, on rows of random numbers."""
    tokens = batch.x.shape[0]
    layout = RowLayout.masked(spec, tokens, 128) if kind == "masked" else RowLayout.contiguous(kind, spec, tokens, 64)  # type: ignore[arg-type]
    h, i, device = spec.hidden_size, spec.intermediate_size, batch.x.device
    row_of = torch.empty(batch.topk_ids.shape, dtype=torch.int32, device=device)
    groups = torch.empty(layout.group_entries, dtype=torch.int32, device=device)
    flags = torch.zeros(1, dtype=torch.int32, device=device)
    kernels.route(batch.topk_ids.int(), layout, distinct=True, row_of=row_of, groups=groups, flags=flags)

    def rows(columns: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(layout.segments, layout.segment_rows, columns, device=device).to(torch.float8_e4m3fn)
        return values, torch.ones(layout.segments, columns // BLOCK, layout.segment_rows, device=device)

    (x, x_scales), (act, act_scales) = rows(h), rows(i)
    gate_up, down = (torch.empty(layout.segments, layout.segment_rows, n, dtype=torch.bfloat16, device=device) for n in (2 * i, h))
    expected = max(1, -(-tokens * spec.top_k // spec.num_experts))

    def run() -> None:
        gemm(layout, x, x_scales, weights.w13, weights.w13_scale_inv, groups, gate_up, expected)
        gemm(layout, act, act_scales, weights.w2, weights.w2_scale_inv, groups, down, expected)

    return run


def torch_pair(spec: MoESpec, batch: Batch, w13: Tensor, w2: Tensor) -> Callable[[], None]:
    """torch's two BF16 grouped products over sorted rows."""
    ends = torch.tensor(batch.counts, device=batch.x.device).cumsum(0).to(torch.int32)
    rows = max(1, sum(batch.counts))
    x = torch.randn(rows, spec.hidden_size, device=batch.x.device, dtype=torch.bfloat16)
    act = torch.randn(rows, spec.intermediate_size, device=batch.x.device, dtype=torch.bfloat16)

    def run() -> None:
        torch._grouped_mm(x, w13.transpose(1, 2), offs=ends)
        torch._grouped_mm(act, w2.transpose(1, 2), offs=ends)

    return run


def main() -> None:
    """Print one line a bucket: graphmoe's whole layer by `auto`, then each peer, as time over the floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--buckets", default="1,2,4,8,16,32,64,128,256,512,1024")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    spec = named_spec(options.model).shard(tp=options.tp, ep=options.ep, block=BLOCK)
    bench = Bench(spec, "fp8_block", device)
    gemm = DeepGemm("fp8_block", device)
    made = plan(spec, BucketLadder.of(options.buckets), profile=find_profile(spec, "fp8_block", torch.cuda.get_device_name(device)))
    e, h, i = spec.num_local_experts, spec.hidden_size, spec.intermediate_size
    plain = [[torch.randn(e, n, k, device=device, dtype=torch.bfloat16) for n, k in ((2 * i, h), (h, i))] for _ in range(3)]
    console = make_console()
    console.print(
        f"{options.model} tp={options.tp} ep={options.ep}: {torch.cuda.get_device_name(device)}, {bench.ceilings.of('fp8_block')}; time / floor"
    )
    for bucket in made.buckets:
        batch = bench.batches(bucket.tokens)[0]
        trial = bench.run(bucket.recipe, [batch])
        line = f"T={bucket.tokens:<5} floor {batch.floor_us:7.1f} us | graphmoe layer ({bucket.recipe.path}) {trial.worst_ratio:5.2f} | GEMMs alone:"
        for kind in ("masked", "psum", "compact"):
            runs = [deep_gemm_pair(kind, spec, batch, weights, gemm) for weights in bench.layers]
            for run in runs:
                run()
            line += f" dg {kind} {graph_timing(runs).median_us / batch.floor_us:5.2f}"
        pairs = [torch_pair(spec, batch, *weights) for weights in plain]
        for pair in pairs:
            pair()
        line += f" torch grouped_mm bf16 {graph_timing(pairs).median_us / batch.floor_us:5.2f} (its weights are twice the bytes)"
        console.print(line)


if __name__ == "__main__":
    main()
