"""Rewrite a checkpoint in another weight format, file by file: resumable, and never a half-written file under its final name.

Every block-FP8 weight (e4m3 with a `..._scale_inv` beside it) is converted, of experts or not; BF16 weights are quantised only if they are experts'.
All other tensors, and all other top-level files of the directory, are copied as they are. What the result must not be is refused before anything is
written, and NaN or infinity as they are met.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe.checkpoint import INDEX_NAME, SCALE_SUFFIX, CheckpointReader, make_directory, read_metadata, write_file, write_index
from graphmoe.errors import CheckpointError
from graphmoe.formats import BLOCK, fp8_block, get_format, ue8m0
from graphmoe.formats.fp8_block import dequantize_weight
from graphmoe.loading import SCALE_DTYPES, is_finite, some

_MARK = "graphmoe.convert"
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:\d+\.(?:gate_proj|up_proj|down_proj)\.weight|gate_up_proj|down_proj)$")
_NOT_COPIED = (".safetensors", ".tmp", ".lock")
_CONFIG = "config.json"


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
        source: a checkpoint directory, with or without an index; not changed. Its top-level files count, not its folders.
        target: another directory; made if absent. It may hold what an interrupted run of this conversion left, and no other files.
        fmt: `"fp8_block"`, `"ue8m0"` or `"bf16"`.
        progress: called with (file name, tensors done, tensors in all files) as the work goes on.

    Raises:
        CheckpointError: a checkpoint (or its `config.json`) that cannot be read; a scale without its weight, of another shape or dtype; no weight
            that this converts, or quantised ones that it does not know; experts that the format cannot store; a `target` that is `source`, a
            file, or holds other files: nothing is written then. NaN, infinity or a negative scale, with the tensor's name: the files that were
            finished before stay.
        UnsupportedShape: an unknown format.
    """
    get_format(fmt)
    if source.resolve() == target.resolve():
        raise CheckpointError(f"the result cannot replace its source {source}; give another directory")
    results: list[ConvertedFile] = []
    weight_map: dict[str, str] = {}
    with CheckpointReader(source) as reader:
        files = sorted(reader.by_file().items())
        absent = [name for name, _ in files if not (source / name).is_file()]
        if absent:
            raise CheckpointError(f"{source}: the index names {some(absent)}, not there; fetch what is missing first")
        config = _read_config(source / _CONFIG)
        _judge(reader, fmt)
        _refuse_strangers(source, target, fmt, [name for name, _ in files])
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
    _copy_the_rest(source, target)
    if config is not None:
        _set_quantisation(config, fmt, weight_map)
        _write_text(target / _CONFIG, json.dumps(config, indent=2))
    return results


def _read_config(path: Path) -> dict[str, Any] | None:
    """The model's `config.json`, None without one. Its `quantization_config` is replaced, so it must be one that this understands."""
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise TypeError(f"it holds a {type(config).__name__}, not an object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; take it from the original checkpoint, or remove it") from error
    stated = config.get("quantization_config") or {}
    method, block = (stated.get("quant_method", "fp8"), stated.get("weight_block_size")) if isinstance(stated, dict) else (stated, None)
    if method != "fp8" or block not in (None, [BLOCK, BLOCK]):
        raise CheckpointError(
            f"{path}: quantization_config says quant_method={method!r}, weight_block_size={block}; convert knows BF16 and "
            f"'fp8' in blocks of [{BLOCK}, {BLOCK}] with weight_scale_inv; nothing written"
        )
    return config


def _judge(reader: CheckpointReader, fmt: str) -> None:
    """Refuse, from the files' headers, a checkpoint whose result would not be what it says; one error that names every reason."""
    known, wrong = 0, []
    for key in reader.keys():  # noqa: SIM118 - not a mapping
        shape, dtype = reader.describe(key)
        if key.endswith(SCALE_SUFFIX):
            if key.removesuffix(SCALE_SUFFIX) not in reader:
                wrong.append(f"{key} has no weight {key.removesuffix(SCALE_SUFFIX)}")
            continue
        expert = _EXPERT.search(key) is not None
        scaled = key + SCALE_SUFFIX in reader
        quantised = scaled and dtype == "F8_E4M3"
        if quantised or scaled or (dtype.startswith("F8_") and len(shape) > 1):
            wrong += _judge_quantised(reader, key, shape, dtype)
        elif expert and dtype != "BF16":
            wrong.append(f"{key} is {dtype}: experts must be BF16, or F8_E4M3 with a weight_scale_inv")
        known += quantised or (expert and dtype == "BF16")
        if expert:
            wrong += _judge_expert(key, shape, fmt)
    reasons = f"{'; '.join(wrong[:5])}{f'; and {len(wrong) - 5} more' if len(wrong) > 5 else ''}"
    if not known:
        raise CheckpointError(
            f"{reader.directory} has no weight that convert knows: neither F8_E4M3 with a weight_scale_inv beside it, nor BF16 experts named "
            "...experts.0.gate_proj.weight, up_proj, down_proj (Qwen3-MoE, DeepSeek-V3) or ...experts.gate_up_proj, down_proj"
            f"{f' ({reasons})' if wrong else ''}; nothing written"
        )
    if wrong:
        raise CheckpointError(f"{reader.directory}: {reasons}; nothing written")


def _judge_quantised(reader: CheckpointReader, key: str, shape: tuple[int, ...], dtype: str) -> list[str]:
    """What is wrong with a weight that is FP8 or has a scale."""
    if key + SCALE_SUFFIX not in reader:
        return [f"{key} is {dtype} without {key}{SCALE_SUFFIX}"]
    found, scale_dtype = reader.describe(key + SCALE_SUFFIX)
    wrong = [] if dtype == "F8_E4M3" else [f"{key} is {dtype} with a scale, not F8_E4M3"]
    if len(shape) not in (2, 3) or 0 in shape:
        return [*wrong, f"{key} is {shape}, not a matrix or a stack of matrices"]
    want = (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))
    if found != want or scale_dtype not in SCALE_DTYPES:
        wrong.append(f"{key}{SCALE_SUFFIX} is {scale_dtype} {found}, not {' or '.join(SCALE_DTYPES)} {want} (blocks of {BLOCK}x{BLOCK})")
    return wrong


def _judge_expert(key: str, shape: tuple[int, ...], fmt: str) -> list[str]:
    """What is wrong with the shape of an expert's weight, or of a stack of them, in the new format."""
    divisor = get_format(fmt).divisor
    fused = not key.endswith(".weight")
    if len(shape) != (3 if fused else 2) or 0 in shape:
        return [f"{key} is {shape}, not {'[E, N, K]' if fused else '[N, K]'}"]
    parts = 2 if key.endswith("gate_up_proj") else 1
    if shape[-2] % (parts * divisor) or shape[-1] % divisor:
        return [f"{key} is {shape}: format {fmt!r} takes experts whose H and I are multiples of {divisor}"]
    return []


def _refuse_strangers(source: Path, target: Path, fmt: str, names: Iterable[str]) -> None:
    """Refuse a target with files that are not what an earlier run of this conversion left."""
    if target.is_file():
        raise CheckpointError(f"{target} is a file, not a directory; give a directory for the result")
    if not target.is_dir():
        return
    present = [path for path in sorted(target.iterdir()) if path.is_file() and not path.name.endswith((".tmp", ".lock"))]
    ours = {path.name for path in present if path.name in set(names) and _mark(path).get("made_from", {}).get("fmt") == fmt}
    if ours:
        ours |= {INDEX_NAME, _CONFIG, *(path.name for path in _the_rest(source))}
    strangers = [path.name for path in present if path.name not in ours]
    if strangers:
        raise CheckpointError(
            f"{target} holds {some(strangers)}, which a conversion of {source} to {fmt!r} did not make; give an empty directory, or remove them"
        )


def _mark(path: Path) -> dict[str, Any]:
    """What `convert_checkpoint` noted in a file's header; empty if it did not make the file."""
    try:
        mark = json.loads(read_metadata(path).get(_MARK, "{}"))
    except ValueError:
        return {}
    return mark if isinstance(mark, dict) and isinstance(mark.get("made_from"), dict) else {}


def _finished(path: Path, made_from: dict[str, Any]) -> list[TensorError] | None:
    """The errors that a finished file recorded, if it was made from this source in this format; else None."""
    mark = _mark(path) if path.is_file() else {}
    try:
        return [TensorError(**error) for error in mark["errors"]] if mark.get("made_from") == made_from else None
    except (KeyError, TypeError):  # another version's note
        return None


def _convert(reader: CheckpointReader, key: str, fmt: str) -> tuple[dict[str, Tensor], list[TensorError]]:
    """What becomes of one tensor. A weight takes its scale along, whatever file that was in."""
    if key.endswith(SCALE_SUFFIX):
        return {}, []
    weight = reader.read(key)
    scale = reader.read(key + SCALE_SUFFIX) if key + SCALE_SUFFIX in reader else None
    expert = _EXPERT.search(key) is not None
    if scale is None and (fmt == "bf16" or not expert):
        if expert and not is_finite(weight):
            raise _not_finite(reader, key)
        return {key: weight}, []
    if weight.dim() == 2:
        new, new_scale, moved, size = _convert_matrix(reader, key, weight, scale, fmt)
        # Kept results must not lie between the temporaries that made them: the heap could give nothing back.
        new = new.clone()
    else:  # fused experts, one at a time
        matrices = [_convert_matrix(reader, f"{key}[{e}]", one, None if scale is None else scale[e], fmt) for e, one in enumerate(weight)]
        new = torch.stack([matrix[0] for matrix in matrices])
        scales = [matrix[1] for matrix in matrices if matrix[1] is not None]
        new_scale = torch.stack(scales) if scales else None
        moved, size = sum(matrix[2] for matrix in matrices), sum(matrix[3] for matrix in matrices)
    layer = _LAYER.search(key)
    error = TensorError(int(layer[1]) if layer else -1, key, (moved / size) ** 0.5 if size else 0.0)
    return {key: new} | ({} if new_scale is None else {key + SCALE_SUFFIX: new_scale}), [error]


def _convert_matrix(
    reader: CheckpointReader, name: str, weight: Tensor, scale: Tensor | None, fmt: str
) -> tuple[Tensor, Tensor | None, float, float]:
    """One matrix in the new format: payload, stored scale, and the squared norms of its difference and of its original."""
    if not is_finite(weight):
        raise _not_finite(reader, name)
    if scale is not None and not bool((scale.float().isfinite() & (scale.float() >= 0)).all()):
        raise CheckpointError(f"{reader.directory}: {name} has a scale that is NaN, infinite or negative; {_ORIGINAL}")
    original = weight.float() if scale is None else dequantize_weight(weight, scale)
    if not is_finite(original.bfloat16() if fmt == "bf16" else original):
        raise CheckpointError(f"{reader.directory}: {name} times its scale is beyond {'bfloat16' if fmt == 'bf16' else 'float32'}; {_ORIGINAL}")
    size = _square(original)
    if fmt == "bf16":
        new = original.to(torch.bfloat16)
        return new, None, _square(new.float() - original), size
    if scale is None:
        payload, new_scale = (ue8m0 if fmt == "ue8m0" else fp8_block).quantize_weight(weight)
    else:
        payload, new_scale = ue8m0.requantize_ue8m0(weight, scale) if fmt == "ue8m0" else (weight, scale.float())
    moved = _square(dequantize_weight(payload, new_scale) - original)
    return payload, new_scale.to(torch.float8_e8m0fnu) if fmt == "ue8m0" else new_scale, moved, size


def _square(values: Tensor) -> float:
    """Squared norm, summed in float64 without a copy in it."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


_ORIGINAL = "take this tensor from the original checkpoint"


def _not_finite(reader: CheckpointReader, name: str) -> CheckpointError:
    return CheckpointError(f"{reader.directory}: NaN or infinity in {name}; {_ORIGINAL}")


def _the_rest(source: Path) -> list[Path]:
    """Top-level files that are copied as they are."""
    return [
        path for path in sorted(source.iterdir()) if path.is_file() and not path.name.endswith(_NOT_COPIED) and path.name not in (INDEX_NAME, _CONFIG)
    ]


def _copy_the_rest(source: Path, target: Path) -> None:
    make_directory(target)
    for path in _the_rest(source):
        try:
            shutil.copy2(path, target / path.name)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be copied to {target}: {error.strerror}; the weights there are complete") from error


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error


def _set_quantisation(config: dict[str, Any], fmt: str, weight_map: dict[str, str]) -> None:
    """What Transformers must be told of the weights (its `FineGrainedFP8Config`)."""
    if fmt == "bf16":
        config.pop("quantization_config", None)
        return
    plain = sorted(key.removesuffix(".weight") for key in weight_map if key.endswith(".weight") and key + SCALE_SUFFIX not in weight_map)
    quantisation = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": plain}
    config["quantization_config"] = quantisation | ({"scale_fmt": "ue8m0"} if fmt == "ue8m0" else {})
