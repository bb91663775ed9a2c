#!/usr/bin/env python3
"""Peak host memory of converting and loading a checkpoint with a real model's shapes, against the bounds that the code states.

    PYTHONPATH=. python3 tools/measure_memory.py [--layers 1] [--model qwen3-30b-a3b] [--dir FOLDER]

Writes checkpoints of random payload, one file a layer: block FP8 and BF16, per expert and fused. Measures each step in a process of its own: the
highest anonymous memory (RssAnon, which leaves out the pages of mapped files) above what the process held when the step began.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from graphmoe import ExpertWeights, MoESpec, named_spec
from graphmoe.checkpoint import SCALE_SUFFIX, experts_prefix
from graphmoe.cli.console import make_console
from graphmoe.convert import convert_checkpoint, peak_bytes
from graphmoe.formats import BLOCK

SOURCES = ("fp8", "bf16", "fp8 fused", "bf16 fused")
STEPS = ("convert to ue8m0", "convert to fp8_block", "convert to bf16", "load")


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


def write(folder: Path, spec: MoESpec, layers: int, source: str) -> None:
    e, h, i = spec.num_experts, spec.hidden_size, spec.intermediate_size
    folder.mkdir(parents=True)
    for layer in range(layers):
        tensors: dict[str, Tensor] = {}
        for name, rows, columns in (("gate_up_proj", 2 * i, h), ("down_proj", h, i)):
            key = experts_prefix(layer) + name
            if source.startswith("bf16"):
                tensors[key] = torch.empty(e, rows, columns, dtype=torch.bfloat16).normal_()
                continue
            payload = torch.randint(0, 127, (e, rows, columns), dtype=torch.uint8)  # every code but NaN and the negative ones
            tensors[key] = payload.view(torch.float8_e4m3fn)
            tensors[key + SCALE_SUFFIX] = torch.rand(e, rows // BLOCK, columns // BLOCK) * 0.01 + 1e-4
        if source.endswith("fused"):
            save_file(tensors, folder / f"layer-{layer}.safetensors")
        elif source == "bf16":
            ExpertWeights.from_bf16(spec, *tensors.values(), fmt="bf16").save(folder, layer)
        else:
            ExpertWeights.from_fp8(spec, *tensors.values()).save(folder, layer)


def measure(step: str, source: Path, target: Path, spec: MoESpec) -> int:
    if step == "load":
        return peak_of(lambda: ExpertWeights.load(source, spec, layer=0, progress=False))
    return peak_of(lambda: convert_checkpoint(source, target, step.split()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="folder for the checkpoints; its folders `source` and `target` are made, and removed")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    spec = named_spec(options.model)
    folder = options.dir or Path(tempfile.mkdtemp(prefix="graphmoe-"))
    source, target = folder / "source", folder / "target"
    if options.step:
        print(measure(options.step, source, target, spec))
        return
    matrix = 2 * spec.intermediate_size * spec.hidden_size
    table = Table(title=f"{options.layers} layers of {options.model}, one file a layer", title_justify="left")
    for column in ("source", "step", "file MiB", "peak MiB", "bound MiB"):
        table.add_column(column, justify="left" if column in ("source", "step") else "right")
    failed = False
    for kind in SOURCES:
        write(source, spec, options.layers, kind)
        largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
        for step in STEPS:
            bound = largest + 4 * matrix if step == "load" else peak_bytes(max(spec.hidden_size, spec.intermediate_size))
            command = [sys.executable, __file__, "--model", options.model, "--dir", str(folder), "--step", step]
            peak = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1])
            failed |= peak > bound
            table.add_row(kind, step, *(f"{size / 2**20:.1f}" for size in (largest, peak, bound)))
            shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(source)
    make_console().print(table)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
