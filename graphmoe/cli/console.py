"""The console of every subcommand: wide enough for its tables, also where the output is not a terminal."""

from rich.console import Console

_MIN_WIDTH = 150


def make_console() -> Console:
    """A console of the terminal's width, but never so narrow that numbers are cut."""
    console = Console()
    return console if console.width >= _MIN_WIDTH else Console(width=_MIN_WIDTH)
