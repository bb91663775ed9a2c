"""`graphmoe inspect`: captured graphs read back and audited: kernels in order, what each reads and writes, and whether that is proven."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from graphmoe.audit import Audit, Region
from graphmoe.buckets import BucketLadder
from graphmoe.cli.console import make_console
from graphmoe.cli.files import write_json
from graphmoe.cli.gpu import measured_gpu
from graphmoe.cli.options import Buckets, Ep, Model, PathWish, Tp, WeightFormat, format_name, sharded
from graphmoe.cli.picture import draw
from graphmoe.cli.plot import figure_class
from graphmoe.errors import CaptureError, InvalidInput
from graphmoe.recipe import Recipe
from graphmoe.runtime import MoERuntime
from graphmoe.samples import unwritten_weights

SCHEMA = "graphmoe.audit/1"


def inspect(
    model: Model = "qwen3-30b-a3b",
    tp: Tp = 1,
    ep: Ep = 1,
    buckets: Buckets = "1,64",
    fmt: WeightFormat = "fp8_block",
    path: PathWish = "auto",
    layers: Annotated[int, typer.Option(help="layers of the runtime; each has its own graphs")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="write every audit there")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="draw the largest bucket's graph there")] = None,
) -> None:
    """Capture a layer's graphs, read them back, and prove that every address in them lies in the arena, the weights or the declared inputs."""
    console = make_console()
    if png is not None:
        figure_class()  # its absence is told before anything is captured
    if layers < 1:
        raise InvalidInput(f"--layers {layers} must be at least 1")
    device, name = measured_gpu()
    fmt = format_name(fmt)
    spec = sharded(model, tp, ep, fmt)
    weights = [unwritten_weights(spec, fmt, device=device) for _ in range(layers)]
    wish = path if path == "auto" else Recipe.of(path)
    with MoERuntime(spec, layers=weights, buckets=BucketLadder.of(buckets), path=wish) as rt:
        started = time.perf_counter()
        audits = rt.audit()
        seconds = time.perf_counter() - started
        regions = {key: rt.regions(*key) for key in audits}
        recipes = {bucket.tokens: bucket.recipe for bucket in rt.report().buckets}
    for (layer, tokens), audit in sorted(audits.items()):
        if layer == 0:
            console.print(table(audit, f"bucket {tokens}, {recipes[tokens]}"))
    found = [f"layer {layer}, bucket {tokens}: {finding}" for (layer, tokens), audit in sorted(audits.items()) for finding in audit.findings]
    console.print(
        f"{len(audits)} graphs on {name}, {sum(len(audit.accesses) for audit in audits.values())} addresses proven, {len(found)} findings; "
        f"reading and proving took {1e3 * seconds / len(audits):.1f} ms a graph"
    )
    for line in found:
        console.print(line)
    if json_path is not None:
        graphs = [{"layer": key[0], "bucket": key[1], **as_json(audit, regions[key])} for key, audit in sorted(audits.items())]
        write_json({"schema": SCHEMA, "graphs": graphs}, json_path, "audit")
    if png is not None:
        largest = max(tokens for _, tokens in audits)
        draw(audits[0, largest], regions[0, largest], f"{model}, bucket {largest}, {recipes[largest].split()[0]}", png)
    if found:
        raise CaptureError("; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else ""))


def table(audit: Audit, title: str) -> Table:
    """One graph: a line a node."""
    made = Table(title=title, title_justify="left")
    for column in ("node", "kernel", "grid", "threads", "shared KiB", "waits for", "reads", "writes"):
        made.add_column(column, justify="left" if column in ("kernel", "reads", "writes") else "right")
    for number, node in enumerate(audit.dump.nodes):
        waits = ", ".join(f"{edge.source}{' programmatic' if edge.programmatic else ''}" for edge in audit.dump.edges if edge.target == number)
        own = [access for access in audit.accesses if access.node == number]
        reads, writes = (", ".join(dict.fromkeys(one.region for one in own if getattr(one, does))) for does in ("reads", "writes"))
        if node.kernel is None:
            made.add_row(str(number), f"({node.kind})", "", "", "", waits, reads, writes)
            continue
        grid = " x ".join(str(size) for size in node.kernel.grid)
        shared = f"{node.kernel.shared_bytes / 2**10:.1f}"
        made.add_row(str(number), node.kernel.short_name, grid, str(node.kernel.threads), shared, waits, reads, writes)
    return made


def as_json(audit: Audit, regions: list[Region]) -> dict[str, Any]:
    """Plain data of one graph; parameters as hexadecimal bytes."""
    nodes = [
        {"kind": node.kind}
        if node.kernel is None
        else {
            "kind": node.kind, "name": node.kernel.short_name, "grid": node.kernel.grid, "block": node.kernel.block,
            "shared_bytes": node.kernel.shared_bytes, "parameters": [value.hex() for value in node.kernel.parameters],
        }
        for node in audit.dump.nodes
    ]  # fmt: skip
    return {
        "nodes": nodes,
        "edges": [asdict(edge) for edge in audit.dump.edges],
        "regions": [asdict(region) for region in regions],
        "accesses": [asdict(access) for access in audit.accesses],
        "findings": [asdict(finding) for finding in audit.findings],
    }
