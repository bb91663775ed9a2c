"""`graphmoe demo`: the main job on this machine, checked against the dense oracle at every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor

from graphmoe import bounds, measure
from graphmoe.cli.console import make_console
from graphmoe.cli.options import Buckets, PathWish, short
from graphmoe.cli.toy_model import LAYERS, SPEC, ToyModel, write_checkpoint
from graphmoe.device import resolve_device
from graphmoe.errors import InvalidInput
from graphmoe.paths import rounding_of
from graphmoe.planner import BucketPlan
from graphmoe.reference import moe_layer, row_errors, row_limit
from graphmoe.runtime import MoERuntime
from graphmoe.weights import ExpertWeights

_DEFAULT_TEXT = Path(bounds.__file__)
_LONGEST = 64


@dataclass
class _Seen:
    """What the decode loop met in one bucket."""

    steps: int = 0
    rows_used: int = 0
    worst_row: float = 0.0
    last_batch: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False)


def demo(
    text: Annotated[Path, typer.Option(help="a text file; its bytes are cut into sequences of growing length")] = _DEFAULT_TEXT,
    directory: Annotated[Path, typer.Option("--dir", help="where the small checkpoint is kept")] = Path("~/.cache/graphmoe/demo"),
    buckets: Buckets = "1,2,4,8,16,32",
    path: PathWish = "auto",
    device: Annotated[str, typer.Option(help="cuda or cpu; the GPU if there is one")] = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Load a small block-FP8 MoE checkpoint, run a decode loop over a text file through the buckets, and check every step."""
    console = make_console()
    where = resolve_device(device)
    if where.type == "cpu":
        torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    folder = directory.expanduser() / f"e{SPEC.num_experts}-h{SPEC.hidden_size}-i{SPEC.intermediate_size}-l{LAYERS}"
    console.print(f"checkpoint {'written to' if write_checkpoint(folder) else 'found in'} {folder}")
    layers = [ExpertWeights.load(folder, SPEC, layer, device=where) for layer in range(LAYERS)]
    with MoERuntime(SPEC, layers=layers, buckets=buckets, path=path, device=where) as runtime:
        sequences = _sequences(text, runtime.plan.ladder.largest)
        console.print(f"{len(sequences)} sequences of {min(map(len, sequences))} to {max(map(len, sequences))} bytes from {text}")
        if runtime.device.type == "cpu":
            console.print("no GPU in use: graphs are emulated, the same step runs on the same static buffers with the kernels' torch twins")
        seen = _decode(runtime, layers, sequences)
        console.print(_table(runtime, seen))
        for line in _legend(runtime):
            console.print(line)
        limits = {tokens: row_limit(runtime.plan.fmt, rounding_of(runtime.plan.bucket(tokens).recipe)) for tokens in seen}
        closest = max(seen, key=lambda tokens: seen[tokens].worst_row / limits[tokens])
        worst, limit = seen[closest].worst_row, limits[closest]
        console.print(
            f"{sum(one.steps for one in seen.values())} layer steps checked row by row: closest to its limit is bucket {closest}, "
            f"off by {worst:.4f} of its norm, limit {limit}"
        )
        if not worst <= limit:
            console.print("MISMATCH: the runtime and the dense oracle disagree", style="bold red")
            raise typer.Exit(1)
        console.print("every step is within the limit of the dense oracle")


def _sequences(text: Path, most: int) -> list[bytes]:
    """Consecutive pieces of the text, each longer than the last, so that they finish at different steps."""
    try:
        rest = text.expanduser().read_bytes()
    except OSError as error:
        raise InvalidInput(f"--text {text} cannot be read: {error}") from error
    for longest in range(_LONGEST, 0, -1):
        ends = [0, *accumulate(max(1, longest * (index + 1) // most) for index in range(most))]
        if ends[-1] <= len(rest):
            return [rest[first:last] for first, last in pairwise(ends)]
    raise InvalidInput(f"--text {text} has {len(rest)} bytes, {most} sequences need at least one each; give a longer text or smaller buckets")


def _decode(runtime: MoERuntime, layers: list[ExpertWeights], sequences: list[bytes]) -> dict[int, _Seen]:
    """Feed every sequence byte by byte; finished ones leave, so the batch shrinks through the buckets."""
    device = runtime.device
    model = ToyModel(device)
    seen: dict[int, _Seen] = {}
    memory = torch.zeros(LAYERS, len(sequences), SPEC.hidden_size, device=device)
    for step in range(max(map(len, sequences))):
        alive = [index for index, sequence in enumerate(sequences) if step < len(sequence)]
        rows = torch.tensor(alive, device=device)
        hidden = model.embedding[torch.tensor([sequences[index][step] for index in alive], device=device)]
        for layer in range(LAYERS):
            memory[layer, rows] = 0.7 * memory[layer, rows] + 0.3 * hidden
            x, ids, weights = model.route(layer, memory[layer, rows] + hidden)
            y = runtime.layers[layer](x, ids, weights)
            bucket = runtime.plan.bucket(len(alive))
            one = seen.setdefault(bucket.tokens, _Seen())
            one.steps += 1
            one.rows_used = max(one.rows_used, _rows_used(bucket, ids))
            want = moe_layer(x, ids, weights, layers[layer], rounding=rounding_of(bucket.recipe))
            one.worst_row = max(one.worst_row, float(row_errors(y, want).max()))
            one.last_batch = (x, ids, weights)
            hidden = hidden + y.float()
        model.next_bytes(hidden)
    return seen


def _rows_used(bucket: BucketPlan, ids: Tensor) -> int:
    """Rows of the bucket's layout that a routing occupies, alignment included; paths without alignment have a row an assignment."""
    counts = bounds.expert_counts(ids.cpu(), SPEC.num_local_experts)
    if "row_tile" in bucket.options:
        return SPEC.num_local_experts * bounds.round_up(max(counts), bucket.options["row_tile"])
    if "block_e" in bucket.options:
        return bucket.options["block_e"] * bounds.blocks_used(counts, bucket.options["block_e"])
    return sum(counts)


def _table(runtime: MoERuntime, seen: dict[int, _Seen]) -> Table:
    report = {bucket.tokens: bucket for bucket in runtime.report().buckets}
    emulated = runtime.device.type == "cpu"
    table = Table(title=f"{LAYERS} layers, {runtime.plan.fmt}, on {runtime.device}", title_justify="left")
    columns = (
        "bucket",
        "path",
        "rows bound",
        "witness",
        "used",
        "KiB",
        "kernels",
        "step us" if emulated else "graph us",
        "call us",
        "steps",
        "worst row",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "path" else "right")
    for bucket in runtime.plan.buckets:
        one = seen.get(bucket.tokens)
        if one is None or one.last_batch is None:
            continue
        align = bucket.options.get("block_e", bucket.tokens)
        witness = torch.from_numpy(bounds.worst_case_topk_ids(bucket.tokens, SPEC.top_k, SPEC.num_local_experts, align))
        if bucket.recipe.path == "masked":
            witness = witness[:, :1] * 0  # one expert receives every token
        graph, call = _timings(runtime, bucket.tokens, one.last_batch)
        table.add_row(
            str(bucket.tokens), short(bucket.recipe), str(bucket.rows), str(_rows_used(bucket, witness)), str(one.rows_used),
            f"{runtime.plan.bucket_bytes(bucket) / 1024:.0f}", str(report[bucket.tokens].kernels), str(graph), str(call), str(one.steps),
            f"{one.worst_row:.4f}",
        )  # fmt: skip
    return table


def _legend(runtime: MoERuntime) -> tuple[str, ...]:
    """What the table's columns mean."""
    step = "step us: one layer's step" if runtime.device.type == "cpu" else "graph us: one layer's graph"
    return (
        "rows bound: activation rows that no routing exceeds; witness: what the worst routing fills; used: the most that this text filled",
        f"KiB: arena up to the end of this bucket's buffers; kernels: launches of one step on a GPU; {step}; call us: with the copy of its inputs",
        "steps: layer steps that ran in this bucket; worst row: largest error of one token's output against the oracle, over that output's norm",
    )


def _timings(runtime: MoERuntime, bucket: int, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[measure.Timing, measure.Timing]:
    """Time of a replay and of a whole call, per layer."""
    call = measure.call_timing(lambda: [layer(*batch) for layer in runtime.layers], device=runtime.device, repeats=3, calls=3)
    replays: list[Callable[[], object]] = [lambda layer=layer: layer.replay(bucket) for layer in runtime.layers]  # type: ignore[misc]
    if runtime.device.type == "cpu":
        graph = measure.call_timing(lambda: [replay() for replay in replays], device=runtime.device, repeats=3, calls=3)
        return graph / len(replays), call / len(replays)
    return measure.graph_timing(replays), call / len(replays)
