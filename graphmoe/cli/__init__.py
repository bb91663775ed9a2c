"""The `graphmoe` command: one file a subcommand."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import graphmoe
from graphmoe.cli.convert import convert
from graphmoe.cli.demo import demo
from graphmoe.cli.plan import plan
from graphmoe.errors import GraphMoEError

app = typer.Typer(help="CUDA-graph-first, static-shape execution of Mixture-of-Experts layers.", no_args_is_help=True, add_completion=False)


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", help="print the version and stop", is_eager=True)] = False) -> None:
    if version:
        print(f"graphmoe {graphmoe.__version__}")
        raise typer.Exit


app.command()(demo)
app.command()(plan)
app.command()(convert)


def main() -> None:
    """Run the command line; an error of graphmoe is one line on stderr and exit code 2."""
    try:
        app()
    except GraphMoEError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
