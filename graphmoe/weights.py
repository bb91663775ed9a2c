"""The expert weights of one layer: made from tensors, checked once, saved to and loaded from Hugging Face checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe.checkpoint import SCALE_SUFFIX, expert_key, expert_prefix, experts_prefix, write_tensors
from graphmoe.device import resolve_device
from graphmoe.errors import WeightsMismatch
from graphmoe.formats import BLOCK, SCALES_PER_WORD, Format, ScaleFormat, get_format, ue8m0, w4afp8
from graphmoe.formats.fp8_block import dequantize_weight, holds_nan, quantize_weight
from graphmoe.formats.ue8m0 import is_power_of_two, pack_weight_scale, requantize_ue8m0
from graphmoe.loading import load_experts
from graphmoe.sharding import IntermediateShard
from graphmoe.spec import MoESpec


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Expert weights of one layer on one device; checked against the spec when made.

    Attributes:
        spec: the layer they belong to.
        fmt: `"fp8_block"`, `"ue8m0"` (its scales are powers of two), `"bf16"`, or `"w4afp8"`.
        w13: `[E, 2I, H]`, gate rows first; e4m3 or bf16. int8 `[E, 2I, H/2]` for w4afp8, two columns in a byte.
        w2: `[E, H, I]`, or `[E, H, I/2]`.
        w13_scale_inv: float32 `[E, 2I/128, H/128]`, or bf16 `[E, 2I, H/128]` for w4afp8 (or H/64, H/32), or None for bf16.
        w2_scale_inv: float32 `[E, H/128, I/128]`, or bf16 `[E, H, I/128]`, or None.
        w13_input_scale: for w4afp8, float32 `[]`: tokens are rounded to e4m3 as `token / scale`. None where each token and group has its own scale,
            which the path `gathered_w4` gives them in any case.
        w2_input_scale: the same for SwiGLU results.
        tp: tensor-parallel ranks for which the intermediate size was cut; 1 is the whole of it.
        origins: by name, the caller's own tensors that these share memory with; a runtime watches them too.
    """

    spec: MoESpec
    fmt: str
    w13: Tensor = field(repr=False)
    w2: Tensor = field(repr=False)
    w13_scale_inv: Tensor | None = field(default=None, repr=False)
    w2_scale_inv: Tensor | None = field(default=None, repr=False)
    w13_input_scale: Tensor | None = field(default=None, repr=False, kw_only=True)
    w2_input_scale: Tensor | None = field(default=None, repr=False, kw_only=True)
    tp: int = field(default=1, kw_only=True)
    origins: Mapping[str, Tensor] = field(default_factory=dict, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        shared = {name: origin for name, origin in self.origins.items() if _same_memory(origin, getattr(self, name))}
        object.__setattr__(self, "origins", shared)
        spec, scaled = self.spec, self._format.scales is not None
        if scaled != (self.w13_scale_inv is not None) or scaled != (self.w2_scale_inv is not None):
            raise WeightsMismatch(f"format {self.fmt!r} {'needs both scales' if scaled else 'has no scales'}")
        for name, shape in (("w13", _w13_shape(spec)), ("w2", _w2_shape(spec))):
            tensor, scale = getattr(self, name), getattr(self, f"{name}_scale_inv")
            _check(name, tensor, (shape[0], *self._format.stored_shape(*shape[1:])), (getattr(torch, self._format.weight_dtype),))
            _check_strides(name, tensor)
            if tensor.device != self.device:
                raise WeightsMismatch(f"{name} is on {tensor.device}, w13 on {self.device}; move them to one device")
            if scale is not None:
                self._check_scale(f"{name}_scale_inv", scale, shape)
        self._check_input_scales()

    @property
    def _format(self) -> Format:
        """With the groups that these weights have."""
        of = get_format(self.fmt)
        if self.fmt != "w4afp8" or self.w13_scale_inv is None or self.w13_scale_inv.dim() != 3:
            return of
        if self.w13.dtype == torch.uint8:  # prepared
            return replace(of, weight_dtype="uint8")
        return replace(of, block=(1, w4afp8.group_of(self.spec.hidden_size, self.w13_scale_inv.shape[-1])))

    def _check_input_scales(self) -> None:
        for name, scale in (("w13_input_scale", self.w13_input_scale), ("w2_input_scale", self.w2_input_scale)):
            if scale is None:
                continue
            if self.fmt != "w4afp8":
                raise WeightsMismatch(f"{name} is given, but activations of format {self.fmt!r} have scales of their own; leave it out")
            _check(name, scale, (), (torch.float32,))
            if scale.device != self.device:
                raise WeightsMismatch(f"{name} is on {scale.device}, w13 on {self.device}; move them to one device")
            if not scale.is_meta and not 0 < float(scale) < float("inf"):
                raise WeightsMismatch(f"{name} is {float(scale)}; it must be finite and positive")
        if (self.w13_input_scale is None) != (self.w2_input_scale is None):
            raise WeightsMismatch("one input scale is given; give both, or none for scales per token")

    def _check_scale(self, name: str, scale: Tensor, shape: tuple[int, int, int]) -> None:
        experts, rows, columns = shape
        if scale.device != self.device:
            raise WeightsMismatch(f"{name} is on {scale.device}, w13 on {self.device}; move them to one device")
        if scale.dtype == torch.int32 and self.fmt == "ue8m0":  # packed, see `prepared`
            _check(name, scale, (experts, rows, -(-columns // (BLOCK * SCALES_PER_WORD))), (torch.int32,))
            return
        block_rows, block_columns = self._format.scale_shape(rows, columns)
        as_read = (block_columns, block_rows) if self.w13.dtype == torch.uint8 else (block_rows, block_columns)
        _check(name, scale, (experts, *as_read), (getattr(torch, self._format.scale_dtype),))
        _check_strides(name, scale)
        if scale.is_meta:
            return
        if self.fmt == "w4afp8":
            if not bool(scale.isfinite().all()):
                raise WeightsMismatch(f"{name} holds a scale that is NaN or infinite")
            return
        if not bool((scale.isfinite() & (scale >= 0)).all()):
            raise WeightsMismatch(f"{name} holds a scale that is NaN, infinite or negative")
        if self.fmt == "ue8m0" and not bool(is_power_of_two(scale).all()):
            raise WeightsMismatch(f"{name} holds a scale that is not a power of two in 2^-126 .. 2^127, which format 'ue8m0' promises")

    @classmethod
    def from_bf16(cls, spec: MoESpec, w13: Tensor, w2: Tensor, *, fmt: str = "fp8_block") -> ExpertWeights:
        """Weights from floating-point tensors, quantised to block FP8 (the default) or int4, or kept as `fmt="bf16"`.

        Args:
            spec: the layer.
            w13: bf16 (or float32) `[E, 2I, H]`, gate first. A Parameter's history is not kept.
            w2: bf16 (or float32) `[E, H, I]`.
            fmt: `"fp8_block"`, `"ue8m0"`, `"w4afp8"` (in groups of 128, without input scales, which take a calibration) or `"bf16"`.
                BF16 tensors kept as BF16 are used in place, not copied.

        Raises:
            WeightsMismatch: shapes, dtypes or devices that do not fit; NaN or infinity in the weights, or for `"bf16"` what becomes infinite there.
            UnsupportedShape: H or I that the format cannot take.
        """
        get_format(fmt).check(spec)
        origins = {"w13": w13, "w2": w2}
        w13, w2 = w13.detach(), w2.detach()
        if w13.device != w2.device:
            raise WeightsMismatch(f"w2 is on {w2.device}, w13 on {w13.device}; move them to one device")
        for name, tensor, shape in (("w13", w13, _w13_shape(spec)), ("w2", w2, _w2_shape(spec))):
            _check(name, tensor, shape, (torch.bfloat16, torch.float32))
            for e, expert in enumerate(tensor):  # one at a time: no temporary of the weights' own size
                extremes = torch.stack(expert.aminmax())  # NaN if any element is
                if not bool(extremes.isfinite().all()):
                    raise WeightsMismatch(f"{name} holds NaN or infinity, first in expert {e}")
                if fmt == "bf16" and not bool(extremes.bfloat16().isfinite().all()):
                    largest, limit = float(extremes.abs().max()), torch.finfo(torch.bfloat16).max
                    raise WeightsMismatch(f"{name} holds {largest:.6g} in expert {e}, bfloat16 ends at {limit:.6g}; take fmt='fp8_block'")
        if fmt == "bf16":
            return cls(spec, fmt, w13.to(torch.bfloat16).contiguous(), w2.to(torch.bfloat16).contiguous(), origins=origins)
        quantise = {"fp8_block": quantize_weight, "ue8m0": ue8m0.quantize_weight, "w4afp8": _quantize_int4}[fmt]
        experts = ((*quantise(w13[e]), *quantise(w2[e])) for e in range(spec.num_local_experts))
        return cls._from_experts(spec, fmt, experts, w13.device)

    @classmethod
    def from_fp8(
        cls, spec: MoESpec, w13: Tensor, w13_scale_inv: Tensor, w2: Tensor, w2_scale_inv: Tensor, *, fmt: str | None = None
    ) -> ExpertWeights:
        """Weights from e4m3 payloads and their 128x128 block scales (`value = payload * scale_inv`); used in place where contiguous.

        Args:
            spec: the layer.
            w13: e4m3 `[E, 2I, H]`, gate first.
            w13_scale_inv: floating `[E, 2I/128, H/128]`; kept as float32.
            w2: e4m3 `[E, H, I]`.
            w2_scale_inv: floating `[E, H/128, I/128]`.
            fmt: `"fp8_block"`, or `"ue8m0"` for scales that are powers of two. By default what the scales' dtype says:
                `float8_e8m0fnu` is `"ue8m0"`.

        Raises:
            WeightsMismatch: shapes, dtypes or devices that do not fit, scale dtypes that contradict each other; NaN in a payload; a scale that is
                NaN, infinite or negative, or not a power of two where the format promises one.
            UnsupportedShape: H or I not a multiple of 128.
        """
        stored = [_format_of_scale(name, scale) for name, scale in (("w13_scale_inv", w13_scale_inv), ("w2_scale_inv", w2_scale_inv))]
        if fmt is None and stored[0] != stored[1]:
            dtypes = f"w13_scale_inv is {w13_scale_inv.dtype}, w2_scale_inv is {w2_scale_inv.dtype}"
            raise WeightsMismatch(f"{dtypes}: two scale formats in one layer; say which with fmt=")
        fmt = fmt or stored[0]
        if get_format(fmt).weight_dtype != "float8_e4m3fn":
            raise WeightsMismatch(f"fmt={fmt!r} is not a block FP8 format; give 'fp8_block' or 'ue8m0'")
        get_format(fmt).check(spec)
        scales = [scale.detach().float().contiguous() for scale in (w13_scale_inv, w2_scale_inv)]
        origins = {"w13": w13, "w2": w2, "w13_scale_inv": w13_scale_inv, "w2_scale_inv": w2_scale_inv}
        weights = cls(spec, fmt, w13.detach().contiguous(), w2.detach().contiguous(), *scales, origins=origins)
        weights._refuse_nan("quantise finite weights anew")
        return weights

    @classmethod
    def from_int4(
        cls,
        spec: MoESpec,
        w13: Tensor,
        w13_scale_inv: Tensor,
        w2: Tensor,
        w2_scale_inv: Tensor,
        *,
        w13_input_scale: Tensor | None = None,
        w2_input_scale: Tensor | None = None,
    ) -> ExpertWeights:
        """Weights of format `w4afp8` from packed int4 and their group scales (`value = int4 * scale_inv`); used in place where contiguous.

        Args:
            spec: the layer.
            w13: int8 `[E, 2I, H/2]`, gate first, even columns in the low nibbles.
            w13_scale_inv: floating `[E, 2I, H/group]`, of either sign, the group 128, 64 or 32; kept as bf16.
            w2: int8 `[E, H, I/2]`.
            w2_scale_inv: floating `[E, H, I/group]`, the same group.
            w13_input_scale: floating, of any shape: of each expert, or of its gate and up. The largest is kept: see `w4afp8.one_input_scale`.
            w2_input_scale: floating, of any shape. Without both, activations have a scale per token and group.

        Raises:
            WeightsMismatch: shapes, dtypes or devices that do not fit; a scale that is NaN or infinite, or becomes infinite as bf16; one input scale
                without the other.
            WeightsError: an input scale that is not finite and positive.
            UnsupportedShape: H or I not a multiple of 128; another group.
        """
        get_format("w4afp8").check(spec)
        for name, scale in (("w13_scale_inv", w13_scale_inv), ("w2_scale_inv", w2_scale_inv)):
            _format_of_scale(name, scale)
        scales = [scale.detach().to(torch.bfloat16).contiguous() for scale in (w13_scale_inv, w2_scale_inv)]
        origins = {"w13": w13, "w2": w2, "w13_scale_inv": w13_scale_inv, "w2_scale_inv": w2_scale_inv}
        one = [None if scale is None else w4afp8.one_input_scale(scale.detach()) for scale in (w13_input_scale, w2_input_scale)]
        payloads = (w13.detach().contiguous(), w2.detach().contiguous())
        return cls(spec, "w4afp8", *payloads, *scales, w13_input_scale=one[0], w2_input_scale=one[1], origins=origins)

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """`(w13 [E, 2I, H], w2 [E, H, I])` as float32."""
        self._refuse_packed()
        if self.w13_scale_inv is None or self.w2_scale_inv is None:
            return self.w13.float(), self.w2.float()
        if self.fmt == "w4afp8":
            return w4afp8.dequantize_weight(self.w13, self.w13_scale_inv), w4afp8.dequantize_weight(self.w2, self.w2_scale_inv)
        return dequantize_weight(self.w13, self.w13_scale_inv), dequantize_weight(self.w2, self.w2_scale_inv)

    def requantize(self, fmt: str) -> ExpertWeights:
        """These weights with power-of-two scales: both pairs, scale and payload, exact for each block's true values.

        Works in place, one expert at a time: peak memory is the weights plus one expert's float64 temporaries. Tensors keep their storage, so a
        runtime that was built on them before computes with the new weights in its next replay, but goes on quantising activations with float32
        scales: build a new one on what this returns. This object's own label stays what it was.
        Interrupted, it may be called again: each expert is old or new as a whole, and requantising a new one changes no value. Only a second
        interrupt, within the copy of one expert, can break that expert.

        Args:
            fmt: `"ue8m0"`. Weights that already are of this format come back as they are.

        Raises:
            WeightsMismatch: a format that these weights cannot be requantised to; bf16 weights are quantised by `from_bf16`. NaN in a payload, or
                two tensors that share memory: nothing has changed then.
            UnsupportedShape: an unknown format.
        """
        get_format(fmt)
        if fmt == self.fmt:
            return self
        if fmt != "ue8m0" or self.fmt != "fp8_block" or self.w13_scale_inv is None or self.w2_scale_inv is None:
            from_bf16 = f"ExpertWeights.from_bf16(spec, *weights.dequantize(), fmt={fmt!r})"
            raise WeightsMismatch(f"weights of format {self.fmt!r} cannot be requantised to {fmt!r}, only 'fp8_block' to 'ue8m0'; take {from_bf16}")
        self._refuse_shared()
        self._refuse_nan("a block would become NaN as a whole")  # before the first expert is overwritten
        for payload, scale in ((self.w13, self.w13_scale_inv), (self.w2, self.w2_scale_inv)):
            for e in range(self.spec.num_local_experts):
                _copy_both(*requantize_ue8m0(payload[e], scale[e]), payload[e], scale[e])
        return replace(self, fmt=fmt)

    def prepared(self, arch: str) -> ExpertWeights:
        """These weights as an arch's GEMM takes them: themselves, or on SM100 with scales packed per row (payloads are shared), or int4 as
        `w4afp8.prepare` repacks it, a copy.

        Raises:
            UnsupportedShape: int4 in groups that no kernel takes.
        """
        if self.fmt == "w4afp8" and not self._packed:
            assert self.w13_scale_inv is not None
            assert self.w2_scale_inv is not None
            (w13, w13_scale), (w2, w2_scale) = w4afp8.prepare(self.w13, self.w13_scale_inv), w4afp8.prepare(self.w2, self.w2_scale_inv)
            return replace(self, w13=w13, w2=w2, w13_scale_inv=w13_scale, w2_scale_inv=w2_scale)
        if get_format(self.fmt).on(arch).scales is not ScaleFormat.UE8M0_PACKED or self._packed:
            return self
        assert self.w13_scale_inv is not None
        assert self.w2_scale_inv is not None
        w13_scale = pack_weight_scale(self.w13_scale_inv, self.w13.shape[1])
        return replace(self, w13_scale_inv=w13_scale, w2_scale_inv=pack_weight_scale(self.w2_scale_inv, self.w2.shape[1]))

    def to(self, device: torch.device | str) -> ExpertWeights:
        """The same weights on another device; itself if already there.

        Raises:
            InvalidInput: neither a CUDA device that torch sees nor the CPU (nor `"meta"`: shapes alone).
        """
        mine = self.tensors()
        where = torch.device("meta") if str(device) == "meta" else resolve_device(device)
        moved: dict[str, Any] = {name: tensor.to(where) for name, tensor in mine.items()}
        return self if all(moved[name] is tensor for name, tensor in mine.items()) else replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that exist in this format, by attribute name."""
        names = ("w13", "w2", "w13_scale_inv", "w2_scale_inv", "w13_input_scale", "w2_input_scale")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    @property
    def _packed(self) -> bool:
        return self.w13.dtype == torch.uint8 or (self.w13_scale_inv is not None and self.w13_scale_inv.dtype == torch.int32)

    def _refuse_nan(self, why: str) -> None:
        for name, payload in (("w13", self.w13), ("w2", self.w2)):
            for e, expert in enumerate(() if payload.is_meta else payload):
                if holds_nan(expert):
                    raise WeightsMismatch(f"{name} holds NaN, first in expert {e}: {why}")

    def _refuse_shared(self) -> None:
        """What is written in place must be no part of another tensor."""
        spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in self.tensors().items())
        for (_, end, one), (begin, _, other) in pairwise(() if self.w13.is_meta else spans):
            if begin < end:
                raise WeightsMismatch(f"{one} and {other} share memory, and both are written in place; pass clones of them")

    def _refuse_packed(self) -> None:
        if self._packed:
            raise WeightsMismatch("these weights are packed for kernels; use the ones they were prepared from")

    @property
    def device(self) -> torch.device:
        """Where all of its tensors are."""
        return self.w13.device

    @property
    def nbytes(self) -> int:
        """Bytes of payloads and scales together."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def check_spec(self, spec: MoESpec) -> None:
        """Raise WeightsMismatch unless these weights hold the experts that `spec` describes."""
        for name in ("num_local_experts", "expert_offset", "hidden_size", "intermediate_size", "gated", "activation"):
            mine, theirs = getattr(self.spec, name), getattr(spec, name)
            if mine != theirs:
                remedy = "make the weights for the runtime's spec, or pass weights.spec"
                if name == "intermediate_size":
                    remedy = "pass weights.spec: a tensor-parallel shard stores whole blocks, and I is what it stores"
                raise WeightsMismatch(f"the weights were made for {name}={mine}, the runtime's spec says {theirs}; {remedy}")

    def save(self, directory: str | os.PathLike[str], layer: int = 0) -> Path:
        """Write this layer under the per-expert Hugging Face names, one safetensors file a layer, and enter it in the index.

        Scales are stored as float32, those of format `ue8m0` as `float8_e8m0fnu`. Every projection of an expert states the input scale of its GEMM.
        A file appears under its final name only when it is complete; what the checkpoint held of these experts is replaced, by a whole layer also
        its fused `gate_up_proj` and `down_proj`.
        An expert-parallel rank writes its own experts under their global ids; several ranks may write into one directory at a time.

        Returns:
            the file written.

        Raises:
            CheckpointError: a layer that is no int from 0 up, a file that cannot be written, a checkpoint whose index is broken, other tensors in the
                file that this would replace, or fused experts where these are not all. What was there before is unchanged. A file that the index
                names but that is not here is left to itself, and the index then states no `total_size`.
            WeightsMismatch: weights that are packed for kernels, or a tensor-parallel shard: a checkpoint holds whole experts.
        """
        self._refuse_packed()
        if self.tp > 1:
            raise WeightsMismatch(
                f"these weights are a shard of tp={self.tp}, whose names in a checkpoint would be those of every rank; save the weights that were cut"
            )
        spec, tensors = self.spec, {}
        for e in range(spec.num_local_experts):
            for name, part, scale in self._checkpoint_parts(e):
                key = expert_key(layer, spec.expert_offset + e, name)
                tensors[key] = part.contiguous().cpu()
                if scale is not None:
                    stored = scale.to(torch.float8_e8m0fnu) if self.fmt == "ue8m0" else scale.float()
                    tensors[key + SCALE_SUFFIX] = stored.contiguous().cpu()
                input_scale = self.w2_input_scale if name == "down_proj" else self.w13_input_scale
                if input_scale is not None:
                    tensors[f"{expert_prefix(layer, spec.expert_offset + e)}{name}.input_scale"] = input_scale.cpu().reshape(1)
        experts = range(spec.expert_offset, spec.expert_offset + spec.num_local_experts)
        whole = len(experts) == spec.num_experts
        part_name = "" if whole else f"-experts-{experts.start:04d}-{experts.stop - 1:04d}"
        name = f"model-layer-{layer:05d}{part_name}.safetensors"
        own = [expert_prefix(layer, e) for e in experts]
        fused = [experts_prefix(layer) + projection for projection in ("gate_up_proj", "down_proj")]
        if whole:
            return write_tensors(directory, name, tensors, replaces=own + fused)
        return write_tensors(directory, name, tensors, replaces=own, refuses=fused)

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        spec: MoESpec,
        layer: int = 0,
        *,
        device: torch.device | str = "cpu",
        tp: int = 1,
        tp_rank: int = 0,
        progress: bool = True,
    ) -> ExpertWeights:
        """Read this rank's experts of one layer from a checkpoint with Hugging Face names.

        Per-expert names (`...experts.{e}.gate_proj.weight`) or fused ones (`...experts.gate_up_proj` `[E, 2I, H]`), in any number of files, found
        through `model.safetensors.index.json` or by looking into every `*.safetensors`. Block FP8 (e4m3) if the layer has `..._scale_inv` entries
        (any floating dtype; `float8_e8m0fnu` makes the format `"ue8m0"`), W4AFP8 if its weights are int8 (`.weight` or `.weight_packed`, with
        `.weight_scale_inv` and perhaps `.input_scale`), else BF16. Peak host memory: the result plus one projection of one expert.

        Args:
            directory: the checkpoint.
            spec: the layer; its experts are this rank's, its intermediate size is the whole model's.
            layer: the number in the checkpoint's names, `model.layers.{layer}.mlp.experts...`; dense layers count too.
            device: where the weights go: `"cuda"`, `"cuda:1"`, `"cpu"`.
            tp: tensor-parallel ranks that split the intermediate size.
            tp_rank: which of them this is. With `tp > 1` build the runtime on the returned `.spec`: see `shard`.
            progress: show a progress bar (only on a terminal).

        Raises:
            CheckpointError: no checkpoint there; a layer that is no int from 0 up, or has no experts; tensors that are missing, extra, misshapen, of
                another dtype, or scales that are NaN, infinite or negative, all of them named in one error; else weights that are NaN or infinite,
                likewise.
            WeightsMismatch: a `tp` that does not divide the intermediate size.
            InvalidInput: neither a CUDA device that torch sees nor the CPU.
        """
        fmt, width, tensors = load_experts(directory, spec, layer, device=resolve_device(device), tp=tp, tp_rank=tp_rank, progress=progress)
        named: dict[str, Any] = {**tensors}
        return cls(replace(spec, intermediate_size=width), fmt, **named, tp=tp)

    def shard(self, tp: int, tp_rank: int) -> ExpertWeights:
        """Rank `tp_rank`'s part of the intermediate size, a copy; the shards' outputs sum to the whole layer's.

        Where `I / tp` is no multiple of the format's block (128, or 64 for bf16), a rank stores the whole blocks that its part touches, with zeros
        for what it does not own: the returned `.spec` has that larger `intermediate_size`. Build the runtime on that spec.

        Args:
            tp: ranks that split the intermediate size.
            tp_rank: which of them this is.

        Raises:
            WeightsMismatch: a `tp` that does not divide the intermediate size, or leaves half a byte of int4 to a rank; a rank that does not exist.
        """
        self._refuse_packed()
        fmt = self._format
        cut = IntermediateShard.of(self.spec, tp, tp_rank, fmt.divisor)
        gate_up = (half.chunk(2, dim=1) if half is not None else (None, None) for half in (self.w13, self.w13_scale_inv))
        pairs = [
            cut.cut(weight, scale, dim=1, per_element=1, per_scale=fmt.block[0]) for weight, scale in zip(*gate_up, strict=True) if weight is not None
        ]
        w2, w2_scale = cut.cut(self.w2, self.w2_scale_inv, dim=2, per_element=fmt.per_element, per_scale=fmt.block[1])
        scales = [scale for _, scale in pairs if scale is not None]
        spec = replace(self.spec, intermediate_size=cut.width)
        w13 = torch.cat([weight for weight, _ in pairs], dim=1)
        w13_scale = torch.cat(scales, dim=1) if scales else None
        w2_scale = None if w2_scale is None else w2_scale.contiguous()
        return replace(self, spec=spec, w13=w13, w2=w2, w13_scale_inv=w13_scale, w2_scale_inv=w2_scale, tp=self.tp * tp)

    @classmethod
    def _from_experts(cls, spec: MoESpec, fmt: str, experts: Iterator[tuple[Tensor, ...]], device: torch.device) -> ExpertWeights:
        """Stack experts as they come, one at a time: `(w13, w2)` for bf16, `(w13, scale, w2, scale)` for the others."""
        stacked: list[Tensor] = []
        for e, parts in enumerate(experts):
            if not stacked:
                stacked = [torch.empty((spec.num_local_experts, *part.shape), dtype=part.dtype, device=device) for part in parts]
            for whole, part in zip(stacked, parts, strict=True):
                whole[e].copy_(part)
        if len(stacked) == 2:
            return cls(spec, fmt, *stacked)
        w13, w13_scale, w2, w2_scale = stacked
        return cls(spec, fmt, w13, w2, w13_scale, w2_scale)

    def _checkpoint_parts(self, e: int) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        i, scale_rows = self.spec.intermediate_size, self.spec.intermediate_size // self._format.block[0]
        scale13, scale2 = self.w13_scale_inv, self.w2_scale_inv
        yield "gate_proj", self.w13[e, :i], None if scale13 is None else scale13[e, :scale_rows]
        yield "up_proj", self.w13[e, i:], None if scale13 is None else scale13[e, scale_rows:]
        yield "down_proj", self.w2[e], None if scale2 is None else scale2[e]


def _same_memory(origin: Tensor, tensor: Tensor | None) -> bool:
    return tensor is not None and not tensor.is_meta and origin.device == tensor.device and origin.data_ptr() == tensor.data_ptr()


def _quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    packed, scale = w4afp8.quantize_weight(weight)
    return packed, scale.to(torch.bfloat16)


def _w13_shape(spec: MoESpec) -> tuple[int, int, int]:
    return (spec.num_local_experts, 2 * spec.intermediate_size, spec.hidden_size)


def _w2_shape(spec: MoESpec) -> tuple[int, int, int]:
    return (spec.num_local_experts, spec.hidden_size, spec.intermediate_size)


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise WeightsMismatch(f"{name} is {tuple(tensor.shape)}, the spec needs {shape}")
    if tensor.dtype not in dtypes:
        raise WeightsMismatch(f"{name} is {tensor.dtype}, expected {' or '.join(str(dtype) for dtype in dtypes)}")


def _check_strides(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise WeightsMismatch(f"{name} has strides {tensor.stride()}; pass {name}.contiguous()")


def _copy_both(new_payload: Tensor, new_scale: Tensor, payload: Tensor, scale: Tensor) -> None:
    """Overwrite a payload and its scales; an interrupt between the two does not tear them apart."""
    try:
        payload.copy_(new_payload)
        scale.copy_(new_scale)
    except BaseException:
        payload.copy_(new_payload)
        scale.copy_(new_scale)
        raise


def _format_of_scale(name: str, scale: Tensor) -> str:
    if not scale.dtype.is_floating_point:
        raise WeightsMismatch(f"{name} is {scale.dtype}, expected a floating dtype")
    return "ue8m0" if scale.dtype == torch.float8_e8m0fnu else "fp8_block"
