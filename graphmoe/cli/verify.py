"""`graphmoe verify`: on this machine, that changed routings, poisoned scratch and guard bands show no wrong token in any path."""

from __future__ import annotations

import time
from typing import Annotated

import torch
import typer

from graphmoe.buckets import BucketLadder
from graphmoe.cli.console import make_console, make_progress
from graphmoe.cli.options import MODEL_HELP, PATH_HELP, Buckets, Ep, Tp, WeightFormat, format_name, sharded
from graphmoe.device import arch_of, resolve_device
from graphmoe.errors import InvalidInput
from graphmoe.formats import get_format
from graphmoe.paths import PATHS, why_not
from graphmoe.recipe import Recipe
from graphmoe.spec import MoESpec
from graphmoe.verify import Case, Verifier, soak
from graphmoe.verify import verify as verify_calls

_SMALL = MoESpec(num_experts=16, top_k=4, hidden_size=256, intermediate_size=128, routed_scaling_factor=1.5)


def verify(
    model: Annotated[str | None, typer.Option(help=f"{MODEL_HELP}; without one, a small layer")] = None,
    tp: Tp = 1,
    ep: Ep = 1,
    buckets: Buckets = "1,4,16,64",
    fmt: WeightFormat = "fp8_block",
    path: Annotated[str | None, typer.Option(help=f"{PATH_HELP}; without one, every path that can run here")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    examples: Annotated[int, typer.Option(help="calls per path")] = 500,
    seed: Annotated[int, typer.Option(help="of the order of calls")] = 0,
    soak_minutes: Annotated[float, typer.Option("--soak", help="minutes of two threads on each of two runtimes at once")] = 0.0,
    reproduce: Annotated[str | None, typer.Option(help="one case, as a failure prints it; needs --path")] = None,
) -> None:
    """Call each path with routings that change every time, and hold every output against an oracle and against its own first bits."""
    if examples < 1 or soak_minutes < 0:
        raise InvalidInput(f"--examples {examples} --soak {soak_minutes:g}: at least 1 call and no negative minutes; nothing would be verified")
    if model is None and (tp, ep) != (1, 1):
        raise InvalidInput(f"--tp {tp} --ep {ep} need --model: the small layer is not sharded")
    if reproduce is not None and path is None:
        raise InvalidInput("--reproduce needs --path: a case is of one path")
    fmt = format_name(fmt)
    place = resolve_device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    spec = _SMALL if model is None else sharded(model, tp, ep, fmt)
    ladder, console = BucketLadder.of(buckets), make_console()
    recipes = [Recipe.of(path)] if path else _every_path(spec, fmt, arch_of(place))
    shard = f" tp={tp} ep={ep}" if model else ""
    console.print(
        f"{model or 'small layer'}{shard}, {fmt}, buckets {', '.join(map(str, ladder.sizes))}, on {place}: {examples} calls a path, seed {seed}"
    )
    for recipe in recipes:
        verifier = Verifier(spec, fmt, ladder, recipe, place)
        try:
            if reproduce is not None:
                verifier.run(Case.parse(reproduce))
                console.print(f"{recipe}: {reproduce}: right")
                continue
            started = time.perf_counter()
            with make_progress() as bar:
                task = bar.add_task(str(recipe), total=examples)
                verify_calls(verifier, examples, seed=seed, done=lambda bar=bar, task=task: bar.advance(task))  # type: ignore[misc]
            seconds = time.perf_counter() - started
            console.print(f"{recipe}: {verifier.calls} calls, 0 failures, worst row off by {verifier.worst:.4f} of its norm, {seconds:.1f} s")
        finally:
            verifier.close()
    if soak_minutes and reproduce is None:
        pair = [Verifier(spec, fmt, ladder, recipe, place) for recipe in (recipes[0], recipes[-1])]
        calls = soak(pair, soak_minutes * 60, seed=seed)
        console.print(f"soak: {calls} calls of four threads on two runtimes ({recipes[0]}; {recipes[-1]}) in {soak_minutes:g} minutes, 0 failures")
        for verifier in pair:
            verifier.close()


def _every_path(spec: MoESpec, fmt: str, arch: str) -> list[Recipe]:
    weight_format = get_format(fmt).on(arch)
    return [Recipe(name) for name in PATHS if why_not(name, spec, weight_format, arch) is None]
