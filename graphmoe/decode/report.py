"""What a decoder built and did, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from graphmoe.report import count, rendered


@dataclass(frozen=True)
class StepReport:
    """One bucket: `rows` is the proven row bound of its MoE layers (0: none), `seconds` and `graph_bytes` sum over its graphs (greedy, sampling), and
    `steps` counts how often one of them has run."""

    tokens: int
    rows: int
    kernels: int
    graph_bytes: int
    seconds: float
    steps: int


@dataclass(frozen=True)
class DecoderReport:
    """See `GraphedDecoder.report`; `str()` renders a table. Bytes are device memory, seconds are wall time; `rows_run` counts padding rows too."""

    device: str
    emulated: bool
    captured: bool
    batch_invariant: bool
    layers: int
    max_cache_len: int
    weight_bytes: int
    arena_bytes: int
    kv_bytes: int
    graph_bytes: int
    build_seconds: float
    serve_seconds: float
    prefill_seconds: float
    prompt_tokens: int
    new_tokens: int
    rows_run: int
    moves: int
    buckets: tuple[StepReport, ...]

    @property
    def steps(self) -> int:
        """Steps that have run, of all buckets."""
        return sum(bucket.steps for bucket in self.buckets)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the time that was spent serving; 0 before anything was served."""
        return self.new_tokens / self.serve_seconds if self.serve_seconds else 0.0

    def __str__(self) -> str:
        how = "captured" if self.captured and not self.emulated else "emulated" if self.emulated else "eager"
        sizes = ((self.weight_bytes, "weights"), (self.arena_bytes, "arena"), (self.kv_bytes, "KV cache"), (self.graph_bytes, "graphs"))
        table = Table()
        for column in ("bucket", "MoE rows bound", "ops" if self.emulated else "kernels", "graph MiB", "capture s", "steps run"):
            table.add_column(column, justify="right")
        for step in self.buckets:
            launches = str(step.kernels or "-")
            nbytes, seconds = f"{step.graph_bytes / 2**20:.2f}", f"{step.seconds:.2f}"
            table.add_row(str(step.tokens), str(step.rows or "-"), launches, nbytes, seconds, str(step.steps))
        busy = f", {self.new_tokens / self.rows_run:.0%} of their rows gave a token" if self.rows_run else ""
        return rendered(
            f"{count(self.layers, 'layer')} on {self.device}, steps {how}{', batch-invariant' if self.batch_invariant else ''}, "
            f"{self.max_cache_len} positions a row, built in {self.build_seconds:.2f} s",
            "GiB: " + ", ".join(f"{nbytes / 2**30:.3f} {what}" for nbytes, what in sizes),
            table,
            f"{count(self.prompt_tokens, 'prompt token')} and {count(self.new_tokens, 'new token')} in {self.serve_seconds:.2f} s "
            f"({self.prefill_seconds:.2f} s of it prefill): {self.tokens_per_second:.1f} new tokens/s",
            f"{count(self.steps, 'step')}{busy}, {count(self.moves, 'move')} of a row",
        )
