"""Peers beside graphmoe's own layer, in one run and one protocol: `python -m tools.bench_peers --model qwen3-30b-a3b --buckets 1,8,64`.

- *dg masked / psum64 / compact64 / compact128*: **only** deep_gemm's two grouped GEMMs in that layout, without routing, scatter, activation, combine.
- *mega*: deep_gemm's `fp8_mega_moe` with one rank and its pre-dispatch kernel, a whole layer; where one rank has all experts.
- *transformers*: the `grouped_mm` experts of Transformers, a whole layer in BF16 (its weights are twice the bytes), called from Python if it
  cannot be captured.
- *torch*: **only** torch's two BF16 grouped products over rows that are sorted already.
- vLLM and FlashInfer are timed by their own benchmarks; neither is importable where this ran, so they are not among these columns.

Each is captured over the same layers (L2-cold), the median of the same timer, and printed as time over the same floor. `off` is a whole layer's worst
row of 16 against a layer that rounds nothing but the weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe import BucketLadder, MoESpec
from graphmoe.cli.console import make_console
from graphmoe.cli.gpu import measured_gpu
from graphmoe.cli.options import sharded
from graphmoe.errors import GraphMoEError
from graphmoe.formats import BLOCK
from graphmoe.gemm.deep_gemm import DeepGemm
from graphmoe.layout import RowLayout
from graphmoe.measure import call_timing, graph_timing
from graphmoe.paths.grouped import route_blocks
from graphmoe.planner import plan
from graphmoe.profile import find_profile
from graphmoe.reference import moe_layer, row_errors
from graphmoe.trial import Batch, Bench
from graphmoe.weights import ExpertWeights

Runs = list[Callable[[], object]]
_PLAIN_LAYERS = 3
_LAYOUTS = {"dg masked": ("masked", 128), "dg psum64": ("psum", 64), "dg compact64": ("compact", 64), "dg compact128": ("compact", 128)}


def deep_gemm_pair(kind: str, align: int, spec: MoESpec, batch: Batch, weights: ExpertWeights, gemm: DeepGemm) -> Callable[[], None]:
    """Both grouped GEMMs of one layer in one layout, on rows of random numbers."""
    from graphmoe import kernels  # needs Triton

    tokens = batch.x.shape[0]
    layout = RowLayout.masked(spec, tokens, align) if kind == "masked" else RowLayout.contiguous(kind, spec, tokens, align)  # type: ignore[arg-type]
    h, i, device = spec.hidden_size, spec.intermediate_size, batch.x.device
    ids = batch.topk_ids.int()
    row_of, groups, counts, flags = (
        torch.zeros(shape, dtype=torch.int32, device=device)
        for shape in (ids.shape, layout.group_entries, (route_blocks(tokens), spec.num_local_experts), 1)
    )
    kernels.count(ids, distinct=True, block_counts=counts, flags=flags)
    kernels.route(ids, layout, distinct=True, block_counts=counts, row_of=row_of, groups=groups)

    def rows(columns: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(layout.segments, layout.segment_rows, columns, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
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


class Mega:
    """deep_gemm's one-kernel layer over symmetric memory, with one rank."""

    def __init__(self, spec: MoESpec, most_tokens: int, layers: list[ExpertWeights]) -> None:
        import deep_gemm  # type: ignore[import-not-found, import-untyped, unused-ignore]
        import torch.distributed as dist

        if spec.num_local_experts != spec.num_experts:
            raise GraphMoEError("this rank has not all experts")
        if not dist.is_initialized():
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
        self._library = deep_gemm
        sizes = spec.num_experts, most_tokens, spec.top_k, spec.hidden_size, spec.intermediate_size
        self._buffer = deep_gemm.get_symm_buffer_for_mega_moe(dist.group.WORLD, *sizes)
        self._weights = [deep_gemm.transform_weights_for_mega_moe_sm90((one.w13, one.w13_scale_inv), (one.w2, one.w2_scale_inv)) for one in layers]
        self._scale = spec.routed_scaling_factor

    def runs(self, batch: Batch, y: Tensor) -> Runs:
        ids = batch.topk_ids.int()
        return [partial(self._run, batch, ids, y, *weights) for weights in self._weights]

    def _run(self, batch: Batch, ids: Tensor, y: Tensor, l1: Any, l2: Any) -> None:
        b, tokens = self._buffer, len(ids)
        self._library.mega_moe_pre_dispatch_sm90(
            batch.x, ids, batch.topk_weights, b.x, b.x_sf, b.topk_idx, b.topk_weights, tokens, BLOCK, self._scale
        )
        self._library.fp8_mega_moe(y, l1, l2, b)


def transformers_layers(spec: MoESpec, plain: list[list[Tensor]]) -> list[Any]:
    """The experts module of Qwen3-MoE, whose implementation is `grouped_mm`, one a layer; BF16."""
    from transformers import Qwen3MoeConfig  # type: ignore[import-not-found, unused-ignore]
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # type: ignore[import-not-found, unused-ignore]

    if spec.num_local_experts != spec.num_experts:
        raise GraphMoEError("this rank has not all experts")
    config = Qwen3MoeConfig(
        hidden_size=spec.hidden_size, moe_intermediate_size=spec.intermediate_size, num_experts=spec.num_experts, num_experts_per_tok=spec.top_k
    )
    config._experts_implementation = "grouped_mm"
    layers = []
    for w13, w2 in plain:
        with torch.device("meta"):
            layer = Qwen3MoeExperts(config)
        layer.gate_up_proj, layer.down_proj = (torch.nn.Parameter(one, requires_grad=False) for one in (w13, w2))
        layers.append(layer)
    return layers


@contextmanager
def told(said: set[str], name: str) -> Iterator[None]:
    """A peer that does not run here is said once and leaves its cell empty."""
    try:
        yield
    except Exception as error:
        if name not in said:
            print(f"{name} is not timed: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}", file=sys.stderr)
        said.add(name)


def ratio(runs: Runs, floor_us: float) -> float:
    for run in runs:
        run()
    return graph_timing(runs).median_us / floor_us


def off(y: Any, batch: Batch, weights: ExpertWeights) -> float:
    """The worst of some rows against the exact layer."""
    some = slice(0, 16)
    return float(row_errors(y[some], moe_layer(batch.x[some], batch.topk_ids[some], batch.topk_weights[some], weights, rounding=None)).max())


def measure(model: str, tp: int, ep: int, buckets: str) -> tuple[str, list[dict[str, Any]]]:
    """A title, and a row of ratios a bucket. A whole layer of a peer has its worst row beside it."""
    device = torch.device("cuda", 0)
    spec = sharded(model, tp, ep, "fp8_block")
    bench = Bench(spec, "fp8_block", device)
    gemm = DeepGemm("fp8_block", device)
    made = plan(spec, BucketLadder.of(buckets), profile=find_profile(spec, "fp8_block", torch.cuda.get_device_name(device)))
    e, h, i = spec.num_local_experts, spec.hidden_size, spec.intermediate_size
    plain = [[torch.randn(e, n, k, device=device, dtype=torch.bfloat16).mul_(k**-0.5) for n, k in ((2 * i, h), (h, i))] for _ in range(_PLAIN_LAYERS)]
    exact = [ExpertWeights(spec, "bf16", *pair) for pair in plain]
    said: set[str] = set()
    mega, theirs = None, None
    with told(said, "mega"):
        mega = Mega(spec, made.ladder.largest, bench.layers[:6])
    with told(said, "transformers"):
        theirs = transformers_layers(spec, plain)
    rows = []
    for bucket in made.buckets:
        batch = bench.batches(bucket.tokens)[0]
        trial = bench.run(bucket.recipe, [batch])
        row: dict[str, Any] = {
            "T": bucket.tokens,
            "floor us": round(batch.floor_us, 1),
            "graphmoe": None if trial.refused else trial.worst_ratio,
            "path": bucket.recipe.path,
        }
        for name, (kind, align) in _LAYOUTS.items():
            with told(said, name):
                row[name] = ratio([deep_gemm_pair(kind, align, spec, batch, weights, gemm) for weights in bench.layers[:6]], batch.floor_us)
        if mega is not None:
            with told(said, "mega"):
                y = torch.empty_like(batch.x)
                runs = mega.runs(batch, y)
                row["mega"] = ratio(runs, batch.floor_us)
                runs[0]()
                row["mega off"] = off(y, batch, bench.layers[0])
        with told(said, "torch"):
            row["torch"] = ratio([torch_pair(spec, batch, *weights) for weights in plain], batch.floor_us)
        if theirs is not None:
            calls: Runs = [partial(layer, batch.x, batch.topk_ids, batch.topk_weights.to(batch.x.dtype)) for layer in theirs]
            with torch.no_grad(), told(said, "transformers"):
                row["transformers off"] = max(off(call(), batch, weights) for call, weights in zip(calls, exact, strict=True))
                try:
                    row["transformers"] = graph_timing(calls).median_us / batch.floor_us
                except Exception:
                    row["transformers called"] = call_timing(calls[0], device=device).median_us / batch.floor_us
        rows.append(row)
    return f"{model} tp={tp} ep={ep}: {torch.cuda.get_device_name(device)}, {bench.ceilings.of('fp8_block')}; time / floor, balanced", rows


def main() -> None:
    """Print one line a bucket: graphmoe's whole layer by `auto`, then each peer, as time over the floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--buckets", default="1,2,4,8,16,32,64,128,256,512,1024")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    try:
        measured_gpu()
        title, rows = measure(options.model, options.tp, options.ep, options.buckets)
    except GraphMoEError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    console = make_console()
    console.print(title)
    for row in rows:
        cells = (f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
        console.print(" | ".join(cells), soft_wrap=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"title": title, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
