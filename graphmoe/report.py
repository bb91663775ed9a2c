"""What a runtime built, as data and as a table."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

_NARROWEST, _WIDEST = 80, 160
"""Columns of text: the terminal's, within these; the most where there is no terminal."""


@dataclass(frozen=True)
class BucketReport:
    """One bucket: `rows` is the proven row bound, `graph_bytes` and `capture_seconds` sum over its layers' graphs."""

    tokens: int
    recipe: str
    rule: str
    rows: int
    bucket_bytes: int
    kernels: int
    graph_bytes: int
    capture_seconds: float


@dataclass(frozen=True)
class RuntimeReport:
    """See `MoERuntime.report`; `str()` renders a table. `capture_allocations` counts device allocations during capture: 0."""

    device: str
    emulated: bool
    fmt: str
    gemm: str
    layers: int
    graphs: int
    arena_bytes: int
    capture_allocations: int
    build_seconds: float
    promise_broken: bool
    fingerprint: str
    buckets: tuple[BucketReport, ...]

    def __str__(self) -> str:
        graphs = "graphs emulated" if self.emulated else count(self.graphs, "graph")
        title = (
            f"{count(self.layers, 'layer')} on {self.device}, {self.fmt}, {self.gemm} GEMM, {graphs}, arena {self.arena_bytes / 2**20:.2f} MiB, "
            f"{'' if self.emulated else count(self.capture_allocations, 'allocation') + ' in capture, '}"
            f"built in {self.build_seconds:.2f} s, promise broken: {'yes' if self.promise_broken else 'no'}"
        )
        table = Table(title=title, title_justify="left")
        for column in ("bucket", "path", "rows bound", "MiB", "kernels", "graph KiB", "capture s"):
            table.add_column(column, justify="left" if column == "path" else "right")
        reasons: dict[str, list[str]] = {}
        for bucket in self.buckets:
            captured = ("-", "-") if not self.graphs else (f"{bucket.graph_bytes / 2**10:.0f}", f"{bucket.capture_seconds:.3f}")
            path, size = bucket.recipe.split()[0], f"{bucket.bucket_bytes / 2**20:.2f}"
            table.add_row(str(bucket.tokens), path, str(bucket.rows), size, str(bucket.kernels), *captured)
            reasons.setdefault(f"{bucket.recipe} ({bucket.rule})", []).append(str(bucket.tokens))
        lines = (f"bucket{'' if len(sizes) == 1 else 's'} {', '.join(sizes)}: {reason}" for reason, sizes in reasons.items())
        return rendered(table, *lines)


def rendered(*parts: Table | str) -> str:
    """Tables and lines as text, as wide as the terminal within limits."""
    console = Console(width=min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size((_WIDEST, 24)).columns)), markup=False, highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


def count(number: int, what: str) -> str:
    """ "1 graph", "2 graphs"."""
    return f"{number} {what}{'' if number == 1 else 's'}"
