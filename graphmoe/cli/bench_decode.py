"""`graphmoe bench-decode`: a whole model's decode step per batch size, beside what Transformers takes for it on the same weights."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

import graphmoe
from graphmoe.buckets import BucketLadder
from graphmoe.cli.console import make_console, make_progress
from graphmoe.cli.files import write_json
from graphmoe.cli.options import format_name
from graphmoe.cli.quiet import quiet_transformers
from graphmoe.decode import GraphedDecoder
from graphmoe.decode.timing import graph_timing, loop_timing, prompts_of, shares
from graphmoe.device import resolve_device
from graphmoe.errors import InvalidInput
from graphmoe.provenance import provenance, version_of

SCHEMA = "graphmoe.bench-decode/1"
_FEWEST_POSITIONS = 64


@dataclass(frozen=True)
class Step:
    """One batch size and format of the experts; times in microseconds. Shares are parts of 1, None where no profiler saw the kernels."""

    batch: int
    fmt: str
    graph_us: float
    step_us: float
    spread_us: float
    moe: float | None
    attention: float | None
    rest: float | None

    @property
    def host_us(self) -> float:
        """What the loop adds to the graph."""
        return self.step_us - self.graph_us


@dataclass(frozen=True)
class Memory:
    """Device memory of a decoder and its model, bytes; `peak` is what the driver gave out, without the CUDA context."""

    fmt: str
    peak: int
    weights: int
    arena: int
    kv: int
    graphs: int

    @property
    def remainder(self) -> int:
        return self.peak - self.weights - self.arena - self.kv - self.graphs


@dataclass(frozen=True)
class _Asked:
    """What is to be measured."""

    model: str
    layers: int | None
    device: torch.device
    ladder: BucketLadder
    formats: tuple[str, ...]
    forms: tuple[str, ...]
    prompt_length: int
    steps: int
    max_cache_len: int


@dataclass
class _Measured:
    steps: list[Step] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    rivals: dict[str, dict[int, float]] = field(default_factory=dict)
    """Microseconds a step, by form and batch."""


def bench_decode(
    model: Annotated[str, typer.Option(help="a checkpoint's directory, or qwen3-30b-a3b, qwen3-235b-a22b: random weights then")] = "qwen3-30b-a3b",
    layers: Annotated[int | None, typer.Option(help="keep the model's first layers only")] = None,
    batches: Annotated[str, typer.Option(help="batch sizes, each captured and timed")] = "1,8,64,256",
    formats: Annotated[str, typer.Option("--formats", help="of the experts: bf16, fp8 (quantised here, after bf16 was timed) or both")] = "bf16,fp8",
    rivals: Annotated[
        str, typer.Option(help="forms of Transformers' generate(): grouped_mm, batched_mm, eager, compiled (static cache); none for none")
    ] = "grouped_mm,batched_mm,compiled",
    prompt_length: Annotated[int, typer.Option("--prompt", help="tokens of each prompt")] = 16,
    steps: Annotated[int, typer.Option(help="decode steps per measurement")] = 32,
    max_cache_len: Annotated[int, typer.Option("--cache", help="positions a row of graphmoe's KV cache")] = 256,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the command out")] = "cuda" if torch.cuda.is_available() else "cpu",
    json_path: Annotated[Path | None, typer.Option("--json", help="write what was measured there")] = None,
) -> None:
    """Time a decode step of a whole model: one graph a batch size, beside Transformers' generate() in the same process on the same weights."""
    quiet_transformers()
    where = resolve_device(device)
    if where.type == "cpu":
        torch.set_num_threads(1)  # it is tried out with small models: threads would only wait for each other
    forms = () if rivals == "none" else tuple(rivals.split(","))
    wanted = tuple(format_name(name) for name in formats.split(","))
    asked = _Asked(model, layers, where, BucketLadder.of(batches), wanted, forms, prompt_length, steps, max_cache_len)
    _judge(asked)
    graphmoe.register_transformers()
    console = make_console()
    measured, what = _measure(asked)
    facts = provenance(where) | {"transformers": version_of("transformers"), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    console.print(
        f"{what}, prompts of {prompt_length} tokens, on {facts['device']}; {', '.join(f'{k} {v}' for k, v in facts.items() if k != 'device')}"
    )
    console.print(_table(measured))
    console.print(
        "graph: one replay; step: the loop's time per step of generate(); host: step - graph; shares: of the kernels' time; ratios: over step"
        + ("; no GPU: graphs are emulated, and the times say nothing about one" if where.type == "cpu" else "")
    )
    for memory in measured.memory:
        console.print(_memory_line(memory))
    if json_path is not None:
        plain = {"steps": [asdict(step) for step in measured.steps], "memory": [asdict(each) for each in measured.memory], "rivals": measured.rivals}
        write_json({"schema": SCHEMA, "title": what, "provenance": facts, **plain}, json_path, "measurement")


def _judge(asked: _Asked) -> None:
    from graphmoe.integrations.transformers.rivals import FORMS

    unknown = [form for form in asked.forms if form not in FORMS]
    if unknown:
        raise InvalidInput(f"--rivals {unknown[0]!r} is not one of {', '.join(FORMS)}, none")
    if len(asked.formats) > 2 or (len(asked.formats) == 2 and (asked.formats[0] != "bf16" or asked.formats[1] == "bf16")):
        raise InvalidInput(f"--formats {','.join(asked.formats)}: bf16, one other, or both: bf16 first, the other is quantised from it")
    if asked.prompt_length < 1 or asked.steps < 1:
        raise InvalidInput(f"--prompt {asked.prompt_length} --steps {asked.steps}: at least 1 each")
    needed = asked.prompt_length + max(_FEWEST_POSITIONS, asked.steps + 8)
    if asked.max_cache_len < needed:
        raise InvalidInput(
            f"--cache {asked.max_cache_len} is too short for prompts of {asked.prompt_length} tokens and {asked.steps} steps: at least {needed}"
        )


def _measure(asked: _Asked) -> tuple[_Measured, str]:
    from graphmoe.integrations.transformers import quantize_experts
    from graphmoe.integrations.transformers.loading import RANDOM_MODELS, load
    from graphmoe.integrations.transformers.rivals import step_timing

    device = asked.device
    free = _free(device)
    model = load(asked.model, device, asked.layers)
    what = f"{asked.model}, {model.config.num_hidden_layers} layers{', random weights' if asked.model in RANDOM_MODELS else ''}"
    quantised = getattr(model.config, "quantization_config", None) is not None and device.type == "cuda"
    if quantised and asked.formats != ("fp8_block",):
        raise InvalidInput(f"{asked.model} is an FP8 checkpoint already: --formats fp8")
    measured = _Measured()
    with make_progress() as bar:
        task = bar.add_task("measuring", total=len(asked.formats) + len(asked.forms))
        for fmt in asked.formats:
            if fmt != "bf16" and not quantised:
                quantize_experts(model, fmt)
            _clear(device)
            decoder = GraphedDecoder(model, asked.ladder, asked.max_cache_len, sampling=False)
            measured.steps += [_step(decoder, batch, fmt, asked) for batch in asked.ladder.sizes]
            if device.type == "cuda":
                measured.memory.append(_memory(decoder, fmt, free - _free(device)))
            decoder.close()
            del decoder
            bar.advance(task)
            if fmt != "bf16":
                continue
            for form in asked.forms:
                measured.rivals[form] = {}
                for batch in asked.ladder.sizes:
                    _clear(device)
                    prompts = torch.tensor(prompts_of(batch, asked.prompt_length, model.config.vocab_size), device=device)
                    try:
                        measured.rivals[form][batch] = step_timing(model, form, prompts, steps=asked.steps).median_us
                    except Exception as error:  # out of memory, or an implementation that this machine cannot run: the others are timed all the same
                        print(f"batch {batch} {form}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
                bar.advance(task)
    return measured, what


def _step(decoder: GraphedDecoder, batch: int, fmt: str, asked: _Asked) -> Step:
    loop = loop_timing(decoder, prompts_of(batch, asked.prompt_length, decoder.vocab_size), steps=asked.steps)
    position = asked.prompt_length + asked.steps // 2
    graph, parts = graph_timing(decoder, batch, position), shares(decoder, batch, position)
    moe, attention, rest = (None, None, None) if parts is None else (parts.moe, parts.attention, parts.rest)
    return Step(batch, fmt, graph.median_us, loop.median_us, loop.spread_us, moe, attention, rest)


def _memory(decoder: GraphedDecoder, fmt: str, peak: int) -> Memory:
    report = decoder.report()
    return Memory(fmt, peak, report.weight_bytes, report.arena_bytes, report.kv_bytes, report.graph_bytes)


def _memory_line(memory: Memory) -> str:
    parts = ((memory.weights, "weights"), (memory.arena, "arena"), (memory.kv, "KV cache"), (memory.graphs, "graphs"))
    listed = " + ".join(f"{nbytes / 2**30:.3f} {what}" for nbytes, what in parts)
    return (
        f"{memory.fmt}: peak device memory {memory.peak / 2**30:.3f} GiB = {listed} + {memory.remainder / 2**30:.3f} remainder "
        "(activations of steps and prefill, what torch's allocator and loaded kernels hold; the CUDA context not counted)"
    )


def _table(measured: _Measured) -> Table:
    table = Table()
    columns = (
        "batch",
        "experts",
        "graph ms",
        "step ms",
        "+-",
        "host us",
        "tokens/s",
        "MoE",
        "attention",
        "rest",
        *(f"{f} ms" for f in measured.rivals),
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "experts" else "right")
    for step in measured.steps:
        parts = ["-" if part is None else f"{part:.0%}" for part in (step.moe, step.attention, step.rest)]
        beside = [by_batch.get(step.batch) for by_batch in measured.rivals.values()]
        times = (f"{us / 1e3:.3f}" for us in (step.graph_us, step.step_us, step.spread_us))
        ratios = ("-" if us is None else f"{us / 1e3:.2f} ({us / step.step_us:.1f}x)" for us in beside)
        speed = f"{step.batch / step.step_us * 1e6:.0f}"
        table.add_row(str(step.batch), step.fmt, *times, f"{step.host_us:.0f}", speed, *parts, *ratios)
    return table


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _clear(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
