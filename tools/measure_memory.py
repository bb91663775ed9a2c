#!/usr/bin/env python3
"""Peak host memory of converting and loading a checkpoint with a real model's shapes, against the bounds that the code states.

    PYTHONPATH=. python3 tools/measure_memory.py [--layers 4] [--model qwen3-30b-a3b] [--dir FOLDER]

Writes a block-FP8 checkpoint of random payload, one file a layer, and measures each step in a process of its own: the highest anonymous memory
(RssAnon, which leaves out the pages of mapped files) above what the process held when the step began.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.table import Table

from graphmoe import ExpertWeights, MoESpec, named_spec
from graphmoe.cli.console import make_console
from graphmoe.convert import convert_checkpoint
from graphmoe.formats import BLOCK


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def peak_of(step: Callable[[], object]) -> int:
    """Highest anonymous memory during `step`, above what was held before; sampled every millisecond."""
    base, peak, running = anonymous_bytes(), 0, True

    def sample() -> None:
        nonlocal peak
        while running:
            peak = max(peak, anonymous_bytes())
            time.sleep(0.001)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        step()
    finally:
        running = False
        sampler.join()
    return peak - base


def write(folder: Path, spec: MoESpec, layers: int) -> None:
    e, h, i = spec.num_experts, spec.hidden_size, spec.intermediate_size
    for layer in range(layers):
        tensors = []
        for rows, columns in ((2 * i, h), (h, i)):
            payload = torch.randint(0, 127, (e, rows, columns), dtype=torch.uint8)  # every code but NaN and the negative ones
            tensors += [payload.view(torch.float8_e4m3fn), torch.rand(e, rows // BLOCK, columns // BLOCK) * 0.01 + 1e-4]
        ExpertWeights.from_fp8(spec, *tensors).save(folder, layer)


def measure(step: str, source: Path, target: Path, spec: MoESpec) -> int:
    if step == "convert":
        return peak_of(lambda: convert_checkpoint(source, target, "ue8m0"))
    return peak_of(lambda: ExpertWeights.load(target, spec, layer=0, progress=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dir", type=Path, help="keep the checkpoints there")
    parser.add_argument("--step", choices=("convert", "load"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    spec = named_spec(options.model)
    folder = options.dir or Path(tempfile.mkdtemp(prefix="graphmoe-"))
    source, target = folder / "fp8", folder / "ue8m0"
    if options.step:
        print(measure(options.step, source, target, spec))
        return
    write(source, spec, options.layers)
    largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
    matrix = 2 * spec.intermediate_size * spec.hidden_size
    table = Table(title=f"{options.layers} layers of {options.model}, one file a layer, {largest / 2**20:.0f} MiB each", title_justify="left")
    for column in ("step", "peak MiB", "bound MiB", "bound"):
        table.add_column(column, justify="left" if column in ("step", "bound") else "right")
    bounds = {
        "convert": (2 * largest + 64 * matrix, "twice the largest file of the result + 64 bytes an element of one matrix"),
        "load": (largest + 4 * matrix, "the layer + one projection and its shard"),
    }
    failed = False
    for step, (bound, what) in bounds.items():
        command = [sys.executable, __file__, "--model", options.model, "--dir", str(folder), "--step", step]
        peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
        failed |= peak > bound
        table.add_row(step, f"{peak / 2**20:.1f}", f"{bound / 2**20:.1f}", what)
    make_console().print(table)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
