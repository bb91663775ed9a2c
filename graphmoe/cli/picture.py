"""The picture of `graphmoe inspect`: kernels downwards in order, buffers across, what is read and what is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graphmoe.audit import Audit, Region
from graphmoe.cli.plot import figure_class, save


def draw(audit: Audit, regions: Sequence[Region], title: str, path: Path) -> None:
    """Write a picture of one graph: a row a node, a column a buffer that it touches, in the order of first use.

    Raises:
        MissingBackend: matplotlib is not installed.
        InvalidInput: the picture cannot be written.
    """
    nodes = audit.dump.nodes
    columns = list(dict.fromkeys(access.region for access in audit.accesses))
    size = {region.name: region.nbytes for region in regions}
    figure = figure_class()(figsize=(3 + 0.7 * len(columns), 2.5 + 0.4 * len(nodes)), layout="constrained")
    axes = figure.subplots()
    for does, marker, colour, shift in (("reads", "<", "tab:blue", -0.12), ("writes", ">", "tab:red", 0.12)):
        points = [(columns.index(access.region) + shift, access.node) for access in audit.accesses if getattr(access, does)]
        if points:
            axes.plot(*zip(*points, strict=True), linestyle="", marker=marker, markersize=8, color=colour, label=does)
    axes.set_xticks(range(len(columns)), [f"{name}\n{_bytes(size[name])}" for name in columns], rotation=60, ha="right")
    axes.set_yticks(range(len(nodes)), [f"{number}  {node.kernel.short_name if node.kernel else node.kind}" for number, node in enumerate(nodes)])
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.set_title(title)
    if columns:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
