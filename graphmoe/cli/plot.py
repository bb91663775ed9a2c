"""The plot of `graphmoe bench`: time of a layer against tokens, the floor beneath it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphmoe.errors import InvalidInput, MissingBackend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from graphmoe.cli.bench import Row

_COLOURS = {"direct": "tab:green", "gathered": "tab:blue", "psum": "tab:orange", "masked": "tab:red", "compact": "tab:purple"}


def figure_class() -> type[Figure]:
    """matplotlib's figure, which needs no display.

    Raises:
        MissingBackend: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingBackend("a plot needs matplotlib: pip install matplotlib; --json keeps the numbers, --load draws them elsewhere") from error
    return Figure


def plot(title: str, rows: Sequence[Row], path: Path) -> None:
    """Draw the balanced routing's times, one colour a path, auto's choice ringed, and write a picture.

    Raises:
        MissingBackend: matplotlib is not installed.
        InvalidInput: nothing was measured, or the picture cannot be written.
    """
    shown = [row for row in rows if row.routing == "balanced"]
    if not shown:
        raise InvalidInput("no time of a balanced routing was measured: there is nothing to draw")
    figure = figure_class()(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    floor = {row.tokens: row.floor_us for row in shown}
    axes.plot(list(floor), list(floor.values()), color="black", linestyle="--", label="floor")
    for name, colour in _COLOURS.items():
        points = sorted((row.tokens, row.graph_us) for row in shown if row.path == name)
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", color=colour, label=name)
    chosen = sorted((row.tokens, row.graph_us) for row in shown if row.chosen)
    axes.plot(*zip(*chosen, strict=True), linestyle="", marker="o", markersize=9, fillstyle="none", color="black", label="auto's choice")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(floor), [str(tokens) for tokens in floor])
    axes.set_xlabel("tokens T")
    axes.set_ylabel("one layer, microseconds (graph replay, L2-cold)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a picture.

    Raises:
        InvalidInput: it cannot be written.
    """
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: of a name whose ending is no picture's
        raise InvalidInput(f"the picture cannot be written to {path}: {error}") from error
