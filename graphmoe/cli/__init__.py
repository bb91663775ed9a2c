"""The `graphmoe` command: one file a subcommand."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import graphmoe
from graphmoe.cli.bench import bench
from graphmoe.cli.bench_decode import bench_decode
from graphmoe.cli.convert import convert
from graphmoe.cli.demo import demo
from graphmoe.cli.doctor import doctor
from graphmoe.cli.inspect import inspect
from graphmoe.cli.options import in_options
from graphmoe.cli.plan import plan
from graphmoe.cli.tune import tune
from graphmoe.cli.verify import verify
from graphmoe.errors import GraphMoEError

app = typer.Typer(
    help="CUDA-graph-first, static-shape execution of Mixture-of-Experts layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"graphmoe {graphmoe.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="print the version and stop", is_eager=True, callback=_print_version)] = False,
) -> None:
    pass


app.command()(demo)
app.command()(plan)
app.command()(convert)
app.command()(tune)
app.command()(bench)
app.command()(bench_decode)
app.command()(verify)
app.command()(inspect)
app.command()(doctor)


def main() -> None:
    """Run the command line; an error of graphmoe is one line on stderr and exit code 2."""
    try:
        app()
    except GraphMoEError as error:
        print(f"{type(error).__name__}: {in_options(str(error))}", file=sys.stderr)
        sys.exit(2)
