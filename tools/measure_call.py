"""What a call costs on the host: `python -m tools.measure_call`, microseconds from Python beside a bare `torch.cuda.CUDAGraph.replay`.

Each row is the median over batches of calls that are launched without waiting; the queue of the device is emptied between batches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.table import Table

from graphmoe import MoERuntime
from graphmoe.cli.console import make_console
from graphmoe.cli.gpu import measured_gpu
from graphmoe.cli.options import sharded
from graphmoe.provenance import provenance
from graphmoe.samples import random_inputs, random_weights, routing

_CALLS, _BATCHES = 20, 101


def host_microseconds(call: Callable[[], object]) -> float:
    """Median host time of one of `_CALLS` calls in a row."""
    samples = []
    for _ in range(_BATCHES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        samples.append((time.perf_counter() - start) / _CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, default=1)
    options = parser.parse_args()
    device, name = measured_gpu()
    spec = sharded(options.model, 1, 1, "fp8_block")
    weights = random_weights(spec, "fp8_block", device=device)
    x, router = random_inputs(spec, options.tokens, device=device)
    ids = routing("balanced", spec, options.tokens, seed=0, device=device)
    out = torch.empty_like(x)
    with MoERuntime(spec, weights, buckets=[options.tokens], progress=False) as rt:
        bucket = rt.plan.ladder.bucket_for(options.tokens)
        with rt._core.opened() as built:
            graph = built.graphs[0, bucket].graph
            watch = built.watches[0]
        rows = {
            "torch.cuda.CUDAGraph.replay": graph.replay,
            "rt.replay(bucket), inputs written by the caller": lambda: rt.replay(bucket),
            "rt(x, ids, weights), a view of the output": lambda: rt(x, ids, router),
            "rt(x, ids, weights, out=)": lambda: rt(x, ids, router, out=out),
            "of which: have the weights moved?": watch.check,
        }
        table = Table("call", "us on the host", "over bare replay", title=f"{options.model}, T = {options.tokens}, on {name}")
        bare = host_microseconds(rows["torch.cuda.CUDAGraph.replay"])
        for label, call in rows.items():
            took = host_microseconds(call)
            table.add_row(label, f"{took:.1f}", f"{took - bare:+.1f}" if "of which" not in label else "")
    console = make_console()
    console.print(table)
    console.print(str(provenance(device)))


if __name__ == "__main__":
    main()
