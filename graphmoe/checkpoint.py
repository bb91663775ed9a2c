"""Checkpoint directories: safetensors files, the index that says which tensor is where, and the names of experts in them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from graphmoe.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"


def expert_key(layer: int, expert: int, projection: str) -> str:
    """Name of an expert's weight in Hugging Face checkpoints of Qwen3-MoE and DeepSeek-V3; its scale is this + `SCALE_SUFFIX`."""
    return f"{expert_prefix(layer, expert)}{projection}.weight"


def experts_prefix(layer: int) -> str:
    """What every tensor of a layer's routed experts begins with; fused ones continue with `gate_up_proj` or `down_proj`.

    Raises:
        CheckpointError: `layer` is no int, or negative.
    """
    if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
        raise CheckpointError(f"layer={layer!r} must be an int from 0 up: the number that the checkpoint's names hold")
    return f"model.layers.{layer}.mlp.experts."


def expert_prefix(layer: int, expert: int) -> str:
    """What every tensor of one expert begins with."""
    return f"{experts_prefix(layer)}{expert}."


class CheckpointReader:
    """Reads a checkpoint directory, through its index or by looking into every `*.safetensors`; opens each file once.

    Args:
        directory: the checkpoint.
        files: look into these of its files alone, whatever an index says.

    Raises:
        CheckpointError: there is no checkpoint, or its index or a file is unreadable; here and in every method.
    """

    def __init__(self, directory: str | os.PathLike[str], *, files: Iterable[str] | None = None) -> None:
        self.directory = Path(directory)
        self._open: dict[Path, safe_open] = {}
        index = self.directory / INDEX_NAME
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} is not a directory")
        if files is not None:
            self._files = self._look(self.directory / name for name in files)
        elif index.is_file():
            self._files = {key: self.directory / name for key, name in _read_index(index)["weight_map"].items()}
        else:
            self._files = self._look(sorted(self.directory.glob("*.safetensors")))
            if not self._files:
                raise CheckpointError(f"{self.directory} holds no *.safetensors file")

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def keys(self) -> Iterable[str]:
        """Every tensor's name."""
        return self._files.keys()

    def by_file(self) -> dict[str, list[str]]:
        """File name -> the tensors that count in it."""
        files: dict[str, list[str]] = {}
        for key, path in self._files.items():
            files.setdefault(path.name, []).append(key)
        return files

    def describe(self, key: str) -> tuple[tuple[int, ...], str]:
        """Shape and safetensors dtype (`"BF16"`, `"F8_E4M3"`, ...) of a tensor, from its file's header."""
        try:
            part = self._handle(self._files[key]).get_slice(key)
            return tuple(part.get_shape()), str(part.get_dtype())
        except SafetensorError as error:
            raise CheckpointError(f"{self._files[key]} has no tensor {key}, though the index says so") from error

    def read(self, key: str) -> Tensor:
        """The tensor, on the CPU."""
        try:
            return self._handle(self._files[key]).get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{key} in {self._files[key]} cannot be read: {error}") from error

    def read_rows(self, key: str, index: int, rows: slice) -> Tensor:
        """`tensor[index, rows]` of a three-dimensional tensor, on the CPU; nothing else of it is read."""
        try:
            part: Tensor = self._handle(self._files[key]).get_slice(key)[index : index + 1, rows]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{key} in {self._files[key]} cannot be read: {error}") from error
        return part[0]

    def _look(self, paths: Iterable[Path]) -> dict[str, Path]:
        """Where each tensor is, from the files themselves."""
        files: dict[str, Path] = {}
        for path in paths:
            for key in self._handle(path).keys():  # noqa: SIM118 - a handle is not a mapping
                if key in files:
                    raise CheckpointError(f"{key} is in {files[key].name} and in {path.name}; only an index can say which counts")
                files[key] = path
        return files

    def _handle(self, path: Path) -> safe_open:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        return self._open[path]


def write_tensors(directory: str | os.PathLike[str], name: str, tensors: Mapping[str, Tensor], *, replaces: Iterable[str]) -> Path:
    """Write one file of a checkpoint and enter it in the index; an index that is made for it names the tensors of the other files too.

    File and index appear under their names only when both are complete; several processes may write into one directory at a time.

    Args:
        directory: made if absent.
        name: file name, `*.safetensors`; a file of that name is replaced.
        tensors: CPU tensors.
        replaces: prefixes of tensor names that this file is now the only source of: what the index knew under them is forgotten.

    Returns:
        the file written.

    Raises:
        CheckpointError: a file that cannot be written, a broken index, or without one another file that cannot be read. Nothing has changed then.
    """
    folder = Path(directory)
    path = folder / name
    temporary = _write_beside(path, tensors, {})
    prefixes = tuple(replaces)
    try:
        with FileLock(folder / f".{INDEX_NAME}.lock"):
            data = _index_of(folder, but=name)
            kept = {key: file for key, file in data["weight_map"].items() if not key.startswith(prefixes) and (file != name or key in tensors)}
            write_index(folder, kept | dict.fromkeys(tensors, name), metadata=data.get("metadata"), staged={name: temporary})
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_file(path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> None:
    """Write one safetensors file with metadata in its header; it appears under its name only when it is complete."""
    temporary = _write_beside(path, tensors, metadata)
    try:
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file's header; empty if there is none or the file cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return {}


def write_index(folder: Path, weight_map: Mapping[str, str], *, metadata: object = None, staged: Mapping[str, Path] | None = None) -> None:
    """Write `model.safetensors.index.json`, whole or not at all.

    Args:
        folder: the checkpoint.
        weight_map: tensor name -> file name.
        metadata: what else the index shall say. Its `total_size` is what the files' headers say, and absent if one cannot be read.
        staged: file name -> a complete file under another name, which takes its own just before the index does.

    Raises:
        CheckpointError: a file cannot be written.
    """
    staged = staged or {}
    stated = {key: value for key, value in metadata.items() if key != "total_size"} if isinstance(metadata, dict) else {}
    total = _total_bytes(weight_map, {name: staged.get(name, folder / name) for name in weight_map.values()})
    data = {"metadata": stated | ({} if total is None else {"total_size": total}), "weight_map": dict(weight_map)}
    temporary = folder / f".{INDEX_NAME}.{os.getpid()}.tmp"
    try:
        temporary.write_text(json.dumps(data, indent=1, sort_keys=True))
        for name, path in staged.items():
            path.replace(folder / name)
        temporary.replace(folder / INDEX_NAME)
    except OSError as error:
        raise CheckpointError(f"{folder / INDEX_NAME} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_beside(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    """A complete file next to `path`, under a temporary name."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path.parent} cannot be made: {error.strerror}") from error
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        save_file(dict(tensors), temporary, metadata={"format": "pt", **metadata})
        temporary.chmod(0o644)  # safetensors makes files that only their owner can read
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, (OSError, SafetensorError)):
            raise CheckpointError(f"{path} cannot be written: {error}") from error
        raise
    return temporary


def _read_index(index: Path) -> dict[str, Any]:
    try:
        data = json.loads(index.read_text())
        if not all(isinstance(name, str) for name in data["weight_map"].values()):
            raise TypeError("weight_map must map tensor names to file names")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {type(error).__name__}: {error}") from error
    return data


def _index_of(folder: Path, *, but: str) -> dict[str, Any]:
    """A checkpoint's index; if it has none, what one would say of the files that are there, all but one."""
    index = folder / INDEX_NAME
    if index.is_file():
        return _read_index(index)
    with CheckpointReader(folder, files=sorted(path.name for path in folder.glob("*.safetensors") if path.name != but)) as reader:
        return {"weight_map": {key: name for name, keys in reader.by_file().items() for key in keys}}


def _total_bytes(weight_map: Mapping[str, str], paths: Mapping[str, Path]) -> int | None:
    """Bytes of every tensor that the index names, from the headers of its files; None if a tensor or a file is not there."""
    try:
        headers = {name: _header(path) for name, path in paths.items()}
        offsets = [headers[name][key]["data_offsets"] for key, name in weight_map.items()]
    except (OSError, SafetensorError, KeyError):
        return None
    return sum(end - start for start, end in offsets)


def _header(path: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors: 8 bytes of length, then JSON."""
    with safe_open(path, framework="pt"), path.open("rb") as file:  # opening checks that the header is sound and the file complete
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header
