"""What a runtime built, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


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
    arena_bytes: int
    capture_allocations: int
    build_seconds: float
    promise_broken: bool
    fingerprint: str
    buckets: tuple[BucketReport, ...]

    def __str__(self) -> str:
        graphs = "graphs emulated" if self.emulated else f"{self.layers * len(self.buckets)} graphs"
        title = (
            f"{self.layers} layer(s) on {self.device}, {self.fmt}, {self.gemm} GEMM, {graphs}, arena {self.arena_bytes / 2**20:.2f} MiB, "
            f"{self.capture_allocations} allocations in capture, "
            f"built in {self.build_seconds:.2f} s, promise broken: {'yes' if self.promise_broken else 'no'}"
        )
        table = Table(title=title, title_justify="left")
        for column in ("bucket", "rows bound", "MiB", "kernels", "graph KiB", "capture s"):
            table.add_column(column, justify="right")
        table.add_column("recipe")
        table.add_column("why")
        for bucket in self.buckets:
            table.add_row(
                str(bucket.tokens), str(bucket.rows), f"{bucket.bucket_bytes / 2**20:.2f}", str(bucket.kernels),
                f"{bucket.graph_bytes / 2**10:.0f}", f"{bucket.capture_seconds:.3f}", bucket.recipe, bucket.rule,
            )  # fmt: skip
        console = Console(width=160)
        with console.capture() as capture:
            console.print(table)
        return capture.get()
