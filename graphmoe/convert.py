"""Rewrite a checkpoint in another weight format, file by file: resumable, and never a half-written file under its final name.

Every block-FP8 weight (e4m3 with a `..._scale_inv` beside it) is converted, of experts or not; BF16 weights are quantised only if they are experts'.
`w4afp8` is a format of experts alone: what else is block FP8 stays block FP8 beside it.
All other tensors, and all other top-level files of the directory, are copied as they are. What the result must not be is refused before anything is
written, and NaN or infinity as they are met.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from graphmoe.checkpoint import (
    DTYPES,
    INDEX_NAME,
    SCALE_SUFFIX,
    CheckpointReader,
    TensorFile,
    beside,
    locked,
    make_directory,
    read_metadata,
    remove_leftovers,
    some,
    write_index,
)
from graphmoe.errors import BadSetting, CheckpointError
from graphmoe.formats import BLOCK, fp8_block, get_format, ue8m0, w4afp8
from graphmoe.formats.fp8_block import dequantize_weight
from graphmoe.loading import SCALE_DTYPES, is_finite

_MARK = "graphmoe.convert"
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:\d+\.(?:gate_proj|up_proj|down_proj)\.weight|gate_up_proj|down_proj)$")
_NOT_COPIED = (".safetensors", ".tmp", ".lock")
_CONFIG = "config.json"
_STATED = ("quantization_config", "compression_config")
_UNDERSTOOD = {"quant_method": ("fp8",), "weight_block_size": (None, [BLOCK, BLOCK]), "activation_scheme": (None, "dynamic")}
_LOCK = ".graphmoe.convert.lock"
_WIDEST = 2.2250738585072014e-308
"""No float takes more characters in JSON."""

PIECE = 1 << 18
"""Elements that are converted at a time, in whole rows of blocks: of wide matrices the 128 rows that share their scales, be they more."""


def peak_bytes(columns: int) -> int:
    """Host memory that a conversion takes at most, if no matrix is wider: 32 MiB up to 2048 columns."""
    return 128 * max(PIECE, BLOCK * columns)


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


@dataclass(frozen=True)
class _Job:
    """One file to convert.

    Attributes:
        name: of the file, in the source as in the result.
        keys: the source's tensors that count in it.
        made_from: what a finished file's mark must say: the format, these keys, and every file that they and their scales are in.
        layout: safetensors dtype and shape of each tensor of the result.
    """

    name: str
    keys: list[str]
    made_from: dict[str, Any]
    layout: dict[str, tuple[str, tuple[int, ...]]]


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    fmt: str,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    *,
    clip_search: bool = False,
) -> list[ConvertedFile]:
    """Convert every file of `source` into `target`.

    A file that an earlier, interrupted run of the same conversion finished is kept. Peak host memory does not grow with files or tensors: it is below
    `peak_bytes` of the widest matrix (128 bytes an element of 128 rows, at least 32 MiB), beside the files' headers.

    Args:
        source: a checkpoint directory, with or without an index; not changed. Its top-level files count, and those that its index names.
        target: another directory; made if absent. It may hold what an interrupted run of this conversion left, and no other files.
        fmt: `"fp8_block"`, `"ue8m0"`, `"w4afp8"` (in groups of 128) or `"bf16"`.
        progress: called with (file name, tensors done, tensors in all files) as the work goes on.
        clip_search: for `"w4afp8"`, choose each group's scale by its squared error: a smaller error, in more time.

    Raises:
        BadSetting: a search of scales that the format does not have.
        CheckpointError: a checkpoint (or its `config.json`) that cannot be read; a scale without its weight, of another shape or dtype; no weight
            that this converts, or quantised ones that it does not know; experts that the format cannot store; a `target` that is `source`, a
            file, holds other files, or is being written by another process: nothing is written then. NaN, infinity or a negative scale, with the
            tensor's name: the files that were finished before stay.
        UnsupportedShape: an unknown format.
    """
    get_format(fmt)
    if clip_search and fmt != "w4afp8":
        raise BadSetting(f"clip_search belongs to 'w4afp8', not to {fmt!r}; leave it out")
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve():
        raise CheckpointError(f"the result cannot replace its source {source}; give another directory")
    with CheckpointReader(source) as reader:
        files = sorted(reader.by_file().items())
        names = [name for name, _ in files]
        outside = [name for name in names if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
        if outside:
            raise CheckpointError(f"{source}: the index names {some(outside)}, outside of the directory; move what is meant into it")
        absent = [name for name in names if not (source / name).is_file()]
        if absent:
            raise CheckpointError(f"{source}: the index names {some(absent)}, not there; fetch what is missing first")
        config = _read_config(source / _CONFIG)
        _judge(reader, fmt)
        jobs = [_job(reader, name, keys, fmt, clip_search) for name, keys in files]
        _judge_target(source, target, fmt, names)
        make_directory(target)
        with locked(target / _LOCK, wait=False):
            for folder in {(target / name).parent for name in names} | {target}:
                remove_leftovers(folder)
            results = _convert_files(reader, jobs, target, fmt, clip_search, progress)
            weight_map = {key: job.name for job in jobs for key in job.layout}
            write_index(target, weight_map)
            _copy_the_rest(source, target)
            if config is not None:
                _set_quantisation(config, fmt, weight_map)
                with beside(target / _CONFIG) as temporary:
                    temporary.write_text(json.dumps(config, indent=2), encoding="utf-8")
                    temporary.replace(target / _CONFIG)
    return results


def _read_config(path: Path) -> dict[str, Any] | None:
    """The model's `config.json`, None without one. A quantisation that it states is replaced, so it must be one that this understands."""
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise TypeError(f"it holds a {type(config).__name__}, not an object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; take it from the original checkpoint, or remove it") from error
    for stating in _stating(config):
        for name in _STATED:
            stated = stating.get(name) or {"quant_method": "fp8"}
            found = stated if isinstance(stated, dict) else {"quant_method": stated}
            odd = [f"{field}={found.get(field)!r}" for field, good in _UNDERSTOOD.items() if found.get(field) not in good]
            if odd:
                raise CheckpointError(
                    f"{path}: {name} says {', '.join(odd)}; convert knows BF16 and 'fp8' in blocks of [{BLOCK}, {BLOCK}] with weight_scale_inv; "
                    "nothing written"
                )
    return config


def _stating(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects in a config that state a quantisation: itself, or those nested in it (`text_config`)."""
    found, ahead = [], [config]
    while ahead:
        part = ahead.pop()
        if any(name in part for name in _STATED):
            found.append(part)
        ahead += [value for name, value in part.items() if isinstance(value, dict) and name not in _STATED]
    return found


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


def _job(reader: CheckpointReader, name: str, keys: list[str], fmt: str, clip_search: bool) -> _Job:
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    files = {name}
    for key in keys:
        shape, dtype = reader.describe(key)
        if key.endswith(SCALE_SUFFIX):  # goes where its weight goes
            continue
        if key + SCALE_SUFFIX in reader:
            files.add(reader.file_of(key + SCALE_SUFFIX))
        if not _converts(reader, key, fmt):
            layout[key] = dtype, shape
            continue
        becomes = get_format(_becomes(key, fmt))
        layout[key] = DTYPES[getattr(torch, becomes.weight_dtype)], (*shape[:-2], *becomes.stored_shape(*shape[-2:]))
        if becomes.scales is not None:
            layout[key + SCALE_SUFFIX] = "F8_E8M0" if fmt == "ue8m0" else "F32", (*shape[:-2], *becomes.scale_shape(*shape[-2:]))
    stats = {file: (reader.directory / file).stat() for file in sorted(files)}
    made_from = {
        "fmt": fmt,
        "keys": hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest(),
        "files": {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()},
    } | ({"clip_search": True} if clip_search else {})
    return _Job(name, keys, made_from, layout)


def _converts(reader: CheckpointReader, key: str, fmt: str) -> bool:
    """Whether a weight is converted: quantised ones are, and BF16 ones of experts where the format is another."""
    return key + SCALE_SUFFIX in reader or (fmt != "bf16" and _EXPERT.search(key) is not None)


def _becomes(key: str, fmt: str) -> str:
    """The format that a weight which is converted takes."""
    return "fp8_block" if fmt == "w4afp8" and not _EXPERT.search(key) else fmt


def _judge_target(source: Path, target: Path, fmt: str, names: list[str]) -> None:
    """Refuse a target with files that are not what an earlier run of this conversion left, or that the result could not replace."""
    if target.is_file():
        raise CheckpointError(f"{target} is a file, not a directory; give a directory for the result")
    if not target.is_dir():
        return
    originals = {(source / name).parent.resolve() / Path(name).name for name in names}
    for name in [*names, INDEX_NAME, _CONFIG, *(path.name for path in _the_rest(source))]:
        path = target / name
        if path.is_dir():
            raise CheckpointError(f"{path} is a directory, where a file of the result must be written; remove it")
        folder = path.parent.resolve()
        if not folder.is_relative_to(target.resolve()) or folder / path.name in originals:
            raise CheckpointError(f"{path} leads to {folder / path.name}, outside of the result or into its source; give another directory")
    present = [path for path in sorted(target.iterdir()) if path.is_file() and not path.name.endswith((".tmp", ".lock"))]
    present += [target / name for name in names if "/" in name and (target / name).is_file()]
    ours = {path for path in present if path.relative_to(target).as_posix() in names and _mark(path).get("made_from", {}).get("fmt") == fmt}
    if ours:
        ours |= {target / INDEX_NAME, target / _CONFIG, *(target / path.name for path in _the_rest(source))}
    strangers = [path.relative_to(target).as_posix() for path in present if path not in ours]
    if strangers:
        raise CheckpointError(
            f"{target} holds {some(strangers)}, which a conversion of {source} to {fmt!r} did not make; give an empty directory, or remove them"
        )


def _convert_files(
    reader: CheckpointReader, jobs: list[_Job], target: Path, fmt: str, clip_search: bool, progress: Callable[[str, int, int], None]
) -> list[ConvertedFile]:
    results = []
    done, total = 0, sum(len(job.keys) for job in jobs)
    for job in jobs:
        errors = _finished(target / job.name, job.made_from)
        found = errors is not None
        if errors is None:
            longest = [TensorError(_layer(key), key, _WIDEST) for key in job.keys if _converts(reader, key, fmt)]
            errors = []
            with beside(target / job.name) as temporary:
                with TensorFile(temporary, job.layout, _marked(job.made_from, longest)) as file:
                    for key in job.keys:
                        errors += _convert(reader, key, fmt, clip_search, file)
                        done += 1
                        progress(job.name, done, total)
                    file.finish(_marked(job.made_from, errors))
                temporary.replace(target / job.name)
        else:
            done += len(job.keys)
            progress(job.name, done, total)
        results.append(ConvertedFile(job.name, found, tuple(errors)))
    return results


def _marked(made_from: dict[str, Any], errors: list[TensorError]) -> dict[str, str]:
    """The metadata of a finished file."""
    return {_MARK: json.dumps({"made_from": made_from, "errors": [asdict(error) for error in errors]})}


def _mark(path: Path) -> dict[str, Any]:
    """What `convert_checkpoint` noted in a file's header; empty if it did not make the file."""
    try:
        mark = json.loads(read_metadata(path).get(_MARK, "{}"))
    except (ValueError, RecursionError):
        return {}
    return mark if isinstance(mark, dict) and isinstance(mark.get("made_from"), dict) else {}


def _finished(path: Path, made_from: dict[str, Any]) -> list[TensorError] | None:
    """The errors that a finished file recorded, if it was made from this source in this format; else None."""
    mark = _mark(path) if path.is_file() else {}
    if mark.get("made_from") != made_from:
        return None
    try:
        return [TensorError(int(error["layer"]), str(error["key"]), float(error["relative_error"])) for error in mark["errors"]]
    except (KeyError, TypeError, ValueError):  # not a note of ours
        return None


def _convert(reader: CheckpointReader, key: str, fmt: str, clip_search: bool, file: TensorFile) -> list[TensorError]:
    """Write what becomes of one tensor, piece by piece. A weight takes its scale along, whatever file that was in."""
    if key.endswith(SCALE_SUFFIX):
        return []
    if not _converts(reader, key, fmt):
        if _EXPERT.search(key):
            for name, weight, _ in _matrices(key, reader.read(key), None):
                _refuse_not_finite(reader, name, weight)
        for stored in reader.read_bytes(key):
            file.append(key, stored)
        return []
    moved = size = 0.0
    becomes = _becomes(key, fmt)
    for name, weight, scale in _matrices(key, reader.read(key), reader.read(key + SCALE_SUFFIX) if key + SCALE_SUFFIX in reader else None):
        blocks = max(1, PIECE // (BLOCK * weight.shape[1]))
        for at in range(0, -(-weight.shape[0] // BLOCK), blocks):
            rows = weight[at * BLOCK : (at + blocks) * BLOCK]
            its_scale = None if scale is None else scale[at : at + blocks]
            new, new_scale, its_moved, its_size = _convert_rows(reader, name, rows, its_scale, becomes, clip_search)
            file.append(key, new)
            if new_scale is not None:
                file.append(key + SCALE_SUFFIX, new_scale)
            moved, size = moved + its_moved, size + its_size
    return [TensorError(_layer(key), key, (moved / size) ** 0.5 if size else 0.0)] if becomes == fmt else []


def _layer(key: str) -> int:
    layer = _LAYER.search(key)
    return int(layer[1]) if layer else -1


def _matrices(key: str, weight: Tensor, scale: Tensor | None) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """A matrix, or those of a stack, with their names and scales."""
    if weight.dim() == 2:
        yield key, weight, scale
        return
    for e, matrix in enumerate(weight):
        yield f"{key}[{e}]", matrix, None if scale is None else scale[e]


def _convert_rows(
    reader: CheckpointReader, name: str, weight: Tensor, scale: Tensor | None, fmt: str, clip_search: bool
) -> tuple[Tensor, Tensor | None, float, float]:
    """Some rows of a matrix in the new format: payload, stored scale, and the squared norms of their difference and of the original."""
    _refuse_not_finite(reader, name, weight)
    if scale is not None and not bool((scale.float().isfinite() & (scale.float() >= 0)).all()):
        raise CheckpointError(f"{reader.directory}: {name} has a scale that is NaN, infinite or negative; {_ORIGINAL}")
    original = weight.float() if scale is None else dequantize_weight(weight, scale)
    if not is_finite(original.bfloat16() if fmt == "bf16" else original):
        raise CheckpointError(f"{reader.directory}: {name} times its scale is beyond {'bfloat16' if fmt == 'bf16' else 'float32'}; {_ORIGINAL}")
    size = _square(original)
    if fmt == "bf16":
        new = original.to(torch.bfloat16)
        return new, None, _square(new.float() - original), size
    if fmt == "w4afp8":
        payload, new_scale = w4afp8.quantize_weight(original, clip_search=clip_search)
        return payload, new_scale, _square(w4afp8.dequantize_weight(payload, new_scale) - original), size
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


def _refuse_not_finite(reader: CheckpointReader, name: str, weight: Tensor) -> None:
    if not is_finite(weight):
        raise CheckpointError(f"{reader.directory}: NaN or infinity in {name}; {_ORIGINAL}")


def _the_rest(source: Path) -> list[Path]:
    """Top-level files that are copied as they are."""
    return [
        path for path in sorted(source.iterdir()) if path.is_file() and not path.name.endswith(_NOT_COPIED) and path.name not in (INDEX_NAME, _CONFIG)
    ]


def _copy_the_rest(source: Path, target: Path) -> None:
    for path in _the_rest(source):
        with beside(target / path.name) as temporary:
            shutil.copy2(path, temporary)
            temporary.replace(target / path.name)


def _set_quantisation(config: dict[str, Any], fmt: str, weight_map: dict[str, str]) -> None:
    """What Transformers (its `FineGrainedFP8Config`), or for `w4afp8` SGLang, must be told of the weights, where the config said it before."""
    plain = sorted(key.removesuffix(".weight") for key in weight_map if key.endswith(".weight") and key + SCALE_SUFFIX not in weight_map)
    quantisation: dict[str, Any] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": plain,
    }
    if fmt == "w4afp8":
        quantisation |= {"quant_method": "w4afp8", "group_size": BLOCK}
    for stating in _stating(config) or [config]:
        for name in _STATED:
            stating.pop(name, None)
        if fmt != "bf16":
            stating["quantization_config"] = quantisation | ({"scale_fmt": "ue8m0"} if fmt == "ue8m0" else {})
