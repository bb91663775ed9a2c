"""Rewrite a checkpoint in another weight format, file by file: resumable, and never a half-written file under its final name.

Every block-FP8 weight (e4m3 with a `..._scale_inv` beside it) is converted, of experts or not; BF16 weights are quantised only if they are experts'.
All other tensors, and all other files of the directory, are copied as they are.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe.checkpoint import INDEX_NAME, SCALE_SUFFIX, CheckpointReader, read_metadata, write_file, write_index
from graphmoe.errors import CheckpointError, UnknownRecipe
from graphmoe.formats import BLOCK, fp8_block, ue8m0
from graphmoe.formats.fp8_block import dequantize_weight

TARGETS = {"ue8m0": "ue8m0", "fp8": "fp8_block", "bf16": "bf16"}
"""Names on the command line, and the formats they mean."""

_MARK = "graphmoe.convert"
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:\d+\.(?:gate_proj|up_proj|down_proj)\.weight|gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class TensorError:
    """Relative error (Frobenius norm of the difference over that of the original) of one converted tensor."""

    layer: int
    key: str
    relative_error: float


@dataclass(frozen=True)
class ConvertedFile:
    """One file of the result: whether it was already there, and the error of each tensor that was converted in it."""

    name: str
    found: bool
    errors: tuple[TensorError, ...]


def convert_checkpoint(
    source: Path, target: Path, fmt: str, progress: Callable[[str, int, int], None] = lambda name, done, total: None
) -> list[ConvertedFile]:
    """Convert every file of `source` into `target`.

    A file that an earlier, interrupted run of the same conversion finished is kept. Peak host memory is below twice the largest file of the result
    plus 64 bytes an element of the largest matrix (its temporaries in float64).

    Args:
        source: a checkpoint directory, with or without an index; not changed.
        target: another directory; made if absent.
        fmt: `"fp8_block"`, `"ue8m0"` or `"bf16"`.
        progress: called with (file name, tensors done, tensors in all files) as the work goes on.

    Raises:
        CheckpointError: a checkpoint that cannot be read, `target` is `source`, or a scale without its weight.
        UnknownRecipe: an unknown format.
    """
    if fmt not in TARGETS.values():
        raise UnknownRecipe(f"unknown format {fmt!r}; known: {', '.join(TARGETS)}")
    if source.resolve() == target.resolve():
        raise CheckpointError(f"the result cannot replace its source {source}; give another directory")
    results: list[ConvertedFile] = []
    weight_map: dict[str, str] = {}
    with CheckpointReader(source) as reader:
        files = sorted(reader.by_file().items())
        absent = [name for name, _ in files if not (source / name).is_file()]
        if absent:
            raise CheckpointError(f"{source}: the index names {', '.join(absent[:5])}, {len(absent)} file(s) that are not there; fetch them first")
        total = sum(len(keys) for _, keys in files)
        done = 0
        for name, keys in files:
            origin = (source / name).stat()
            made_from = {"fmt": fmt, "size": origin.st_size, "mtime_ns": origin.st_mtime_ns}
            errors = _finished(target / name, made_from)
            found = errors is not None
            if errors is None:
                tensors: dict[str, Tensor] = {}
                errors = []
                for key in keys:
                    part, error = _convert(reader, key, fmt)
                    tensors |= part
                    errors += error
                    done += 1
                    progress(name, done, total)
                mark = json.dumps({"made_from": made_from, "errors": [asdict(error) for error in errors]})
                write_file(target / name, tensors, metadata={_MARK: mark})
            else:
                done += len(keys)
                progress(name, done, total)
            with CheckpointReader(target, files=[name]) as written:
                weight_map |= dict.fromkeys(written.keys(), name)
            results.append(ConvertedFile(name, found, tuple(errors)))
    write_index(target, weight_map)
    _copy_the_rest(source, target, fmt, weight_map)
    return results


def _finished(path: Path, made_from: dict[str, Any]) -> list[TensorError] | None:
    """The errors that a finished file recorded, if it was made from this source in this format; else None."""
    if not path.is_file():
        return None
    mark = json.loads(read_metadata(path).get(_MARK, "{}"))
    return [TensorError(**error) for error in mark["errors"]] if mark.get("made_from") == made_from else None


def _convert(reader: CheckpointReader, key: str, fmt: str) -> tuple[dict[str, Tensor], list[TensorError]]:
    """What becomes of one tensor. A weight takes its scale along, whatever file that was in."""
    if key.endswith(SCALE_SUFFIX):
        owner = key.removesuffix(SCALE_SUFFIX)
        if owner not in reader:
            raise CheckpointError(f"{reader.directory}: {key} has no weight {owner}")
        return {}, []
    weight = reader.read(key)
    scale = reader.read(key + SCALE_SUFFIX) if key + SCALE_SUFFIX in reader else None
    quantised = weight.dtype == torch.float8_e4m3fn and scale is not None
    if not quantised and not (fmt != "bf16" and _EXPERT.search(key) and weight.dtype == torch.bfloat16):
        return {key: weight} | ({key + SCALE_SUFFIX: scale} if scale is not None else {}), []
    if weight.dim() == 2:
        new, new_scale, moved, size = _convert_matrix(weight, scale, fmt)
        # Kept results must not lie between the temporaries that made them: the heap could give nothing back.
        new = new.clone()
    else:  # fused experts, one at a time
        matrices = [_convert_matrix(one, None if scale is None else scale[e], fmt) for e, one in enumerate(weight)]
        new = torch.stack([matrix[0] for matrix in matrices])
        scales = [matrix[1] for matrix in matrices if matrix[1] is not None]
        new_scale = torch.stack(scales) if scales else None
        moved, size = sum(matrix[2] for matrix in matrices), sum(matrix[3] for matrix in matrices)
    layer = _LAYER.search(key)
    error = TensorError(int(layer[1]) if layer else -1, key, (moved / size) ** 0.5 if size else 0.0)
    return {key: new} | ({} if new_scale is None else {key + SCALE_SUFFIX: new_scale}), [error]


def _convert_matrix(weight: Tensor, scale: Tensor | None, fmt: str) -> tuple[Tensor, Tensor | None, float, float]:
    """One matrix in the new format: payload, stored scale, and the squared norms of its difference and of its original."""
    original = weight.float() if scale is None else dequantize_weight(weight, scale)
    size = float(original.double().square().sum())
    if fmt == "bf16":
        new = original.to(torch.bfloat16)
        return new, None, float((new.double() - original.double()).square().sum()), size
    if scale is None:
        payload, new_scale = (ue8m0 if fmt == "ue8m0" else fp8_block).quantize_weight(weight)
    else:
        payload, new_scale = ue8m0.requantize_ue8m0(weight, scale) if fmt == "ue8m0" else (weight, scale.float())
    moved = float((dequantize_weight(payload, new_scale).double() - original.double()).square().sum())
    return payload, new_scale.to(torch.float8_e8m0fnu) if fmt == "ue8m0" else new_scale, moved, size


def _copy_the_rest(source: Path, target: Path, fmt: str, weight_map: dict[str, str]) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith((".safetensors", ".tmp", ".lock")) and path.name not in (INDEX_NAME, "config.json"):
            shutil.copy2(path, target / path.name)
    config = source / "config.json"
    if config.is_file():
        data = json.loads(config.read_text())
        _set_quantisation(data, fmt, weight_map)
        (target / "config.json").write_text(json.dumps(data, indent=2))


def _set_quantisation(config: dict[str, Any], fmt: str, weight_map: dict[str, str]) -> None:
    """What Transformers must be told of the weights (its `FineGrainedFP8Config`)."""
    if fmt == "bf16":
        config.pop("quantization_config", None)
        return
    plain = sorted(key.removesuffix(".weight") for key in weight_map if key.endswith(".weight") and key + SCALE_SUFFIX not in weight_map)
    quantisation = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": plain}
    config["quantization_config"] = quantisation | ({"scale_fmt": "ue8m0"} if fmt == "ue8m0" else {})
