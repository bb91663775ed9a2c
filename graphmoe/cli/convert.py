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
from graphmoe.cli.options import format_name
from graphmoe.convert import ConvertedFile, convert_checkpoint
from graphmoe.formats import FORMATS

_INTERRUPTED = 130


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="checkpoint directory; not changed. Its top-level files count, not its folders")],
    target: Annotated[
        Path,
        typer.Argument(metavar="DST", help="directory for the result; it may hold what an interrupted run of this conversion left, nothing else"),
    ],
    fmt: Annotated[str, typer.Option("--format", help=f"one of: {', '.join(FORMATS)} (fp8 is short for fp8_block)")],
    clip_search: Annotated[bool, typer.Option("--clip-search", help="for w4afp8: choose each group's scale by its squared error; slower")] = False,
) -> None:
    """Rewrite a checkpoint's weights as block FP8, block FP8 with power-of-two scales (ue8m0), int4 experts (w4afp8), or bf16.

    Block-FP8 weights are converted wherever they are (to w4afp8 those of experts), BF16 weights only of experts; everything else is copied. A run
    that was interrupted is started again with the same command and keeps the files that it had finished.
    """
    fmt = format_name(fmt)
    console = make_console()
    errors = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    finished = 0
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("converting", total=None)

        def show(name: str, done: int, total: int) -> None:
            nonlocal finished
            finished = done
            bar.update(task, description=name, completed=done, total=total)

        try:
            files = convert_checkpoint(source, target, fmt, show, clip_search=clip_search)
        except KeyboardInterrupt:
            bar.stop()
            errors.print(
                f"interrupted after {_count(finished, 'tensor')}: the same command goes on, and keeps the files that are finished in {target}"
            )
            raise typer.Exit(_INTERRUPTED) from None
    summary = _summary(files, fmt)
    if summary is not None:
        console.print(summary)
    kept = sum(file.found for file in files)
    console.print(f"{_count(len(files), 'file')} of weights in {target}" + (f", {kept} found finished from an earlier run" if kept else ""))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _summary(files: list[ConvertedFile], fmt: str) -> Table | None:
    """Errors by layer; None if no weight had to be converted."""
    by_layer = defaultdict(list)
    for file in files:
        for error in file.errors:
            by_layer[error.layer].append(error.relative_error)
    if not by_layer:
        return None
    table = Table(title=f"Weights now {fmt}: relative error per tensor, norm of the difference over norm of the original", title_justify="left")
    for column in ("layer", "tensors", "max", "mean"):
        table.add_column(column, justify="right")
    for layer, values in sorted(by_layer.items()):
        table.add_row("-" if layer < 0 else str(layer), str(len(values)), f"{max(values):.2e}", f"{sum(values) / len(values):.2e}")
    return table
