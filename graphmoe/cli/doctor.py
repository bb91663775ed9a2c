"""`graphmoe doctor`: one line a check, and for each failure the command that mends it."""

from __future__ import annotations

import typer

from graphmoe.cli.console import make_console
from graphmoe.doctor import State, examine


def doctor() -> None:
    """Look at versions, GPU, compilers, caches and profiles, and check every path on a small layer. Exit code 1 if anything failed."""
    console = make_console()
    failed = 0
    for check in examine():
        console.print(f"{check.state.upper() if check.state is State.FAILED else check.state:<8} {check.name:<20} {check.what}")
        if check.state is State.FAILED:
            failed += 1
            console.print(f"{'':<8} {'':<20} -> {check.remedy}")
    console.print("everything that this machine can run works" if failed == 0 else f"{failed} checks failed")
    if failed:
        raise typer.Exit(1)
