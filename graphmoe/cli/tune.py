"""`graphmoe tune`: measure every bucket's fastest recipe on this GPU and write the capture profile."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from graphmoe.buckets import BucketLadder
from graphmoe.cli.console import make_console, make_progress
from graphmoe.cli.gpu import measured_gpu
from graphmoe.cli.options import Buckets, Ep, Model, Tp, WeightFormat, format_name, model_spec, sharded
from graphmoe.errors import PlanError
from graphmoe.profile import BucketRecord, Profile, device_slug, kernels_version, profiles_root, shape_of
from graphmoe.provenance import provenance
from graphmoe.spec import MoESpec, model_names, named_spec
from graphmoe.trial import Bench, Trial
from graphmoe.tuning import compile_ahead
from graphmoe.tuning import tune as tune_bucket


def tune(
    model: Model = "qwen3-30b-a3b",
    tp: Tp = 1,
    ep: Ep = 1,
    buckets: Buckets = "1,2,4,8,16,32,64,128,256,512,1024",
    fmt: WeightFormat = "fp8_block",
    budget: Annotated[float, typer.Option(help="seconds; no bucket is begun after them")] = 600.0,
    out: Annotated[Path | None, typer.Option(help="folder of device folders; the shipped profiles' by default")] = None,
    again: Annotated[bool, typer.Option("--again", help="measure buckets that the profile holds already, too")] = False,
) -> None:
    """Check and time candidate recipes per bucket; resumes from the profile that an earlier run wrote, and says what is left."""
    started = time.perf_counter()
    device, name = measured_gpu()
    fmt = format_name(fmt)
    spec, sizes = sharded(model, tp, ep, fmt), BucketLadder.of(buckets).sizes
    file = (out or profiles_root()) / device_slug(name) / f"{_slug(model, tp, ep, fmt)}.json"
    command = shlex.join(["graphmoe", "tune", "--model", model, "--tp", str(tp), "--ep", str(ep), "--format", fmt])
    console, records = make_console(), _earlier(file, spec, fmt, name, provenance(device), again)
    left = [tokens for tokens in sizes if again or tokens not in records]
    console.print(f"{model} tp={tp} ep={ep} {fmt} on {name}: {len(left)} of {len(sizes)} buckets to measure; profile {file}")
    if left and budget > 0:
        with make_progress() as bar:
            task = bar.add_task("compiling", total=None)
            jobs = compile_ahead(spec, fmt, left, done=lambda: bar.advance(task))
            console.print(f"compiled {jobs} recipes by parallel processes, {time.perf_counter() - started:.0f} s so far")
            bench = Bench(spec, fmt, device)
            ceilings = bench.ceilings.of(fmt)
            console.print(f"ceilings: {ceilings}")
            for tokens in list(left):
                if time.perf_counter() - started > budget:
                    break
                bar.update(task, description=f"bucket {tokens}")
                record, trials = tune_bucket(bench, tokens, seen=lambda _: bar.advance(task))
                records[tokens] = record
                left.remove(tokens)
                paths = {one.recipe.path for one in records.values()}
                made = f"{command} --buckets {','.join(map(str, sorted(records)))}"
                facts = {**provenance(device), "date": f"{datetime.now(UTC):%Y-%m-%d}", "command": made, "ceilings": ceilings}
                Profile(name, fmt, shape_of(spec), {path: kernels_version(path) for path in paths}, facts, tuple(records.values())).save(file)
                console.print(_line(record, trials))
    if left:
        rest = ",".join(map(str, left))
        console.print(f"time budget of {budget:g} s spent; not measured: {rest} (go on with --buckets {rest}{' --again' if again else ''})")
    console.print(f"{len(records)} buckets in {file}, {time.perf_counter() - started:.0f} s")


def _earlier(file: Path, spec: MoESpec, fmt: str, device: str, facts: Mapping[str, str], again: bool) -> dict[int, BucketRecord]:
    """Records of an earlier run that still hold: of this device, and made with the same libraries (`facts`).

    A file of something else is refused, or with `again` written anew.
    """
    if not file.is_file():
        return {}
    try:
        profile = Profile.load(file)
        profile.check(spec, fmt)
        if profile.device != device:
            raise PlanError(f"{file} was measured on {profile.device!r}, this is {device!r}")
    except PlanError as error:
        if again:
            return {}
        raise type(error)(f"{error}; --again writes {file} anew") from error
    if any(profile.provenance.get(name) != value for name, value in facts.items() if name != "graphmoe"):
        return {}
    return {record.tokens: record for record in profile.buckets if profile.void(record.tokens) is None}


def _slug(model: str, tp: int, ep: int, fmt: str) -> str:
    parts = [
        _name_of(model),
        *([f"tp{tp}"] if tp > 1 else []),
        *([f"ep{ep}"] if ep > 1 else []),
        *([] if fmt == "fp8_block" else [fmt]),
    ]
    return "-".join(parts)


def _name_of(model: str) -> str:
    """A model's name, also of one that was given by its sizes, so that a shape has one file; else its sizes."""
    if "=" not in model:
        return model
    spec = model_spec(model)
    same = [name for name in model_names() if shape_of(named_spec(name)) == shape_of(spec)]
    return same[0] if same else f"E{spec.num_experts}-K{spec.top_k}-H{spec.hidden_size}-I{spec.intermediate_size}"


def _line(record: BucketRecord, trials: list[Trial]) -> str:
    by_path: dict[str, float] = {}
    for trial in trials:
        by_path[trial.recipe.path] = min(by_path.get(trial.recipe.path, float("inf")), trial.worst_ratio)
    rest = ", ".join(f"{path} {ratio:.2f}" for path, ratio in sorted(by_path.items(), key=lambda entry: entry[1]))
    refused = [trial for trial in trials if trial.refused]
    wrong = f"; refused {len(refused)}: {refused[0].recipe}: {refused[0].refused}" if refused else ""
    return (
        f"T={record.tokens:<5} {record.replay_us:8.1f} +-{record.spread_us:.1f} us, {record.ratio:.2f} of the floor, {record.launches} kernels, "
        f"worst row {record.worst_row:.4f}, {record.recipe} (tried {record.tried}: {rest}){wrong}"
    )
