"""`graphmoe plan`: rows and bytes of every bucket, proven and counted on any machine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from graphmoe import bounds
from graphmoe.buckets import BucketLadder
from graphmoe.cli.console import make_console
from graphmoe.cli.options import Buckets, Ep, Model, PathWish, Tp, WeightFormat, format_name, model_spec, short
from graphmoe.errors import PlanError
from graphmoe.formats import get_format
from graphmoe.layout import RowLayout
from graphmoe.paths.grouped import buffers_of
from graphmoe.planner import BucketPlan, Plan, place
from graphmoe.planner import plan as make_plan
from graphmoe.profile import Profile, find_profile, profiled_devices
from graphmoe.recipe import Recipe
from graphmoe.spec import MoESpec

_DEVICE_OF_ARCH = {"sm90": "NVIDIA H200"}
_LEGEND = (
    "64, 128: rows if every expert's segment is aligned to that many (block_e); distinct, arbitrary: the experts that a token names",
    "masked slots: rows of each expert in path masked; chosen: this plan's path and rows; MiB: inputs, output and scratch of that bucket alone",
)
_COMPARED = {
    "masked": Recipe("masked"),
    "compact 64": Recipe("compact", block_e=64),
    "compact 128": Recipe("compact", block_e=128),
    "psum 64": Recipe("psum", block_e=64),
}


def plan(
    model: Model = "qwen3-30b-a3b",
    tp: Tp = 1,
    ep: Ep = 1,
    buckets: Buckets = "vllm",
    fmt: WeightFormat = "fp8_block",
    path: PathWish = "auto",
    arch: Annotated[str, typer.Option(help="sm90, sm100 (format ue8m0 or bf16) or cpu")] = "sm90",
    device: Annotated[str | None, typer.Option(help="whose profile chooses, as torch names it, or none; NVIDIA H200 by default for sm90")] = None,
    max_arena_gib: Annotated[float | None, typer.Option(help="refuse a larger arena")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the plan there")] = None,
) -> None:
    """Print every bucket's row bounds and arena bytes, per path and beside looser bounds that serving engines use."""
    fmt = format_name(fmt)
    block = get_format(fmt).divisor
    whole = model_spec(model)
    spec = whole.shard(tp=tp, ep=ep, block=block)
    ladder = BucketLadder.of(buckets)
    limit = None if max_arena_gib is None else _bytes_of(max_arena_gib)
    device_name = _DEVICE_OF_ARCH.get(arch, "") if device is None else "" if device.lower() == "none" else device
    profile = find_profile(spec, fmt, device_name) if device_name else None
    made = make_plan(spec, ladder, fmt=fmt, arch=arch, recipes=path, max_arena_bytes=limit, profile=profile)
    alternatives = {name: make_plan(spec, ladder, fmt=fmt, arch=arch, recipes=recipe) for name, recipe in _COMPARED.items()}
    if json_path is not None:
        _write(made, json_path)
    console = make_console()
    own = whole.intermediate_size // tp
    padded = "" if own == spec.intermediate_size else f" ({own} of {whole.intermediate_size} a rank, stored in whole blocks of {block})"
    console.print(
        f"{model} tp={tp} ep={ep}: E={spec.num_local_experts} of {spec.num_experts}, K={spec.top_k}, H={spec.hidden_size}, "
        f"I={spec.intermediate_size}{padded}, {fmt}"
    )
    console.print(_rows_table(spec, made))
    console.print(_bytes_table(spec, made))
    for line in (*_LEGEND, *_summary(spec, made, alternatives, profile), _who_chose(made, device_name, profile)):
        console.print(line)
    if json_path is not None:
        console.print(f"plan written to {json_path}")


def _write(made: Plan, path: Path) -> None:
    try:
        path.write_text(json.dumps(made.to_json(), indent=1))
    except OSError as error:
        raise PlanError(f"the plan cannot be written to {path}: {error.strerror}") from error


def _bytes_of(gib: float) -> int:
    if not (math.isfinite(gib) and gib > 0):
        raise PlanError(f"--max-arena-gib {gib} must be a finite number above 0")
    return int(gib * 2**30)


def _rows_table(spec: MoESpec, made: Plan) -> Table:
    table = Table(title="Row bounds: no routing needs more", title_justify="left")
    for column in (
        "bucket",
        "64 distinct",
        "64 arbitrary",
        "128 distinct",
        "128 arbitrary",
        "loose, 128",
        "masked slots",
        "loose slots",
        "chosen",
    ):
        table.add_column(column, justify="right")
    t_k_e = (spec.top_k, spec.num_local_experts)
    for bucket in made.buckets:
        t = bucket.tokens
        rows = [bounds.compact_rows(t, *t_k_e, b, distinct=distinct) for b in (64, 128) for distinct in (True, False)]
        rows += [bounds.compact_rows_padded_each(t, *t_k_e, 128), bounds.masked_slots(t, spec.top_k, 128), bounds.masked_slots_padded_256(t)]
        table.add_row(str(t), *map(str, rows), f"{short(bucket.recipe)}: {bucket.rows}")
    return table


def _bytes_table(spec: MoESpec, made: Plan) -> Table:
    table = Table(title="Arena MiB of each bucket by itself", title_justify="left")
    for column in ("bucket", *_COMPARED, "loose compact 128", "loose masked", "chosen"):
        table.add_column(column, justify="right")
    for bucket in made.buckets:
        alone = [make_plan(spec, [bucket.tokens], fmt=made.fmt, arch=made.arch, recipes=recipe) for recipe in (*_COMPARED.values(), bucket.recipe)]
        loose = [_loose_bytes(spec, alone[0], kind) for kind in ("compact", "masked")]
        *ours, chosen = [plan.arena_bytes for plan in alone]
        table.add_row(str(bucket.tokens), *(_mib(nbytes) for nbytes in (*ours, *loose, chosen)))
    return table


def _summary(spec: MoESpec, made: Plan, alternatives: dict[str, Plan], profile: Profile | None) -> list[str]:
    top = made.buckets[-1]
    args = (top.tokens, spec.top_k, spec.num_local_experts, 128)
    distinct, arbitrary = bounds.compact_blocks(*args), bounds.compact_blocks(*args, distinct=False)
    totals = ", ".join(f"{name} {_mib(plan.arena_bytes)} MiB" for name, plan in alternatives.items())
    loose = ", ".join(f"{kind} {_mib(_loose_bytes(spec, made, kind))} MiB" for kind in ("compact", "masked"))
    return [
        f"largest bucket {top.tokens}, block_e 128: {distinct} blocks for distinct experts, {arbitrary} for arbitrary ones",
        f"arena for the whole ladder: {totals}; with the looser bounds: {loose}",
        "loose: compact T*K + E*(b-1) rows (vLLM before its DeepGEMM permutation), masked (T // 256 + 1) * 256 slots (SGLang), in our buffers",
        f"this plan: {_mib(made.arena_bytes)} MiB for {len(made.buckets)} buckets and any number of layers",
        *_recipes(made, profile),
        f"fingerprint {made.fingerprint[:16]}",
    ]


def _recipes(made: Plan, profile: Profile | None) -> Iterator[str]:
    """Runs of buckets of one recipe, each with who chose it; a rule that states numbers states those of the largest bucket."""
    for recipe, run in groupby(made.buckets, key=lambda bucket: bucket.recipe):
        buckets = list(run)
        first, last = buckets[0], buckets[-1]
        sizes = f"bucket {first.tokens}" if first is last else f"buckets {first.tokens} to {last.tokens}"
        yield f"{sizes}: {recipe} ({profile.title if profile and _chose(profile, last) else last.rule})"


def _chose(profile: Profile, bucket: BucketPlan) -> bool:
    return bucket.rule.startswith(f"{profile.title}: ")


def _who_chose(made: Plan, device_name: str, profile: Profile | None) -> str:
    """Whether a profile spoke, for how many buckets, and how far from the floor it measured them."""
    if profile is None:
        if not device_name:
            return "no device, no profile"
        return f"no profile of {device_name} for this shape in {made.fmt}; devices with profiles: {', '.join(profiled_devices())}"
    chosen = {bucket.tokens for bucket in made.buckets if _chose(profile, bucket)}
    ratios = [record.ratio for record in profile.buckets if record.tokens in chosen]
    measured = f"; measured at {min(ratios):.2f} to {max(ratios):.2f} of the floor" if ratios else ""
    return f"{profile.title} chose {len(chosen)} of {len(made.buckets)} buckets{measured}"


def _loose_bytes(spec: MoESpec, made: Plan, kind: str) -> int:
    """Arena bytes of the largest bucket with a looser row bound, under this plan's own buffers and sharing of bytes."""
    e, tokens = spec.num_local_experts, made.ladder.largest
    if kind == "masked":
        layout = RowLayout("masked", e, 128, e, bounds.masked_slots_padded_256(tokens))
    else:
        layout = RowLayout("compact", e, 128, 1, bounds.compact_rows_padded_each(tokens, spec.top_k, e, 128))
    placed = place(buffers_of(layout, spec, get_format(made.fmt).on(made.arch), tokens), made.static_bytes, 0)
    return max(buffer.offset + buffer.nbytes for buffer in placed)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"
