"""Build: one arena, every bucket's step bound to it, and on CUDA one captured graph per (layer, bucket)."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from graphmoe import reference
from graphmoe.arena import Arena
from graphmoe.audit import Audit, Region, judge, read_graph, require_cuda_python
from graphmoe.capture import CapturedStep, capture_step, prove, side_stream
from graphmoe.errors import CaptureError
from graphmoe.flag import StickyFlag
from graphmoe.formats import get_format
from graphmoe.gemm import GroupedGemm
from graphmoe.ops import Ops
from graphmoe.paths import get_path
from graphmoe.paths.base import BoundPath
from graphmoe.planner import Plan
from graphmoe.step import step
from graphmoe.watch import WeightWatch
from graphmoe.weights import ExpertWeights


@dataclass(frozen=True)
class StaticInputs:
    """A bucket's static buffers, lent to callers that write them directly and then `replay`.

    Every token of the bucket is read: ids of unused tokens must be -1. Ids are local (`spec.to_local`). All buckets share this memory, and any
    call writes it: fill it right before `replay`.
    """

    x: Tensor
    """bf16 `[T, H]`"""
    topk_ids: Tensor
    """int32 `[T, K]`"""
    topk_weights: Tensor
    """float32 `[T, K]`"""


@dataclass(frozen=True)
class Bucket:
    """One bucket's step over the arena, bound once a layer."""

    inputs: StaticInputs
    y: Tensor
    bound: list[BoundPath]

    def run(self, layer: int) -> None:
        step(self.bound[layer], self.inputs.x, self.inputs.topk_ids, self.inputs.topk_weights, self.y)


@dataclass
class Built:
    """What a runtime runs. `weights` are on the device, in the form that the arch's kernels take."""

    plan: Plan
    device: torch.device
    ops: Ops
    gemm: GroupedGemm | None
    captures: bool
    """A call replays graphs; else it issues the step, kernel by kernel."""
    arena: Arena = field(init=False)
    static: dict[str, Tensor] = field(default_factory=dict)
    flag: StickyFlag = field(init=False)
    weights: list[ExpertWeights] = field(default_factory=list)
    watches: list[WeightWatch] = field(default_factory=list)
    """One a layer."""
    buffers: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """By bucket: its views of the arena."""
    buckets: dict[int, Bucket] = field(default_factory=dict)
    graphs: dict[tuple[int, int], CapturedStep] = field(default_factory=dict)
    """By (layer, bucket); empty where nothing is captured."""
    pool: Any = None
    audited: bool = False
    """Every graph was read back and found to touch only its regions."""

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Keep all memory until what this stream has been given is done, should it be dropped before."""
        self.arena.used_on(stream)
        for one in self.weights:
            for tensor in one.tensors().values():
                tensor.record_stream(stream)

    def regions(self, layer: int, tokens: int) -> list[Region]:
        """The memory that the graph of a layer and bucket may touch: static buffers, the bucket's views of the arena, the layer's weights."""
        named = {**self.static, **self.buffers[tokens], **self.weights[layer].tensors()}
        return [Region(name, tensor.data_ptr(), tensor.nbytes) for name, tensor in named.items()]

    def audit(self, layer: int | None = None) -> dict[tuple[int, int], Audit]:
        """Every captured graph (of one layer, or all) held against its regions, by (layer, bucket)."""
        wanted = {key: captured for key, captured in self.graphs.items() if layer in (None, key[0])}
        return {key: judge(read_graph(captured.graph), self.regions(*key)) for key, captured in wanted.items()}

    def release(self) -> None:
        """Drop the graphs, the buffers and the references to weights."""
        for captured in self.graphs.values():
            captured.graph.reset()
        self.graphs.clear()
        self.buckets.clear()
        self.weights.clear()
        self.watches.clear()
        self.buffers = {}
        self.static = {}
        for name in ("arena", "flag"):
            vars(self).pop(name, None)  # a build may have failed before it had them


def build(
    plan: Plan,
    weights: Sequence[ExpertWeights],
    device: torch.device,
    *,
    progress: bool,
    capture: bool = True,
    audit: bool = False,
    over: Built | None = None,
) -> Built:
    """Allocate, bind, warm up and capture everything that a plan says.

    Args:
        plan: what to build.
        weights: one a layer, on any device.
        device: a resolved device.
        progress: show a progress bar while capturing (only on a terminal).
        capture: record a graph per layer and bucket; otherwise only warm up.
        audit: read every captured graph back and refuse what touches anything but its arena, weights, inputs and output.
        over: something built of the same plan, whose memory is used instead of more; it keeps working, one of both at a time.

    Raises:
        MissingBackend, WrongBackend, CaptureError; nothing is left allocated.
    """
    if device.type == "cuda":
        require_cuda_python()
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("a runtime cannot be built while the current stream captures a graph; build it before, call it inside")
    ops, gemm = _backend(plan, device)
    built = Built(plan, device, ops, gemm, captures=capture and device.type == "cuda")
    try:
        _allocate(built, over)
        _lend(built)
        for one in weights:
            _bind(built, one)
        if device.type == "cuda":
            warm_stage(built)
            _warm_and_capture(built, range(len(weights)), progress)
            if over is None:
                built.flag.clear()
            torch.cuda.current_stream(device).synchronize()  # whatever stream the first call is on, all this is done before it
            if audit:
                _require_proof(built)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # their locals would keep the arena for as long as the error is kept
        built.release()
        raise
    built.arena.seal()
    return built


def _allocate(built: Built, over: Built | None) -> None:
    if over is not None:
        built.arena, built.static, built.flag, built.buffers = over.arena, over.static, over.flag, over.buffers
        return
    built.arena = arena = Arena(built.plan, built.device)
    built.static = {buffer.name: arena.view(buffer) for buffer in built.plan.static}
    built.static["flags"].zero_()
    built.static["topk_ids"].fill_(-1)
    built.flag = StickyFlag(built.static["flags"])
    for bucket in built.plan.buckets:
        built.buffers[bucket.tokens] = {"flags": built.static["flags"], **{buffer.name: arena.view(buffer) for buffer in bucket.buffers}}


def _lend(built: Built) -> None:
    static = built.static
    for bucket in built.plan.buckets:
        t = bucket.tokens
        inputs = StaticInputs(static["x"][:t], static["topk_ids"][:t], static["topk_weights"][:t])
        built.buckets[t] = Bucket(inputs, static["y"][:t], bound=[])


def add_layer(built: Built, weights: ExpertWeights) -> None:
    """One more layer on the same arena: its steps are bound, warmed up and captured like the others'; on failure there is none more."""
    layer = len(built.weights)
    try:
        _bind(built, weights)
        if built.device.type == "cuda":
            _warm_and_capture(built, range(layer, layer + 1), progress=False)
            torch.cuda.current_stream(built.device).synchronize()
            if built.audited:
                _require_proof(built, layer)
    except BaseException:
        for bucket in built.buckets.values():
            del bucket.bound[layer:]
            captured = built.graphs.pop((layer, bucket.inputs.x.shape[0]), None)
            if captured is not None:
                captured.graph.reset()
        del built.weights[layer:], built.watches[layer:]
        raise


def _bind(built: Built, given: ExpertWeights) -> None:
    """Bind one more layer to every bucket."""
    plan = built.plan
    used = given.to(built.device).prepared(plan.arch)
    built.watches.append(WeightWatch(len(built.weights), given, used))
    built.weights.append(used)
    fmt = get_format(plan.fmt).on(plan.arch)
    for bucket in plan.buckets:
        buffers = built.buffers[bucket.tokens]
        bound = get_path(bucket.recipe.path).bind(plan.spec, fmt, bucket.tokens, bucket.options, buffers, used, built.ops, built.gemm)
        built.buckets[bucket.tokens].bound.append(bound)


def _warm_and_capture(built: Built, layers: range, progress: bool) -> None:
    if built.pool is None:
        built.pool = torch.cuda.graph_pool_handle()
    console = Console(stderr=True)
    show = progress and console.is_terminal
    sizes = sorted(built.buckets, reverse=True)
    keys = [(layer, t) for t in sizes for layer in layers] if built.captures else []
    with side_stream(built.device) as stream, Progress(console=console, transient=True, disable=not show) as bar:
        task = bar.add_task("capturing", total=len(sizes) + len(keys))
        for t in sizes:
            bar.update(task, description=f"warming up bucket {t}")
            for layer in layers:  # each one: a kernel may be compiled for the alignment of a layer's own tensors
                built.buckets[t].run(layer)
            stream.synchronize()
            bar.advance(task)
        for layer, t in keys:
            bar.update(task, description=f"capturing bucket {t}")
            bucket = built.buckets[t]
            planned = built.plan.bucket(t)
            built.graphs[layer, t] = captured = capture_step(lambda bucket=bucket, layer=layer: bucket.run(layer), built.pool)  # type: ignore[misc]
            prove(captured, bucket.bound[layer], get_path(planned.recipe.path), planned)
            bar.advance(task)


def _require_proof(built: Built, layer: int | None = None) -> None:
    """Of every graph, or of one layer's."""
    found = [(key, finding) for key, audit in built.audit(layer).items() for finding in audit.findings]
    if found:
        (index, t), first = found[0]
        raise CaptureError(
            f"the graph of layer {index}, bucket {t} cannot be proven static: {first} ({len(found)} findings in all); "
            "rebuild with audit=False to look at it with rt.audit()"
        )
    built.audited = True


def warm_stage(built: Built) -> None:
    """Compile every variant of `stage` that a caller's dtypes and addresses can ask for."""
    inputs = next(iter(built.buckets.values())).inputs
    h, k = built.plan.spec.hidden_size, built.plan.spec.top_k
    storage = torch.zeros(h + 1, dtype=torch.bfloat16, device=built.device)
    weights = torch.zeros(1, k, device=built.device)
    for x in (storage[:h].view(1, h), storage[1:].view(1, h)):  # row stride h: aligned and not
        for dtype in (torch.int32, torch.int64):
            ids = torch.full((1, k), -1, dtype=dtype, device=built.device)
            built.ops.stage(x, ids, weights, x_out=inputs.x, ids_out=inputs.topk_ids, weights_out=inputs.topk_weights)


def _backend(made: Plan, device: torch.device) -> tuple[Ops, GroupedGemm | None]:
    layouts = [layout for layout in {get_path(bucket.recipe.path).gemm_layout for bucket in made.buckets} if layout]
    if device.type == "cpu":
        from graphmoe.gemm.torch import TorchGemm

        return reference, TorchGemm()
    from graphmoe import kernels
    from graphmoe.gemm.deep_gemm import DeepGemm

    return kernels, DeepGemm(made.fmt, device, layouts) if layouts else None
