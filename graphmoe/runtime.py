"""MoERuntime: build once, then run any batch in its bucket without allocating, synchronising or deciding anything."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from graphmoe.audit import Audit, Region
from graphmoe.buckets import BucketLadder, Overflow
from graphmoe.build import Bucket, Built, StaticInputs, add_layer, build
from graphmoe.call import check_call, refuse_lent_memory, refuse_shifted_overlap
from graphmoe.device import arch_of, device_guard, resolve_device
from graphmoe.errors import BrokenPromise, CallError, InvalidInput, RuntimeClosed, WeightsMismatch
from graphmoe.op import recorded, register
from graphmoe.ops import Ops
from graphmoe.planner import Plan, plan
from graphmoe.profile import Profile, profile_for
from graphmoe.recipe import Recipe
from graphmoe.report import BucketReport, RuntimeReport
from graphmoe.spec import MoESpec
from graphmoe.step import trace_for
from graphmoe.weights import ExpertWeights

logger = logging.getLogger("graphmoe")

_BROKEN = (
    "a token named one expert twice although the spec promises distinct_topk (NaN router logits do that); "
    "its output is NaN. Fix the router, or build with distinct_topk=False; rt.clear_flag() re-arms this warning"
)


class _Core:
    """What a runtime and its layers share, so that neither keeps the other alive: the lock, the order of uses, calls."""

    def __init__(self, spec: MoESpec, built: Built) -> None:
        self.number = register(self)
        self.spec = spec
        self.plan = built.plan
        self.device = built.device
        self.built: Built | None = built
        self._trace = trace_for(built.device)
        self._lock = threading.RLock()
        self._last_use = torch.cuda.Event() if built.device.type == "cuda" else None
        self._last_stream: torch.cuda.Stream | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._busy = False

    def open(self) -> Built:
        if self.built is None:
            raise RuntimeClosed("the runtime was closed; build a new MoERuntime")
        return self.built

    def bucket(self, bucket: int) -> Bucket:
        buckets = self.open().buckets
        if bucket not in buckets:
            raise InvalidInput(f"{bucket} is not a bucket of this runtime; its buckets: {list(self.plan.ladder.sizes)}")
        return buckets[bucket]

    def require_layer(self, layer: int) -> None:
        layers = len(self.open().weights)
        if layer not in range(layers):
            raise InvalidInput(f"{layer} is not a layer of this runtime; it has layers 0 to {layers - 1}")

    def call(self, layer: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None) -> Tensor:
        with self._lock, torch.no_grad():
            built = self.open()
            tokens = check_call(self.spec, self.device, x, topk_ids, topk_weights, out)
            chunks = self.plan.ladder.chunks(tokens)
            if len(chunks) > 1 and out is None:
                raise InvalidInput(
                    f"{tokens} tokens run in {len(chunks)} chunks of the largest bucket {self.plan.ladder.largest}: pass out= for the result"
                )
            if len(chunks) > 1 and out is not None:
                refuse_shifted_overlap(x, topk_ids, topk_weights, out)
            largest = built.buckets[self.plan.ladder.largest]
            refuse_lent_memory(built.arena, largest, x, topk_ids, topk_weights, out, chunked=len(chunks) > 1)
            built.watches[layer].check()
            with self._use() as replays:
                if out is None:
                    return self._run(built, layer, x, topk_ids, topk_weights, replays)
                for first, size in chunks:
                    piece = slice(first, first + size)
                    out[piece].copy_(self._run(built, layer, x[piece], topk_ids[piece], topk_weights[piece], replays))
                return out

    def replay(self, layer: int, bucket: int) -> Tensor:
        with self._lock, torch.no_grad():
            self.bucket(bucket)
            self.open().watches[layer].check()
            with self._use() as replays:
                return self._replay(self.open(), layer, bucket, replays)

    def refresh(self, layer: int) -> None:
        with self._lock, torch.no_grad():
            built = self.open()
            self.require_layer(layer)
            with self._outside_capture("refreshed weights are copied"):
                built.watches[layer].refresh(self.plan.arch)

    def rebind(self, weights: Sequence[ExpertWeights]) -> None:
        with self._lock:
            old = self.open()
            if self._busy:
                raise CallError("rebind() was called from inside a call of the same runtime; call it when the call is done")
            if self._last_use is not None:
                torch.cuda.synchronize(self.device)
            with torch.inference_mode(False), torch.no_grad(), device_guard(self.device):
                self.built = build(self.plan, weights, self.device, progress=False, capture=old.captures, audit=old.audited, over=old)
            self._streams.clear()  # new weights are to be kept for every stream, too
            old.release()

    def add_layer(self, weights: ExpertWeights) -> int:
        with self._lock, torch.inference_mode(False), torch.no_grad(), self._outside_capture("a layer is added"):
            built = self.open()
            if self._busy:
                raise CallError("a layer cannot be added from inside a call of the same runtime; add it when the call is done")
            add_layer(built, weights)
            self._streams.clear()  # the new weights are to be kept for every stream, too
            return len(built.weights) - 1

    def read_flag(self) -> bool:
        with self._lock, self._outside_capture("the flag of broken promises is read"):
            return self.open().flag.read()

    def clear_flag(self) -> None:
        with self._lock, self._outside_capture("the flag of broken promises is cleared"):
            self.open().flag.clear()

    def close(self) -> None:
        with self._lock:
            if self.built is None:
                return
            if self._busy:
                raise CallError("close() was called from inside a call of the same runtime (a signal handler?); close it when the call is done")
            if self._last_use is not None and torch.cuda.is_current_stream_capturing():
                raise CallError("close() waits for the device, which the current stream's capture forbids; close the runtime after the capture")
            built, self.built = self.built, None
            try:
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
            finally:
                built.release()

    @contextmanager
    def opened(self) -> Iterator[Built]:
        """What runs, which stays open until the block ends."""
        with self._lock:
            yield self.open()

    def _run(self, built: Built, layer: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, replays: bool) -> Tensor:
        tokens = x.shape[0]
        t = self.plan.ladder.bucket_for(tokens)
        inputs = built.buckets[t].inputs
        with self._trace("graphmoe.stage"):
            built.ops.stage(x, topk_ids, topk_weights, x_out=inputs.x, ids_out=inputs.topk_ids, weights_out=inputs.topk_weights)
        return self._replay(built, layer, t, replays)[:tokens]

    def _replay(self, built: Built, layer: int, t: int, replays: bool) -> Tensor:
        bucket = built.buckets[t]
        if replays:
            with self._trace("graphmoe.replay"):
                built.graphs[layer, t].graph.replay()
        else:
            bucket.run(layer)
        return bucket.y

    @contextmanager
    def _use(self) -> Iterator[bool]:
        """One use of the arena; yields whether graphs are replayed.

        Not on the CPU; and not inside somebody else's capture, where the step is only recorded: no event, no copy of the flag.
        """
        flag = self.open().flag
        raised = False
        self._busy = True
        try:
            if self._last_use is None:
                yield False
                raised = flag.poll()
            else:
                with device_guard(self.device):
                    if torch.cuda.is_current_stream_capturing():
                        yield False
                    else:
                        with self._in_order(self._last_use) as stream:
                            yield self.open().captures
                            raised = flag.poll(stream)
        finally:
            self._busy = False
        self._warn_if(raised)

    @contextmanager
    def _outside_capture(self, what: str) -> Iterator[None]:
        """Work on the arena, in order, that a graph cannot record."""
        if self._last_use is None:
            yield
            return
        with device_guard(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise CallError(f"{what} outside of graphs only: the current stream captures one")
            with self._in_order(self._last_use):
                yield

    @contextmanager
    def _in_order(self, last_use: torch.cuda.Event) -> Iterator[torch.cuda.Stream]:
        """Work on the arena that the current stream does after the last one's, on whatever stream that was."""
        stream = self._current_stream()
        if self._last_stream is not None and self._last_stream is not stream:
            stream.wait_event(last_use)
        try:
            yield stream
        finally:  # whatever was launched before an interruption still uses the arena
            last_use.record(stream)
            self._last_stream = stream

    def _warn_if(self, raised: bool) -> None:
        if raised:
            with warnings.catch_warnings():  # each time it is raised, not once a source line; any filter of the user's comes first
                warnings.simplefilter("always", BrokenPromise, append=True)
                # Frames between here and the caller: _use, contextlib, call or replay, the public method.
                warnings.warn(BrokenPromise(_BROKEN), stacklevel=6)

    def _current_stream(self) -> torch.cuda.Stream:
        """`torch.cuda.current_stream`, its object made once a stream: making it costs as much as launching a graph."""
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if raw not in self._streams:
            self._streams[raw] = torch.cuda.current_stream(self.device)
            self.open().used_on(self._streams[raw])
        return self._streams[raw]


class MoELayer:
    """One layer of a runtime; made by it, shares its arena."""

    def __init__(self, core: _Core, index: int) -> None:
        self._core = core
        self._index = index

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See `MoERuntime.__call__`."""
        if torch.compiler.is_compiling():
            return recorded(x, topk_ids, topk_weights, out, self._core.number, self._index)
        return self._core.call(self._index, x, topk_ids, topk_weights, out)

    def __repr__(self) -> str:
        return f"MoELayer({self._index}, {self._core.plan.fmt} on {self._core.device})"

    def replay(self, bucket: int) -> Tensor:
        """See `MoERuntime.replay`."""
        return self._core.replay(self._index, bucket)

    @property
    def spec(self) -> MoESpec:
        return self._core.spec

    @property
    def device(self) -> torch.device:
        return self._core.device

    @property
    def ops(self) -> Ops:
        """The kernels that it runs on, or their twins on a CPU. Raises RuntimeClosed."""
        return self._core.open().ops


class MoERuntime:
    """MoE layers whose every batch size up to the largest bucket is planned, allocated and captured.

    On CUDA each (layer, bucket) is one CUDA graph around route -> scatter -> grouped GEMM -> SwiGLU -> grouped GEMM -> combine.
    On the CPU the same step runs on the same static buffers with the kernels' torch twins.

    Calls from several threads or streams are put in order, one after the other. A graph of your own that recorded a call is not known to the
    runtime: order its replays and the runtime's own calls yourself (one stream does).

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
        profile: measured recipes for the buckets that are auto: `"auto"` looks for the shipped profile of this device, shape and format (on the CPU
            there is none), None uses none, a Profile is used as it is.
        progress: show a progress bar while capturing (only on a terminal).
        capture: on CUDA, record one graph per layer and bucket. False only warms the kernels up, and a call issues them one by one: for calls that a
            larger graph of your own records.
        audit: after capture, read every graph back and refuse the runtime (CaptureError) unless all that it touches lies in the arena, the weights,
            the static inputs and the output.

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
        profile: Profile | Literal["auto"] | None = "auto",
        progress: bool = True,
        capture: bool = True,
        audit: bool = False,
    ) -> None:
        all_weights = _layers_of(spec, weights, layers)
        self.spec = spec
        self.device = resolve_device(all_weights[0].device if device is None else device)
        fmt = all_weights[0].fmt
        device_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        self.plan: Plan = plan(
            spec,
            BucketLadder.of(buckets, overflow),
            fmt=fmt,
            arch=arch_of(self.device),
            recipes=path,
            max_arena_bytes=max_arena_bytes,
            guard_bytes=guard_bytes,
            profile=profile_for(profile, spec, fmt, device_name),
        )
        started = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad(), device_guard(self.device):
            built = build(self.plan, all_weights, self.device, progress=progress, capture=capture, audit=audit)
        self._build_seconds = time.perf_counter() - started
        self._core = _Core(spec, built)
        self.layers = tuple(MoELayer(self._core, index) for index in range(len(all_weights)))
        logger.info(
            "built %d layer(s) x %d bucket(s) on %s: arena %.2f MiB, %d graph(s), %.2f s",
            len(self.layers), len(built.buckets), self.device, built.arena.nbytes / 2**20, len(built.graphs), self._build_seconds,
        )  # fmt: skip
        for bucket in self.plan.buckets:
            logger.debug("bucket %d: %s, %d rows (%s)", bucket.tokens, bucket.recipe, bucket.rows, bucket.rule)

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Run the layer on `t` tokens.

        Args:
            x: bf16 `[t, H]`, unit column stride. May be a `y` that this runtime returned.
            topk_ids: int32 or int64 `[t, K]`, local ids; -1 or any id outside `[0, E)` is not on this rank.
            topk_weights: float32 `[t, K]`.
            out: bf16 `[t, H]`, unit column stride, to copy the result to. Required when `overflow="chunk"` splits the batch.

        Returns:
            bf16 `[t, H]`: `out`, or else a view that the next call of any layer or bucket overwrites. A token whose ids break `distinct_topk` is
            NaN, and this or a later call warns BrokenPromise (calls that a graph of yours recorded never do: `report` shows it). On a tensor- or
            expert-parallel rank this is the rank's part of the sum: add up the ranks' outputs. Under `torch.compile` the call is one op and the
            result a tensor of its own; code that torch runs eagerly after all (beyond its limit of recompilations) gets a view like any other caller.
            No gradient flows through it.

        Raises:
            InvalidInput, BatchTooLarge, RuntimeClosed; the runtime stays usable (unless it was closed).
        """
        if len(self.layers) > 1:
            raise CallError(f"this runtime has {len(self.layers)} layers: call rt.layers[i](...)")
        if torch.compiler.is_compiling():
            return recorded(x, topk_ids, topk_weights, out, self._core.number, 0)
        return self._core.call(0, x, topk_ids, topk_weights, out)

    @property
    def number(self) -> int:
        """What the op `graphmoe::layer` calls this runtime by, in this process."""
        return self._core.number

    def __repr__(self) -> str:
        state = "closed" if self._core.built is None else f"{len(self.layers)} layer(s), buckets up to {self.plan.ladder.largest}"
        return f"MoERuntime({self.plan.fmt} on {self.device}, {state})"

    def inputs(self, bucket: int) -> StaticInputs:
        """The static input buffers of a bucket, to write directly before `replay(bucket)`."""
        return self._core.bucket(bucket).inputs

    def replay(self, bucket: int) -> Tensor:
        """Run the layer on what the bucket's static inputs hold. Returns bf16 `[bucket, H]`, a view that the next call overwrites."""
        if len(self.layers) > 1:
            raise CallError(f"this runtime has {len(self.layers)} layers: call rt.layers[i].replay(bucket)")
        return self._core.replay(0, bucket)

    def report(self) -> RuntimeReport:
        """What was built, per bucket: recipe, row bound, bytes, kernels, capture seconds; and whether a promise was broken. Waits for the device."""
        with self._core.opened() as built:
            return self._report(built, self._core.read_flag())

    def _report(self, built: Built, promise_broken: bool) -> RuntimeReport:
        buckets = []
        for bucket in self.plan.buckets:
            graphs = [graph for (_, t), graph in built.graphs.items() if t == bucket.tokens]
            buckets.append(
                BucketReport(
                    tokens=bucket.tokens,
                    recipe=str(bucket.recipe),
                    rule=bucket.rule,
                    rows=bucket.rows,
                    bucket_bytes=self.plan.bucket_bytes(bucket),
                    kernels=len(graphs[0].kernels) if graphs else built.buckets[bucket.tokens].bound[0].launches,
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
            graphs=len(built.graphs),
            arena_bytes=built.arena.nbytes,
            capture_allocations=sum(graph.allocations for graph in built.graphs.values()),
            build_seconds=self._build_seconds,
            promise_broken=promise_broken,
            fingerprint=self.plan.fingerprint,
            buckets=tuple(buckets),
        )

    def audit(self) -> dict[tuple[int, int], Audit]:
        """Read every captured graph back, by (layer, bucket): its nodes, and the proof that each address that a kernel was given begins in the static
        buffers, the arena or the layer's weights. A graph is proven if its audit has no findings. There are none on the CPU.

        Raises:
            CaptureError: the driver does not give a graph back.
        """
        with self._core.opened() as built, device_guard(self.device):
            return built.audit()

    def regions(self, layer: int, bucket: int) -> list[Region]:
        """The memory that one graph may touch, by name: what `audit` holds its addresses against."""
        with self._core.opened() as built:
            self._core.bucket(bucket)
            self._core.require_layer(layer)
            return built.regions(layer, bucket)

    def clear_flag(self) -> None:
        """Lower the flag of broken promises; the next one warns again."""
        self._core.clear_flag()

    def refresh(self, layer: int = 0) -> None:
        """Renew this runtime's copy of weights that were updated in place: it has one if they were given on another device, or if their scales are
        packed. Where it uses the given memory itself, the next call sees the update and this does nothing.

        Raises:
            WeightsMismatch: a weight's storage was replaced or freed: see `rebind`.
        """
        self._core.refresh(layer)

    def add_layer(self, weights: ExpertWeights) -> MoELayer:
        """One more layer on the same arena, captured like the others; it is the last of `layers` from then on.

        Raises:
            WeightsMismatch: weights of another spec or format than the runtime's.
            CallError: inside a capture or a call. CaptureError and what else building raises; the runtime is as before.
        """
        (given,) = _layers_of(self.spec, weights, None)
        if given.fmt != self.plan.fmt:
            raise WeightsMismatch(f"the runtime's layers are of format {self.plan.fmt!r}, this one is {given.fmt!r}; build a new runtime")
        added = MoELayer(self._core, self._core.add_layer(given))
        self.layers = (*self.layers, added)
        return added

    def rebind(self, weights: ExpertWeights | None = None, *, layers: Sequence[ExpertWeights] | None = None) -> None:
        """Use other weights: every graph is captured anew on the same arena and all are swapped at once. Static inputs stay where they are.

        Args:
            weights: of a runtime of one layer ...
            layers: ... or of all its layers.

        Raises:
            WeightsMismatch: weights of another number, spec or format than the runtime was built for.
            CaptureError and what else building raises; the old graphs work as before.
        """
        given = _layers_of(self.spec, weights, layers)
        if len(given) != len(self.layers) or given[0].fmt != self.plan.fmt:
            raise WeightsMismatch(
                f"the runtime has {len(self.layers)} layer(s) of format {self.plan.fmt!r}, these are {len(given)} of {given[0].fmt!r}; "
                "build a new runtime"
            )
        self._core.rebind(given)

    def close(self) -> None:
        """Drop every graph, the arena and the references to weights. Later calls raise RuntimeClosed; closing twice is fine.

        A graph of your own that recorded a call reads the arena too: do not replay it after this.
        """
        self._core.close()

    def __enter__(self) -> MoERuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _layers_of(spec: MoESpec, weights: ExpertWeights | None, layers: Sequence[ExpertWeights] | None) -> list[ExpertWeights]:
    """The weights of every layer out of the two ways to give them, checked against the spec."""
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
    return all_weights
