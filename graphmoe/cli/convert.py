"""`graphmoe convert`: a checkpoint in another weight format."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from graphmoe.cli.console import make_console
from graphmoe.convert import TARGETS, ConvertedFile, convert_checkpoint
from graphmoe.errors import UnknownRecipe


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="checkpoint directory; not changed")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="directory for the result; a run that was interrupted goes on there")],
    fmt: Annotated[str, typer.Option("--format", help=f"one of: {', '.join(TARGETS)}")],
) -> None:
    """Rewrite a checkpoint's weights as block FP8, block FP8 with power-of-two scales (ue8m0), or bf16."""
    if fmt not in TARGETS:
        raise UnknownRecipe(f"unknown format {fmt!r}; known: {', '.join(TARGETS)}")
    console = make_console()
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("converting", total=None)
        files = convert_checkpoint(
            source, target, TARGETS[fmt], lambda name, done, total: bar.update(task, description=name, completed=done, total=total)
        )
    console.print(_summary(files))
    kept = sum(file.found for file in files)
    console.print(f"{len(files)} file(s) in {target}, {kept} of them found finished from an earlier run")


def _summary(files: list[ConvertedFile]) -> Table:
    by_layer = defaultdict(list)
    for file in files:
        for error in file.errors:
            by_layer[error.layer].append(error.relative_error)
    table = Table(title="Relative error of the converted weights", title_justify="left")
    for column in ("layer", "tensors", "max", "mean"):
        table.add_column(column, justify="right")
    for layer, values in sorted(by_layer.items()):
        table.add_row("-" if layer < 0 else str(layer), str(len(values)), f"{max(values):.2e}", f"{sum(values) / len(values):.2e}")
    return table
