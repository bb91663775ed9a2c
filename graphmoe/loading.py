"""Read one layer's experts from a Hugging Face checkpoint: per-expert or fused names, BF16, block FP8 or W4AFP8, one projection at a time."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from graphmoe.checkpoint import DTYPES, SCALE_SUFFIX, CheckpointReader, expert_prefix, experts_prefix, some
from graphmoe.errors import CheckpointError
from graphmoe.formats import FORMATS, Format
from graphmoe.formats.fp8_block import holds_nan
from graphmoe.formats.w4afp8 import GROUPS, one_input_scale
from graphmoe.sharding import IntermediateShard
from graphmoe.spec import MoESpec

SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
"""What a stored block scale may be, as safetensors says it."""

GROUP_SCALE_DTYPES = ("F32", "BF16", "F16")
"""What a scale of `w4afp8` may be."""

_NAMES = "names as of Qwen3-MoE and DeepSeek-V3, or fused gate_up_proj"
_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(?:(\d+)\.)?(?:gate|up|down|gate_up)_proj")


@dataclass(frozen=True)
class _Projection:
    """A projection `[rows, columns]` of one expert; in a fused tensor `[E, parts * rows, columns]` it is row block `part`.

    `other_name` is what Mixtral calls it, and in W4AFP8 checkpoints its input scale.
    """

    name: str
    other_name: str
    rows: int
    columns: int
    part: int = 0
    parts: int = 1


class _Source:
    """The tensors of one layer in one of the two naming schemes, and the format that their names and dtypes tell."""

    def __init__(self, reader: CheckpointReader, spec: MoESpec, layer: int) -> None:
        self.reader, self.spec, self.layer = reader, spec, layer
        self.fused = self._fused_key("gate_up_proj") in reader
        h, i = spec.hidden_size, spec.intermediate_size
        gate_up, parts = ("gate_up_proj", "gate_up_proj"), 2 if self.fused else 1
        names = gate_up if self.fused else ("gate_proj", "up_proj")
        self.gate = _Projection(names[0], "w1", i, h, 0, parts)
        self.up = _Projection(names[1], "w3", i, h, parts - 1, parts)
        self.down = _Projection("down_proj", "w2", h, i)
        self.projections = (self.gate, self.up, self.down)
        self.present = {key for key in reader.keys() if key.startswith(experts_prefix(layer))}  # noqa: SIM118 - not a mapping
        self.suffix = "weight_packed" if any(key.endswith(".weight_packed") for key in self.present) else "weight"
        self.experts = range(spec.expert_offset, spec.expert_offset + spec.num_local_experts)
        self.format = self._format()
        self.not_finite: list[str] = []

    def _format(self) -> Format:
        """Quantised weights have scales; they are int4 where their names say packed, or where they are int8 and none is e4m3."""
        every = [(projection, e) for e in self.experts for projection in self.projections]
        scaled = [one for one in every if self.scale_key(*one) in self.present]
        dtypes = {self.reader.describe(self.key(*one))[1] for one in every if self.key(*one) in self.present}
        if self.suffix == "weight" and not (scaled and "I8" in dtypes and "F8_E4M3" not in dtypes):
            return FORMATS["fp8_block" if scaled else "bf16"]
        for projection, e in scaled[:1]:
            shape, _ = self.reader.describe(self.scale_key(projection, e))
            for group in GROUPS:
                if shape[-1:] == (projection.columns // group,):
                    return replace(FORMATS["w4afp8"], block=(1, group))
        return FORMATS["w4afp8"]

    def _fused_key(self, name: str) -> str:
        return experts_prefix(self.layer) + name

    def key(self, projection: _Projection, expert: int) -> str:
        """Name of the weight that a projection is in."""
        return self._fused_key(projection.name) if self.fused else f"{expert_prefix(self.layer, expert)}{projection.name}.{self.suffix}"

    def scale_key(self, projection: _Projection, expert: int) -> str:
        """Name of its scales."""
        return (self.key(projection, expert) if self.fused else f"{expert_prefix(self.layer, expert)}{projection.name}.weight") + SCALE_SUFFIX

    def input_scale_key(self, projection: _Projection, expert: int) -> str:
        """Name of the scale of its activations, under which of two names it is here."""
        first, second = (f"{expert_prefix(self.layer, expert)}{name}.input_scale" for name in (projection.name, projection.other_name))
        return second if second in self.present else first

    def stored_shape(self, projection: _Projection, *, scale: bool) -> tuple[int, ...]:
        """What the checkpoint's tensor must be."""
        shape_of = self.format.scale_shape if scale else self.format.stored_shape
        shape = shape_of(projection.parts * projection.rows, projection.columns)
        return (self.spec.num_experts, *shape) if self.fused else shape

    def read_weight(self, projection: _Projection, expert: int) -> Tensor:
        """One expert's projection; its name goes into `not_finite` if it holds NaN or infinity."""
        weight = self.read(projection, expert, scale=False)
        name = self.key(projection, expert) + (f"[{expert}]" if self.fused else "")
        if not is_finite(weight) and name not in self.not_finite:
            self.not_finite.append(name)
        return weight

    def read(self, projection: _Projection, expert: int, *, scale: bool) -> Tensor:
        """One expert's projection or its scales; of a fused tensor only that expert's rows are read."""
        key = self.scale_key(projection, expert) if scale else self.key(projection, expert)
        if not self.fused:
            return self.reader.read(key)
        rows = projection.rows // self.format.block[0] if scale else projection.rows
        return self.reader.read_rows(key, expert, slice(projection.part * rows, (projection.part + 1) * rows))

    def input_scale(self, *projections: _Projection) -> Tensor | None:
        """One for all experts that the checkpoint has, of this rank or not: then ranks agree on how a token is rounded before it is sent to them."""
        keys = [self.input_scale_key(projection, e) for e in range(self.spec.num_experts) for projection in projections]
        found = [self.reader.read(key).float().flatten() for key in keys if key in self.present]
        return one_input_scale(torch.cat(found)) if found else None


def load_experts(
    directory: str | os.PathLike[str], spec: MoESpec, layer: int, *, device: torch.device, tp: int, tp_rank: int, progress: bool
) -> tuple[str, int, dict[str, Tensor]]:
    """Read this rank's experts, the intermediate size cut into `tp` shards.

    Peak host memory is the result (if it stays on the CPU) plus one projection of one expert and its shard.

    Returns:
        the format's name, the intermediate size of what was read, and the tensors `w13`, `w2` (and their scales, and those of their activations)
        by `ExpertWeights`' names.

    Raises:
        CheckpointError: tensors that are missing, extra, misshapen or of another dtype, bad scales (NaN, infinite, negative): all in one error;
            else weights that are NaN or infinite, seen as they are read: all in one error too.
    """
    with CheckpointReader(directory) as reader:
        source = _Source(reader, spec, layer)
        fmt = _judge(source, str(directory))
        shard = IntermediateShard.of(spec, tp, tp_rank, fmt.divisor)
        e, h, width = spec.num_local_experts, spec.hidden_size, shard.width
        dtype, scale_dtype = getattr(torch, fmt.weight_dtype), getattr(torch, fmt.scale_dtype)
        tensors = {}
        for name, rows, columns in (("w13", 2 * width, h), ("w2", h, width)):
            tensors[name] = torch.empty(e, *fmt.stored_shape(rows, columns), dtype=dtype, device=device)
            if fmt.scales is not None:
                tensors[name + SCALE_SUFFIX] = torch.empty(e, *fmt.scale_shape(rows, columns), dtype=scale_dtype, device=device)

        console = Console(stderr=True)
        steps = track(range(e), f"layer {layer}", console=console, transient=True, disable=not (progress and console.is_terminal))
        for local in steps:
            for projection, name, offset, dim in ((source.gate, "w13", 0, 0), (source.up, "w13", width, 0), (source.down, "w2", 0, 1)):
                expert = spec.expert_offset + local
                scale = None if fmt.scales is None else source.read(projection, expert, scale=True).to(scale_dtype)
                per_element, per_scale = (1, fmt.block[0]) if dim == 0 else (fmt.per_element, fmt.block[1])
                part, part_scale = shard.cut(source.read_weight(projection, expert), scale, dim=dim, per_element=per_element, per_scale=per_scale)
                tensors[name][local, offset : offset + part.shape[0]].copy_(part)
                if part_scale is not None:
                    at = offset // fmt.block[0]
                    tensors[name + SCALE_SUFFIX][local, at : at + part_scale.shape[0]].copy_(part_scale)
                del part  # before the next is read
        if source.not_finite:
            raise CheckpointError(f"{directory}: NaN or infinity in {some(source.not_finite)}; take these tensors from the original checkpoint")
        for name, projections in (("w13", (source.gate, source.up)), ("w2", (source.down,))):
            input_scale = source.input_scale(*projections)
            if input_scale is not None:
                tensors[f"{name}_input_scale"] = input_scale.to(device)
    return fmt.name, width, tensors


def is_finite(weight: Tensor) -> bool:
    """Whether a bf16, e4m3 or int8 tensor on the CPU is finite throughout; makes no temporary, as the stated peak of memory demands."""
    if weight.dtype == torch.int8:
        return True
    if weight.dtype == torch.float8_e4m3fn:
        return not holds_nan(weight)
    return bool(torch.stack(weight.aminmax()).isfinite().all())  # NaN if any element is


def _judge(source: _Source, directory: str) -> Format:
    """The format of a layer's experts, or one error that names everything that is wrong with them."""
    spec, reader, layer, present, experts, fmt = source.spec, source.reader, source.layer, source.present, source.experts, source.format
    weights = {source.key(projection, e): projection for e in experts for projection in source.projections}
    scales = {source.scale_key(projection, e): projection for e in experts for projection in source.projections}
    if not present:
        raise CheckpointError(f"{directory}: layer {layer} has no experts under {experts_prefix(layer)}; {_layers_with_experts(reader)}")

    problems = []
    every = [(projection, e) for e in range(spec.num_experts) for projection in source.projections]
    inputs = {source.input_scale_key(*one): one[1] for one in every} if fmt.name == "w4afp8" and not source.fused else {}
    known = {source.key(*one) for one in every} | {source.scale_key(*one) for one in every} | set(inputs)
    found_inputs = [key for key in inputs if key in present]
    wanted = [*weights, *(scales if fmt.scales is not None else ()), *(key for key, e in inputs.items() if found_inputs and e in experts)]
    missing = [key for key in wanted if key not in present]
    if missing:
        problems.append(f"{some(missing)} missing")
    extra = sorted(present - known)
    if extra:
        problems.append(f"{some(extra)} not part of such a layer")
    stored = _experts_stored(source, present)
    many = f"; the layer has {stored} experts, the spec num_experts={spec.num_experts}: describe all of them, spec.shard(ep=, ep_rank=) takes a part"

    scale_dtypes = set()
    wrong = []
    int4 = fmt.name == "w4afp8"
    groups = f" (one for {', '.join(map(str, GROUPS))} columns)" if int4 else ""
    for (key, projection), scale_key in zip(weights.items(), scales, strict=True):
        for name, scale in ((key, False), (scale_key, True)):
            if name not in present:
                continue
            shape, dtype = reader.describe(name)
            allowed = (GROUP_SCALE_DTYPES if int4 else SCALE_DTYPES) if scale else (DTYPES[getattr(torch, fmt.weight_dtype)],)
            if shape != source.stored_shape(projection, scale=scale):
                wrong.append(f"{name} is {shape}, not {source.stored_shape(projection, scale=scale)}{groups if scale else ''}")
            elif dtype not in allowed:
                wrong.append(f"{name} is {dtype}, not {' or '.join(allowed)}")
            elif scale:
                scale_dtypes.add("F8_E8M0" if dtype == "F8_E8M0" else "other")
                values = reader.read(name).to(getattr(torch, fmt.scale_dtype))
                if not bool((values.isfinite() & ((values >= 0) | int4)).all()):
                    wrong.append(f"{name} holds a scale that is NaN, infinite or {'beyond bfloat16' if int4 else 'negative'}")
    for key in found_inputs:
        shape, dtype = reader.describe(key)
        if shape not in ((), (1,)) or dtype not in GROUP_SCALE_DTYPES:
            wrong.append(f"{key} is {dtype} {shape}, not {' or '.join(GROUP_SCALE_DTYPES)} (1,)")
        elif not 0 < float(reader.read(key)) < float("inf"):
            wrong.append(f"{key} is {float(reader.read(key))}, not finite and positive")
    if wrong:
        problems.append(some(wrong))
    if len(scale_dtypes) > 1:
        problems.append("F8_E8M0 scales beside others; requantise the layer as a whole")
    if problems:
        want = f"spec wants experts {experts.start}..{experts.stop - 1} of layer {layer}, H={spec.hidden_size}, I={spec.intermediate_size}"
        help_ = f"{_NAMES}; the spec's I is the whole model's: a shard is read with tp=, tp_rank="
        raise CheckpointError(f"{directory}: {'; '.join(problems)}; {want} ({help_}){many if stored > spec.num_experts else ''}")
    fmt = FORMATS["ue8m0"] if scale_dtypes == {"F8_E8M0"} else fmt
    fmt.check(spec)
    return fmt


def _layers_with_experts(reader: CheckpointReader) -> str:
    layers = sorted({int(found[1]) for key in reader.keys() if (found := _EXPERTS.match(key))})  # noqa: SIM118 - not a mapping
    if not layers:
        return f"no layer of this checkpoint has ({_NAMES})"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return "layers that have: " + some([str(first) if first == last else f"{first}..{last}" for first, last in runs])


def _experts_stored(source: _Source, present: set[str]) -> int:
    """Experts of the layer in the checkpoint."""
    if source.fused:
        shape, _ = source.reader.describe(source.key(source.gate, 0))
        return shape[0] if shape else 0
    return 1 + max((int(found[2]) for key in present if (found := _EXPERTS.match(key)) and found[2]), default=-1)
