"""Checkpoint directories: safetensors files, the index that says which tensor is where, and the names of experts in them."""

from __future__ import annotations

import json
import math
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphmoe.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0", torch.int8: "I8"}
"""What graphmoe writes, as safetensors says it."""

_PIECE = 1 << 20
_TEMPORARY = ".graphmoe.{}.tmp"
_DAY = 86400.0


class Stored(NamedTuple):
    """A tensor in a safetensors file: what its header says, and the bytes `begin` to `end` of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


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

    Raises:
        CheckpointError: there is no checkpoint, or its index or a file is unreadable, or a tensor is not there; here and in every method.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._open: dict[str, safe_open] = {}
        self._headers: dict[str, dict[str, Stored]] = {}
        index = self.directory / INDEX_NAME
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} is not a directory{_if_of_the_hub(directory)}")
        if index.is_file():
            self._files: dict[str, str] = _read_index(index)["weight_map"]
        else:
            self._files = _look(self.directory, sorted(path.name for path in self.directory.glob("*.safetensors")))
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

    def file_of(self, key: str) -> str:
        """The name of the file in which a tensor counts, relative to the directory."""
        if key not in self._files:
            raise CheckpointError(f"{self.directory} has no tensor {key}")
        return self._files[key]

    def by_file(self) -> dict[str, list[str]]:
        """File name -> the tensors that count in it."""
        files: dict[str, list[str]] = {}
        for key, name in self._files.items():
            files.setdefault(name, []).append(key)
        return files

    def describe(self, key: str) -> tuple[tuple[int, ...], str]:
        """Shape and safetensors dtype (`"BF16"`, `"F8_E4M3"`, ...) of a tensor, from its file's header."""
        stored = self._stored(key)
        return stored.shape, stored.dtype

    def read(self, key: str) -> Tensor:
        """The tensor, on the CPU; its pages are the file's, mapped."""
        try:
            return self._handle(key).get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise self._unreadable(key, error) from error

    def read_rows(self, key: str, index: int, rows: slice) -> Tensor:
        """`tensor[index, rows]` of a three-dimensional tensor, on the CPU; of the mapped file no other pages are read."""
        return self.read(key)[index, rows]

    def read_bytes(self, key: str) -> Iterator[bytes]:
        """The tensor as it is stored, of any dtype, in pieces of at most a mebibyte."""
        stored = self._stored(key)
        try:
            with (self.directory / self.file_of(key)).open("rb") as file:
                file.seek(stored.begin)
                for at in range(stored.begin, stored.end, _PIECE):
                    piece = file.read(min(_PIECE, stored.end - at))
                    if len(piece) < min(_PIECE, stored.end - at):
                        raise OSError("the file ends before the tensor does")
                    yield piece
        except OSError as error:
            raise self._unreadable(key, error) from error

    def _stored(self, key: str) -> Stored:
        name = self.file_of(key)
        if name not in self._headers:
            self._headers[name] = _header(self.directory / name)
        if key not in self._headers[name]:
            raise CheckpointError(f"{self.directory / name} has no tensor {key}, though the index says so")
        return self._headers[name][key]

    def _handle(self, key: str) -> safe_open:
        name = self.file_of(key)
        if name not in self._open:
            self._open[name] = safe_open(self.directory / name, framework="pt")
        return self._open[name]

    def _unreadable(self, key: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{key} in {self.directory / self.file_of(key)} cannot be read: {error}")


class TensorFile:
    """A safetensors file in the making, written in pieces: room for every tensor first, its bytes as they come, the header last.

    Args:
        path: the file; made or overwritten.
        layout: tensor name -> safetensors dtype and shape.
        longest: metadata that takes no less room than what `finish` is given.
    """

    def __init__(self, path: Path, layout: Mapping[str, tuple[str, tuple[int, ...]]], longest: Mapping[str, str]) -> None:
        self._entries: dict[str, dict[str, Any]] = {}
        self._next: dict[str, int] = {}
        end = 0
        for key in sorted(layout, key=lambda key: (-_bits(layout[key][0]), key)):  # wide elements first: each lies at a multiple of its size
            dtype, shape = layout[key]
            begin, end = end, end + _bits(dtype) * math.prod(shape) // 8
            self._entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
            self._next[key] = begin
        self._room = -(-len(self._header(longest)) // 8) * 8
        self._file = path.open("wb")

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, key: str, piece: Tensor | bytes) -> None:
        """Write a tensor's next bytes: a contiguous tensor on the CPU, or bytes as another file stores them."""
        self._file.seek(8 + self._room + self._next[key])
        self._next[key] += self._file.write(piece if isinstance(piece, bytes) else piece.view(torch.uint8).numpy().data)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the header; before it the file is none that could be read."""
        header = self._header(metadata)
        assert len(header) <= self._room
        assert all(self._next[key] == entry["data_offsets"][1] for key, entry in self._entries.items())
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
        self._file.close()

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        return json.dumps({"__metadata__": {"format": "pt", **metadata}, **self._entries}).encode()


def write_tensors(
    directory: str | os.PathLike[str], name: str, tensors: Mapping[str, Tensor], *, replaces: Iterable[str], refuses: Iterable[str] = ()
) -> Path:
    """Write one file of a checkpoint and enter it in the index; an index that is made for it names the tensors of the other files too.

    File and index appear under their names only when both are complete; several processes may write into one directory at a time.

    Args:
        directory: made if absent.
        name: file name, `*.safetensors`; a file of that name is replaced.
        tensors: CPU tensors, contiguous.
        replaces: prefixes of tensor names that this file is now the only source of: what the index knew under them is forgotten.
        refuses: prefixes of tensor names that `tensors` would replace a part of.

    Returns:
        the file written.

    Raises:
        CheckpointError: a file that cannot be written or locked, a broken index, or without one another file that cannot be read; a tensor that
            the file of that name also holds, or that `refuses` names. Nothing has changed then, unless the system lets the file be replaced but not
            the index.
    """
    folder = Path(directory)
    path = folder / name
    prefixes = tuple(replaces)
    with beside(path) as temporary:
        layout = {key: (DTYPES[tensor.dtype], tuple(tensor.shape)) for key, tensor in tensors.items()}
        with TensorFile(temporary, layout, {}) as file:
            for key, tensor in tensors.items():
                file.append(key, tensor)
            file.finish({})
        with locked(folder / f".{INDEX_NAME}.lock"):
            remove_leftovers(folder, older_than=_DAY)
            data = _index_of(folder, name)
            kept = {key: file_name for key, file_name in data["weight_map"].items() if key not in tensors and not key.startswith(prefixes)}
            lost = [key for key, file_name in kept.items() if file_name == name]
            if lost:
                raise CheckpointError(
                    f"{path} also holds {some(lost)}, which a new file of that name would lose; move them to another file, or save elsewhere"
                )
            in_part = [key for key in kept if key.startswith(tuple(refuses))]
            if in_part:
                raise CheckpointError(
                    f"{folder} holds {some(in_part)}: experts in one tensor, of which this would replace a part; save all experts, or elsewhere"
                )
            write_index(folder, kept | dict.fromkeys(tensors, name), rest=data, staged={name: temporary})
    return path


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A temporary name next to `path`, of its own in every thread, process and host; the folder is made if absent.

    The block writes there, and gives the file its name by `replace` once it is complete: a link of that name is replaced too, never followed.
    At the end of the block the temporary file is gone.

    Raises:
        CheckpointError: in place of an OSError in the block.
    """
    make_directory(path.parent)
    temporary = path.with_name(_TEMPORARY.format(uuid.uuid4().hex))
    try:
        yield temporary
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path, *, older_than: float = 0.0) -> None:
    """Remove temporary files that a killed process left behind, of at least that age in seconds; 0 is any."""
    for path in folder.glob(_TEMPORARY.format("*")):
        with suppress(OSError):
            if not older_than or time.time() - path.stat().st_mtime > older_than:
                path.unlink()


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock file `path`, also against other threads and processes.

    Raises:
        CheckpointError: a file that cannot be locked, or without `wait` one that another holds.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout as error:
        raise CheckpointError(f"another process writes into {path.parent} ({path.name} is locked); wait until it has ended") from error
    except (OSError, NotImplementedError) as error:
        raise CheckpointError(f"{path} cannot be locked: {error}; remove what is there, or take a directory whose file system has locks") from error
    try:
        yield
    finally:
        lock.release()


def make_directory(path: Path) -> None:
    """Make a directory and those above it, where they are absent.

    Raises:
        CheckpointError: a file is in the way, or the system refuses.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        file = next((part for part in (path, *path.parents) if part.is_file()), None)
        why = error.strerror if file is None else f"{file} is a file, not a directory; give another directory"
        raise CheckpointError(f"{path} cannot be made: {why}") from error


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file's header; empty if there is none or the file cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return {}


def write_index(
    folder: Path, weight_map: Mapping[str, str], *, rest: Mapping[str, object] | None = None, staged: Mapping[str, Path] | None = None
) -> None:
    """Write `model.safetensors.index.json`, whole or not at all.

    Args:
        folder: the checkpoint.
        weight_map: tensor name -> file name.
        rest: what else the index shall say. The `total_size` of its `metadata` is what the files' headers say, and absent if one cannot be read.
        staged: file name -> a complete file under another name, which takes its own just before the index does.

    Raises:
        CheckpointError: a file cannot be written.
    """
    rest, staged = rest or {}, staged or {}
    metadata = rest.get("metadata")
    stated = {key: value for key, value in metadata.items() if key != "total_size"} if isinstance(metadata, dict) else {}
    total = _total_bytes(weight_map, {name: staged.get(name, folder / name) for name in weight_map.values()})
    data = {**rest, "metadata": stated | ({} if total is None else {"total_size": total}), "weight_map": dict(weight_map)}
    with beside(folder / INDEX_NAME) as temporary:
        temporary.write_text(json.dumps(data, indent=1, sort_keys=True))
        for name, path in staged.items():
            path.replace(folder / name)
        temporary.replace(folder / INDEX_NAME)


def some(items: list[str]) -> str:
    """The first five, and how many more there are."""
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "")


def _if_of_the_hub(directory: str | os.PathLike[str]) -> str:
    """How to fetch it, if what should be a directory looks like the name of a Hugging Face repository."""
    name = os.fspath(directory)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) or Path(name).parent.exists():
        return ""
    return f"; if it is a Hugging Face repository, fetch it with `hf download {name} --local-dir DIR` and give DIR"


def _read_index(index: Path) -> dict[str, Any]:
    """An index, its file names without `./` and the like."""
    try:
        data = json.loads(index.read_text())
        if not all(isinstance(name, str) for name in data["weight_map"].values()):
            raise TypeError("weight_map must map tensor names to file names")
        return {**data, "weight_map": {key: str(PurePosixPath(name)) for key, name in data["weight_map"].items()}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {type(error).__name__}: {error}") from error


def _index_of(folder: Path, name: str) -> dict[str, Any]:
    """A checkpoint's index; if it has none, what one would say of the files that are there. The file `name` may be broken."""
    index = folder / INDEX_NAME
    if index.is_file():
        return _read_index(index)
    if index.is_dir():
        raise CheckpointError(f"{index} is a directory, where the index must be written; remove it")
    weight_map = _look(folder, sorted(path.name for path in folder.glob("*.safetensors") if path.name != name))
    with suppress(CheckpointError):
        weight_map |= {key: name for key in _header(folder / name) if key not in weight_map}
    return {"weight_map": weight_map}


def _look(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Tensor name -> file name, from the files themselves."""
    files: dict[str, str] = {}
    for name in names:
        for key in _header(folder / name):
            if key in files:
                raise CheckpointError(f"{key} is in {files[key]} and in {name}; only an index can say which counts")
            files[key] = name
    return files


def _total_bytes(weight_map: Mapping[str, str], paths: Mapping[str, Path]) -> int | None:
    """Bytes of every tensor that the index names, from the headers of its files; None if a tensor or a file is not there."""
    try:
        headers = {name: _header(path) for name, path in paths.items()}
        tensors = [headers[name][key] for key, name in weight_map.items()]
    except (CheckpointError, KeyError):
        return None
    return sum(tensor.end - tensor.begin for tensor in tensors)


def _header(path: Path) -> dict[str, Stored]:
    """What a safetensors file says of its tensors: 8 bytes of length, then JSON."""
    try:
        with safe_open(path, framework="pt"), path.open("rb") as file:  # opening checks that the header is sound and the file complete
            length = int.from_bytes(file.read(8), "little")
            entries: dict[str, Any] = json.loads(file.read(length))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    entries.pop("__metadata__", None)
    first = 8 + length
    return {
        key: Stored(entry["dtype"], tuple(entry["shape"]), *(first + offset for offset in entry["data_offsets"])) for key, entry in entries.items()
    }


def _bits(dtype: str) -> int:
    """Bits of one element of a safetensors dtype: 8 of `"F8_E4M3"`, 64 of `"I64"`, 8 of `"BOOL"`."""
    size = re.search(r"\d+", dtype)
    return int(size[0]) if size else 8
