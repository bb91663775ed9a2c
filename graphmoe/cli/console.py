"""The console of every subcommand: wide enough for its tables, also where the output is not a terminal."""

from rich.console import Console

_MIN_WIDTH = 150


def make_console() -> Console:
    """A console of the terminal's width, but never so narrow that numbers are cut. Brackets in a path or message are not markup."""
    width = max(_MIN_WIDTH, Console().width)
    return Console(width=width, markup=False, highlight=False, soft_wrap=True)
