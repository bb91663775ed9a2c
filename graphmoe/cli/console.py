"""The console of every subcommand: wide enough for its tables, also where the output is not a terminal."""

from rich.console import Console
from rich.progress import Progress

_MIN_WIDTH = 150


def make_console() -> Console:
    """A console of the terminal's width, but never so narrow that numbers are cut. Brackets in a path or message are not markup."""
    width = max(_MIN_WIDTH, Console().width)
    return Console(width=width, markup=False, highlight=False, soft_wrap=True)


def make_progress() -> Progress:
    """A bar on stderr while something takes its time; nothing where stderr is not a terminal."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)
