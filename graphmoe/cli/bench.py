"""`graphmoe bench`: the whole layer per bucket against the floor that this GPU allows; a table, JSON and a plot."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from graphmoe.buckets import BucketLadder
from graphmoe.cli.console import make_console, make_progress
from graphmoe.cli.files import write_json
from graphmoe.cli.gpu import measured_gpu
from graphmoe.cli.options import Buckets, Ep, Model, Tp, WeightFormat, format_name, sharded
from graphmoe.cli.plot import figure_class, plot
from graphmoe.device import arch_of
from graphmoe.errors import InvalidInput
from graphmoe.planner import plan as make_plan
from graphmoe.profile import find_profile, finite_number
from graphmoe.provenance import provenance
from graphmoe.recipe import Recipe
from graphmoe.trial import Batch, Bench, Trial

SCHEMA = "graphmoe.bench/1"
_COMPARED = ("direct", "gathered", "psum", "masked")
_DIRECT_TOKENS = 16


@dataclass(frozen=True)
class Row:
    """One recipe on one bucket and routing; times in microseconds. `floor_us`: see `graphmoe.measure.Ceilings`."""

    tokens: int
    routing: str
    path: str
    recipe: str
    chosen: bool
    graph_us: float
    spread_us: float
    floor_us: float
    call_us: float | None
    launches: int
    arena_bytes: int
    worst_row: float
    active_experts: int


def bench(
    model: Model = "qwen3-30b-a3b",
    tp: Tp = 1,
    ep: Ep = 1,
    buckets: Buckets = "1,2,4,8,16,32,64,128,256,512,1024",
    fmt: WeightFormat = "fp8_block",
    others: Annotated[
        bool, typer.Option("--others", help="time direct (to 16 tokens), gathered, psum and masked with their default options, too")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="write what was measured there")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="draw time against tokens there")] = None,
    load: Annotated[
        Path | None,
        typer.Option("--load", help="draw and print an earlier --json instead of measuring; options of a measurement are not looked at then"),
    ] = None,
) -> None:
    """Measure the card's ceilings, then each bucket's whole layer (x, ids, weights in, y out) as a CUDA graph, L2-cold."""
    console = make_console()
    if png is not None:
        figure_class()  # its absence is told before minutes of measuring
    measured = _read(load) if load is not None else _measure(model, tp, ep, buckets, fmt, others)
    console.print(f"{measured['title']}: {measured['provenance']['device']}, {measured['ceilings']}")
    console.print(_table([Row(**row) for row in measured["rows"]]))
    console.print(
        "floor: reading the active experts' weights once at the measured bandwidth, or their products at the measured rate; * auto's choice"
    )
    if json_path is not None:
        write_json(measured, json_path, "measurement")
    if png is not None:
        plot(measured["title"], [Row(**row) for row in measured["rows"]], png)


def _measure(model: str, tp: int, ep: int, buckets: str, fmt: str, others: bool) -> dict[str, Any]:
    device, name = measured_gpu()
    fmt = format_name(fmt)
    spec, ladder = sharded(model, tp, ep, fmt), BucketLadder.of(buckets)
    profile = find_profile(spec, fmt, name)
    chosen = {bucket.tokens: bucket.recipe for bucket in make_plan(spec, ladder, fmt=fmt, arch=arch_of(device), profile=profile).buckets}
    bench = Bench(spec, fmt, device)
    rows: list[Row] = []
    with make_progress() as bar:
        task = bar.add_task("measuring", total=len(chosen))
        for tokens, recipe in chosen.items():
            batches = bench.batches(tokens)
            rivals = [Recipe(path) for path in _COMPARED if others and path != recipe.path and (path != "direct" or tokens <= _DIRECT_TOKENS)]
            for candidate in (recipe, *rivals):
                rows += _rows(bench.run(candidate, batches, calls=candidate == recipe), batches, tokens, candidate == recipe)
            bar.advance(task)
    ceilings = bench.ceilings.of(fmt)
    facts = {**provenance(device), "date": f"{datetime.now(UTC):%Y-%m-%d}", "profile": profile.title if profile else "none"}
    title = f"{model}{f' tp={tp}' if tp > 1 else ''}{f' ep={ep}' if ep > 1 else ''}, {fmt}"
    return {"schema": SCHEMA, "title": title, "provenance": facts, "ceilings": ceilings, "rows": [asdict(row) for row in rows]}


def _rows(trial: Trial, batches: list[Batch], tokens: int, chosen: bool) -> list[Row]:
    if trial.refused:
        print(f"T={tokens} {trial.recipe}: {trial.refused}", file=sys.stderr)
    active = {batch.name: sum(count > 0 for count in batch.counts) for batch in batches}
    call = None if trial.call is None else trial.call.median_us  # of the last routing
    return [
        Row(
            tokens, name, trial.recipe.path, str(trial.recipe), chosen, time.median_us, time.spread_us, floor,
            call if name == batches[-1].name else None,
            trial.launches, trial.arena_bytes, trial.worst_row, active[name],
        )
        for name, time, floor in trial.times
    ]  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    try:
        measured: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not a measurement of graphmoe bench: {error}") from error
    if not isinstance(measured, dict) or measured.get("schema") != SCHEMA:
        raise InvalidInput(f"{path} has no schema {SCHEMA!r}: it is not a measurement of this graphmoe bench")
    try:
        for row in measured["rows"]:
            _judge(Row(**row))
        missing = {"title", "ceilings", "provenance"} - measured.keys() or {"device"} - measured["provenance"].keys()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"{path} lacks or misspells a field of a measurement: {error}") from error
    if missing:
        raise InvalidInput(f"{path} lacks {', '.join(sorted(missing))} of a measurement")
    return measured


def _judge(row: Row) -> None:
    """Raise ValueError unless a row's fields are what they are called."""
    for name in ("graph_us", "floor_us", "spread_us", "worst_row", "call_us"):
        value = getattr(row, name)
        if name != "call_us" or value is not None:
            finite_number(name, value, positive=name in ("graph_us", "floor_us"))
    for name in ("tokens", "launches", "arena_bytes", "active_experts"):
        if type(getattr(row, name)) is not int or getattr(row, name) < (1 if name == "tokens" else 0):
            raise ValueError(f"{name}={getattr(row, name)!r} must be a count")
    for name in ("routing", "path", "recipe"):
        if not isinstance(getattr(row, name), str):
            raise ValueError(f"{name}={getattr(row, name)!r} must be a name")


def _table(rows: list[Row]) -> Table:
    table = Table(title="graph: one replay of the layer; call: staging and launch from Python, too", title_justify="left")
    for column in ("T", "routing", "experts", "path", "graph us", "+-", "graph/floor", "call us", "tokens/ms", "kernels", "arena MiB", "worst row"):
        table.add_column(column, justify="left" if column in ("routing", "path") else "right")
    for row in rows:
        call = "" if row.call_us is None else f"{row.call_us:.1f}"
        table.add_row(
            str(row.tokens), row.routing, str(row.active_experts), ("* " if row.chosen else "  ") + row.path, f"{row.graph_us:.1f}",
            f"{row.spread_us:.1f}", f"{row.graph_us / row.floor_us:.2f}", call, f"{row.tokens / row.graph_us * 1e3:.0f}",
            str(row.launches), f"{row.arena_bytes / 2**20:.1f}", f"{row.worst_row:.4f}",
        )  # fmt: skip
    return table
