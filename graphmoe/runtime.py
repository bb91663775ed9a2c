"""MoERuntime: build once, then run any batch in its bucket without allocating, synchronising or deciding anything."""

from __future__ import annotations

import logging
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from graphmoe import reference
from graphmoe.arena import Arena
from graphmoe.buckets import BucketLadder, Overflow
from graphmoe.call import check_call, refuse_shifted_overlap
from graphmoe.capture import CapturedStep, capture_step, prove, side_stream
from graphmoe.device import arch_of, resolve_device
from graphmoe.errors import BrokenPromise, CallError, InvalidInput, RuntimeClosed, WeightsMismatch
from graphmoe.flag import StickyFlag
from graphmoe.formats import get_format
from graphmoe.gemm import GroupedGemm
from graphmoe.ops import Ops
from graphmoe.paths import get_path
from graphmoe.paths.base import BoundPath
from graphmoe.planner import Plan, plan
from graphmoe.recipe import Recipe
from graphmoe.report import BucketReport, RuntimeReport
from graphmoe.spec import MoESpec
from graphmoe.step import step, trace_for
from graphmoe.weights import ExpertWeights

logger = logging.getLogger("graphmoe")

_BROKEN = (
    "a token named one expert twice although the spec promises distinct_topk (NaN router logits do that); "
    "its output is NaN. Fix the router, or build with distinct_topk=False; rt.clear_flag() re-arms this warning"
)
# Shown each time it is raised, not once a source line; any filter of the user's comes first.
warnings.simplefilter("always", BrokenPromise, append=True)


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
class _Bucket:
    inputs: StaticInputs
    y: Tensor
    bound: tuple[BoundPath, ...]
    """One a layer."""

    def run(self, layer: int) -> None:
        step(self.bound[layer], self.inputs.x, self.inputs.topk_ids, self.inputs.topk_weights, self.y)


class MoELayer:
    """One layer of a runtime; made by it, shares its arena."""

    def __init__(self, runtime: MoERuntime, index: int) -> None:
        self._runtime = runtime
        self._index = index

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See `MoERuntime.__call__`."""
        return self._runtime._call(self._index, x, topk_ids, topk_weights, out)

    def __repr__(self) -> str:
        return f"MoELayer({self._index} of {self._runtime!r})"

    def replay(self, bucket: int) -> Tensor:
        """See `MoERuntime.replay`."""
        return self._runtime._replay_bucket(self._index, bucket)


class MoERuntime:
    """MoE layers whose every batch size up to the largest bucket is planned, allocated and captured.

    On CUDA each (layer, bucket) is one CUDA graph around route -> scatter -> grouped GEMM -> SwiGLU -> grouped GEMM -> combine.
    On the CPU the same step runs on the same static buffers with the kernels' torch twins.

    Args:
        spec: the layer.
        weights: its expert weights (one layer) ...
        layers: ... or the weights of several layers of this spec, all on one arena.
        buckets: batch sizes: a BucketLadder, a preset's name (`"vllm"`, `"sglang"`), or ints.
        device: where to run; the weights' device by default, else the weights are copied there.
        path: `"auto"`, a path's name, a Recipe, or a mapping from bucket to one of these.
        overflow: `"raise"` or `"chunk"`: what a batch beyond the largest bucket does; the ladder's own policy by default.
        max_arena_bytes: refuse a larger arena.
        guard_bytes: bytes behind every buffer that nothing may write (for verification).
        progress: show a progress bar while capturing (only on a terminal).

    Raises:
        WeightsMismatch, UnsupportedShape, UnknownRecipe, ArenaTooLarge, MissingBackend, WrongBackend, CaptureError; nothing is left allocated.
    """

    def __init__(
        self,
        spec: MoESpec,
        weights: ExpertWeights | None = None,
        *,
        layers: Sequence[ExpertWeights] | None = None,
        buckets: BucketLadder | str | Iterable[int] = "vllm",
        device: torch.device | str | None = None,
        path: Recipe | str | Mapping[int, Recipe | str] = "auto",
        overflow: Overflow | None = None,
        max_arena_bytes: int | None = None,
        guard_bytes: int = 0,
        progress: bool = True,
    ) -> None:
        for name, given in (("weights", [] if weights is None else [weights]), ("layers", [] if layers is None else layers)):
            if not isinstance(given, Sequence) or not all(isinstance(one, ExpertWeights) for one in given):
                raise WeightsMismatch(f"{name} does not hold ExpertWeights; give weights=one, or layers=[one, ...]")
        if (weights is None) == (layers is None):
            raise WeightsMismatch("give either weights (one layer) or layers=[...] (several), not both and not neither")
        all_weights = [weights] if weights is not None else list(layers or [])
        if not all_weights:
            raise WeightsMismatch("layers=[] holds no layer")
        for one in all_weights:
            one.check_spec(spec)
            if one.fmt != all_weights[0].fmt:
                raise WeightsMismatch(f"layers of one runtime share a format; got {all_weights[0].fmt!r} and {one.fmt!r}")
        self.spec = spec
        self.device = resolve_device(all_weights[0].device if device is None else device)
        self.plan: Plan = plan(
            spec,
            BucketLadder.of(buckets, overflow),
            fmt=all_weights[0].fmt,
            arch=arch_of(self.device),
            recipes=path,
            max_arena_bytes=max_arena_bytes,
            guard_bytes=guard_bytes,
        )
        self._trace = trace_for(self.device)
        self._lock = threading.RLock()
        self._closed = False
        self._graphs: dict[tuple[int, int], CapturedStep] = {}
        self._last_stream: torch.cuda.Stream | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}
        started = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad(), self._on_device():
            self._build([one.to(self.device).prepared(self.plan.arch) for one in all_weights], progress)
        self._build_seconds = time.perf_counter() - started
        self.layers = tuple(MoELayer(self, index) for index in range(len(all_weights)))
        logger.info(
            "built %d layer(s) x %d bucket(s) on %s: arena %.2f MiB, %d graph(s), %.2f s",
            len(self.layers), len(self._buckets), self.device, self._arena.nbytes / 2**20, len(self._graphs), self._build_seconds,
        )  # fmt: skip
        for bucket in self.plan.buckets:
            logger.debug("bucket %d: %s, %d rows (%s)", bucket.tokens, bucket.recipe, bucket.rows, bucket.rule)

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Run the layer on `t` tokens.

        Args:
            x: bf16 `[t, H]`, unit column stride. May be a `y` that this runtime returned.
            topk_ids: int32 or int64 `[t, K]`, local ids; -1 or any id outside `[0, E)` is not on this rank.
            topk_weights: float32 `[t, K]`.
            out: bf16 `[t, H]` to copy the result to. Required when `overflow="chunk"` splits the batch.

        Returns:
            bf16 `[t, H]`: `out`, or else a view that the next call of any layer or bucket overwrites. A token whose ids break `distinct_topk` is
            NaN, and a later call warns BrokenPromise (calls that a graph of yours recorded never do: `report` shows it). On a tensor- or
            expert-parallel rank this is the rank's part of the sum: add up the ranks' outputs.

        Raises:
            InvalidInput, BatchTooLarge, RuntimeClosed; the runtime stays usable (unless it was closed).
        """
        if len(self.layers) > 1:
            raise CallError(f"this runtime has {len(self.layers)} layers: call rt.layers[i](...)")
        return self._call(0, x, topk_ids, topk_weights, out)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.layers)} layer(s), buckets up to {self.plan.ladder.largest}"
        return f"MoERuntime({self.plan.fmt} on {self.device}, {state})"

    def inputs(self, bucket: int) -> StaticInputs:
        """The static input buffers of a bucket, to write directly before `replay(bucket)`."""
        return self._bucket(bucket).inputs

    def replay(self, bucket: int) -> Tensor:
        """Run the layer on what the bucket's static inputs hold. Returns bf16 `[bucket, H]`, a view that the next call overwrites."""
        if len(self.layers) > 1:
            raise CallError(f"this runtime has {len(self.layers)} layers: call rt.layers[i].replay(bucket)")
        return self._replay_bucket(0, bucket)

    def report(self) -> RuntimeReport:
        """What was built, per bucket: recipe, row bound, bytes, kernels, capture seconds; and whether a promise was broken. Waits for the device."""
        self._check_open()
        buckets = []
        for bucket in self.plan.buckets:
            graphs = [self._graphs[key] for key in self._graphs if key[1] == bucket.tokens]
            buckets.append(
                BucketReport(
                    tokens=bucket.tokens,
                    recipe=str(bucket.recipe),
                    rule=bucket.rule,
                    rows=bucket.rows,
                    bucket_bytes=self.plan.bucket_bytes(bucket),
                    kernels=len(graphs[0].kernels) if graphs else self._buckets[bucket.tokens].bound[0].launches,
                    graph_bytes=sum(graph.nbytes for graph in graphs),
                    capture_seconds=sum(graph.seconds for graph in graphs),
                )
            )
        return RuntimeReport(
            device=str(self.device),
            emulated=self.device.type == "cpu",
            fmt=self.plan.fmt,
            gemm=self.plan.gemm,
            layers=len(self.layers),
            arena_bytes=self._arena.nbytes,
            capture_allocations=sum(graph.allocations for graph in self._graphs.values()),
            build_seconds=self._build_seconds,
            promise_broken=self._flag.read(),
            fingerprint=self.plan.fingerprint,
            buckets=tuple(buckets),
        )

    def clear_flag(self) -> None:
        """Lower the flag of broken promises; the next one warns again."""
        self._check_open()
        self._flag.clear()

    def close(self) -> None:
        """Drop every graph, the arena and the references to weights. Later calls raise RuntimeClosed; closing twice is fine.

        A graph of your own that recorded a call reads the arena too: do not replay it after this.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._release()

    def __enter__(self) -> MoERuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self, weights: list[ExpertWeights], progress: bool) -> None:
        self._allocate(weights)
        if self.device.type == "cuda":
            self._last_use = torch.cuda.Event()
            try:
                self._capture(progress)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # their locals would keep the arena for as long as the error is kept
                self._release()
                raise
        self._arena.seal()

    def _allocate(self, weights: list[ExpertWeights]) -> None:
        ops, gemm = _backend(self.plan, self.device)
        fmt = get_format(self.plan.fmt).on(self.plan.arch)
        self._ops = ops
        self._arena = Arena(self.plan, self.device)
        static = {buffer.name: self._arena.view(buffer) for buffer in self.plan.static}
        static["flags"].zero_()
        static["topk_ids"].fill_(-1)
        self._flag = StickyFlag(static["flags"])
        self._buckets: dict[int, _Bucket] = {}
        for bucket in self.plan.buckets:
            t = bucket.tokens
            buffers = {"flags": static["flags"], **{buffer.name: self._arena.view(buffer) for buffer in bucket.buffers}}
            path = get_path(bucket.recipe.path)
            bound = tuple(path.bind(self.spec, fmt, t, bucket.options, buffers, one, ops, gemm) for one in weights)
            self._buckets[t] = _Bucket(StaticInputs(static["x"][:t], static["topk_ids"][:t], static["topk_weights"][:t]), static["y"][:t], bound)

    def _capture(self, progress: bool) -> None:
        self._pool = pool = torch.cuda.graph_pool_handle()
        console = Console(stderr=True)
        show = progress and console.is_terminal
        with side_stream(self.device) as stream, Progress(console=console, transient=True, disable=not show) as bar:
            keys = [(layer, t) for t in sorted(self._buckets, reverse=True) for layer in range(len(self._buckets[t].bound))]
            task = bar.add_task("capturing", total=len(self._buckets) + len(keys))
            self._warm_stage()
            for t in sorted(self._buckets, reverse=True):
                bar.update(task, description=f"warming up bucket {t}")
                self._buckets[t].run(0)
                stream.synchronize()
                bar.advance(task)
            for layer, t in keys:
                bar.update(task, description=f"capturing bucket {t}")
                bucket = self._buckets[t]
                captured = capture_step(lambda bucket=bucket, layer=layer: bucket.run(layer), pool)  # type: ignore[misc]
                self._graphs[layer, t] = captured
                planned = self.plan.bucket(t)
                prove(captured, bucket.bound[layer], get_path(planned.recipe.path), planned)
                bar.advance(task)
            self._flag.clear()

    def _warm_stage(self) -> None:
        """Compile every variant of `stage` that a caller's dtypes and addresses can ask for."""
        inputs = next(iter(self._buckets.values())).inputs
        h = self.spec.hidden_size
        storage = torch.zeros(h + 1, dtype=torch.bfloat16, device=self.device)
        weights = torch.zeros(1, self.spec.top_k, device=self.device)
        for x in (storage[:h].view(1, h), storage[1:].view(1, h)):  # row stride h: aligned and not
            for dtype in (torch.int32, torch.int64):
                ids = torch.full((1, self.spec.top_k), -1, dtype=dtype, device=self.device)
                self._ops.stage(x, ids, weights, x_out=inputs.x, ids_out=inputs.topk_ids, weights_out=inputs.topk_weights)

    def _call(self, layer: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None) -> Tensor:
        with self._lock, torch.no_grad():
            self._check_open()
            tokens = check_call(self.spec, self.device, x, topk_ids, topk_weights, out)
            chunks = self.plan.ladder.chunks(tokens)
            if len(chunks) > 1 and out is None:
                raise InvalidInput(
                    f"{tokens} tokens run in {len(chunks)} chunks of the largest bucket {self.plan.ladder.largest}: pass out= for the result"
                )
            if len(chunks) > 1 and out is not None:
                refuse_shifted_overlap(x, out)
            with self._use() as replays:
                if out is None:
                    return self._run(layer, x, topk_ids, topk_weights, replays)
                for first, size in chunks:
                    piece = slice(first, first + size)
                    out[piece].copy_(self._run(layer, x[piece], topk_ids[piece], topk_weights[piece], replays))
                return out

    def _run(self, layer: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, replays: bool) -> Tensor:
        tokens = x.shape[0]
        t = self.plan.ladder.bucket_for(tokens)
        inputs = self._buckets[t].inputs
        with self._trace("graphmoe.stage"):
            self._ops.stage(x, topk_ids, topk_weights, x_out=inputs.x, ids_out=inputs.topk_ids, weights_out=inputs.topk_weights)
        return self._replay(layer, t, replays)[:tokens]

    def _replay_bucket(self, layer: int, bucket: int) -> Tensor:
        with self._lock, torch.no_grad():
            self._bucket(bucket)
            with self._use() as replays:
                return self._replay(layer, bucket, replays)

    def _replay(self, layer: int, t: int, replays: bool) -> Tensor:
        bucket = self._buckets[t]
        if replays:
            with self._trace("graphmoe.replay"):
                self._graphs[layer, t].graph.replay()
        else:
            bucket.run(layer)
        return bucket.y

    @contextmanager
    def _use(self) -> Iterator[bool]:
        """One use of the arena, ordered after the last one on whatever stream that was; yields whether graphs are replayed.

        Not on the CPU; and not inside somebody else's capture, where the step is only recorded: no event, no copy of the flag.
        """
        if self.device.type == "cpu":
            yield False
            self._warn_if(self._flag.poll())
            return
        with self._on_device():
            if torch.cuda.is_current_stream_capturing():
                yield False
                return
            stream = self._current_stream()
            if self._last_stream is not None and self._last_stream is not stream:
                stream.wait_event(self._last_use)
            raised = False
            try:
                yield True
                raised = self._flag.poll(stream)
            finally:  # whatever was launched before an interruption still uses the arena
                self._last_use.record(stream)
                self._last_stream = stream
            self._warn_if(raised)

    def _warn_if(self, raised: bool) -> None:
        if raised:
            # Frames between here and the caller: _use, contextlib, _call or _replay_bucket, the public method.
            warnings.warn(BrokenPromise(_BROKEN), stacklevel=6)

    def _on_device(self) -> AbstractContextManager[object]:
        if self.device.type == "cpu" or torch.cuda.current_device() == self.device.index:
            return nullcontext()
        return torch.cuda.device(self.device)

    def _current_stream(self) -> torch.cuda.Stream:
        """`torch.cuda.current_stream`, its object made once a stream: making it costs as much as launching a graph."""
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if raw not in self._streams:
            self._streams[raw] = torch.cuda.current_stream(self.device)
            self._arena.used_on(self._streams[raw])
        return self._streams[raw]

    def _bucket(self, bucket: int) -> _Bucket:
        self._check_open()
        if bucket not in self._buckets:
            raise InvalidInput(f"{bucket} is not a bucket of this runtime; its buckets: {list(self.plan.ladder.sizes)}")
        return self._buckets[bucket]

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeClosed("the runtime was closed; build a new MoERuntime")

    def _release(self) -> None:
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()
        self._buckets.clear()
        del self._arena, self._flag


def _backend(made: Plan, device: torch.device) -> tuple[Ops, GroupedGemm]:
    if device.type == "cpu":
        from graphmoe.gemm.torch import TorchGemm

        return reference, TorchGemm()
    from graphmoe import kernels
    from graphmoe.gemm.deep_gemm import DeepGemm

    return kernels, DeepGemm(made.fmt, device)
