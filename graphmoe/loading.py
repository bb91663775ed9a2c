"""Read one layer's experts from a Hugging Face checkpoint: per-expert or fused names, BF16 or block FP8, one projection in memory at a time."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from graphmoe.checkpoint import SCALE_SUFFIX, CheckpointReader, expert_key, experts_prefix, some
from graphmoe.errors import CheckpointError
from graphmoe.formats import BLOCK, get_format
from graphmoe.formats.fp8_block import holds_nan
from graphmoe.sharding import IntermediateShard
from graphmoe.spec import MoESpec

SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
"""What a stored block scale may be, as safetensors says it."""

_NAMES = "names as of Qwen3-MoE and DeepSeek-V3, or fused gate_up_proj"
_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(?:(\d+)\.)?(?:gate|up|down|gate_up)_proj")


@dataclass(frozen=True)
class _Projection:
    """A projection `[rows, columns]` of one expert; in a fused tensor `[E, parts * rows, columns]` it is row block `part`."""

    name: str
    rows: int
    columns: int
    part: int = 0
    parts: int = 1


class _Source:
    """The tensors of one layer in one of the two naming schemes."""

    def __init__(self, reader: CheckpointReader, spec: MoESpec, layer: int) -> None:
        self.reader, self.spec, self.layer = reader, spec, layer
        self.fused = self._fused_key("gate_up_proj") in reader
        h, i = spec.hidden_size, spec.intermediate_size
        gate_up, parts = ("gate_up_proj", "gate_up_proj"), 2 if self.fused else 1
        names = gate_up if self.fused else ("gate_proj", "up_proj")
        self.gate = _Projection(names[0], i, h, 0, parts)
        self.up = _Projection(names[1], i, h, parts - 1, parts)
        self.down = _Projection("down_proj", h, i)
        self.not_finite: list[str] = []

    def _fused_key(self, name: str) -> str:
        return experts_prefix(self.layer) + name

    def key(self, projection: _Projection, expert: int) -> str:
        return self._fused_key(projection.name) if self.fused else expert_key(self.layer, expert, projection.name)

    def stored_shape(self, projection: _Projection, *, scale: bool) -> tuple[int, ...]:
        """What the checkpoint's tensor must be."""
        unit = BLOCK if scale else 1
        shape = (-(-projection.parts * projection.rows // unit), -(-projection.columns // unit))
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
        key = self.key(projection, expert) + (SCALE_SUFFIX if scale else "")
        if not self.fused:
            return self.reader.read(key)
        rows = projection.rows // BLOCK if scale else projection.rows
        return self.reader.read_rows(key, expert, slice(projection.part * rows, (projection.part + 1) * rows))


def load_experts(
    directory: str | os.PathLike[str], spec: MoESpec, layer: int, *, device: torch.device, tp: int, tp_rank: int, progress: bool
) -> tuple[str, int, dict[str, Tensor]]:
    """Read this rank's experts, the intermediate size cut into `tp` shards.

    Peak host memory is the result (if it stays on the CPU) plus one projection of one expert and its shard.

    Returns:
        the format's name, the intermediate size of what was read, and the tensors `w13`, `w2` (and their scales) by `ExpertWeights`' names.

    Raises:
        CheckpointError: tensors that are missing, extra, misshapen or of another dtype, bad scales (NaN, infinite, negative): all in one error;
            else weights that are NaN or infinite, seen as they are read: all in one error too.
    """
    with CheckpointReader(directory) as reader:
        source = _Source(reader, spec, layer)
        fmt = _judge(source, str(directory))
        shard = IntermediateShard.of(spec, tp, tp_rank, get_format(fmt).divisor)
        e, h, width = spec.num_local_experts, spec.hidden_size, shard.width
        dtype = torch.bfloat16 if fmt == "bf16" else torch.float8_e4m3fn
        tensors = {"w13": torch.empty(e, 2 * width, h, dtype=dtype, device=device), "w2": torch.empty(e, h, width, dtype=dtype, device=device)}
        if fmt != "bf16":
            for name, tensor in list(tensors.items()):
                shape = (e, tensor.shape[1] // BLOCK, tensor.shape[2] // BLOCK)
                tensors[f"{name}{SCALE_SUFFIX}"] = torch.empty(shape, dtype=torch.float32, device=device)

        console = Console(stderr=True)
        steps = track(range(e), f"layer {layer}", console=console, transient=True, disable=not (progress and console.is_terminal))
        for local in steps:
            for projection, name, offset, dim in ((source.gate, "w13", 0, 0), (source.up, "w13", width, 0), (source.down, "w2", 0, 1)):
                expert = spec.expert_offset + local
                scale = None if fmt == "bf16" else source.read(projection, expert, scale=True).float()
                part, part_scale = shard.cut(source.read_weight(projection, expert), scale, dim=dim)
                tensors[name][local, offset : offset + part.shape[0]].copy_(part)
                if part_scale is not None:
                    at = offset // BLOCK
                    tensors[name + SCALE_SUFFIX][local, at : at + part_scale.shape[0]].copy_(part_scale)
                del part  # before the next is read
        if source.not_finite:
            raise CheckpointError(f"{directory}: NaN or infinity in {some(source.not_finite)}; take these tensors from the original checkpoint")
    return fmt, width, tensors


def is_finite(weight: Tensor) -> bool:
    """Whether a bf16 or e4m3 tensor on the CPU is finite throughout; makes no temporary, as the stated peak of memory demands."""
    if weight.dtype == torch.float8_e4m3fn:
        return not holds_nan(weight)
    return bool(torch.stack(weight.aminmax()).isfinite().all())  # NaN if any element is


def _judge(source: _Source, directory: str) -> str:
    """The format of a layer's experts, or one error that names everything that is wrong with them."""
    spec, reader, layer = source.spec, source.reader, source.layer
    experts = range(spec.expert_offset, spec.expert_offset + spec.num_local_experts)
    projections = {source.key(projection, e): projection for e in experts for projection in (source.gate, source.up, source.down)}
    present = {key for key in reader.keys() if key.startswith(experts_prefix(layer))}  # noqa: SIM118 - not a mapping
    if not present:
        raise CheckpointError(f"{directory}: layer {layer} has no experts under {experts_prefix(layer)}; {_layers_with_experts(reader)}")
    quantised = any(key + SCALE_SUFFIX in present for key in projections)

    problems = []
    wanted = [*projections, *(key + SCALE_SUFFIX for key in projections if quantised)]
    missing = [key for key in wanted if key not in present]
    if missing:
        problems.append(f"{some(missing)} missing")
    every = {source.key(projection, e) for e in range(spec.num_experts) for projection in (source.gate, source.up, source.down)}
    extra = sorted(present - every - {key + SCALE_SUFFIX for key in every})
    if extra:
        problems.append(f"{some(extra)} not part of such a layer")
    stored = _experts_stored(source, present)
    many = f"; the layer has {stored} experts, the spec num_experts={spec.num_experts}: describe all of them, spec.shard(ep=, ep_rank=) takes a part"

    scale_dtypes = set()
    wrong = []
    for key, projection in projections.items():
        for name, scale in ((key, False), (key + SCALE_SUFFIX, True)):
            if name not in present:
                continue
            shape, dtype = reader.describe(name)
            allowed = SCALE_DTYPES if scale else ("F8_E4M3",) if quantised else ("BF16",)
            if shape != source.stored_shape(projection, scale=scale):
                wrong.append(f"{name} is {shape}, not {source.stored_shape(projection, scale=scale)}")
            elif dtype not in allowed:
                wrong.append(f"{name} is {dtype}, not {' or '.join(allowed)}")
            elif scale:
                scale_dtypes.add("F8_E8M0" if dtype == "F8_E8M0" else "other")
                values = reader.read(name).float()
                if not bool((values.isfinite() & (values >= 0)).all()):
                    wrong.append(f"{name} holds a scale that is NaN, infinite or negative")
    if wrong:
        problems.append(some(wrong))
    if len(scale_dtypes) > 1:
        problems.append("F8_E8M0 scales beside others; requantise the layer as a whole")
    if problems:
        want = f"spec wants experts {experts.start}..{experts.stop - 1} of layer {layer}, H={spec.hidden_size}, I={spec.intermediate_size}"
        help_ = f"{_NAMES}; the spec's I is the whole model's: a shard is read with tp=, tp_rank="
        raise CheckpointError(f"{directory}: {'; '.join(problems)}; {want} ({help_}){many if stored > spec.num_experts else ''}")
    fmt = "bf16" if not quantised else "ue8m0" if scale_dtypes == {"F8_E8M0"} else "fp8_block"
    get_format(fmt).check(spec)
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
