"""Capture profiles: which recipe was measured fastest for each bucket, on one device, for one shape and weight format. Pure JSON and ints.

A profile speaks only for what it measured: exactly its device, shape and format, buckets near the measured ones, and kernels whose sources are
still those that were measured.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import tempfile
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from graphmoe.errors import PlanError, SchemaMismatch, SpecError, UnknownRecipe
from graphmoe.formats import get_format
from graphmoe.paths import PATHS, get_path
from graphmoe.recipe import Recipe
from graphmoe.spec import MoESpec

SCHEMA = "graphmoe.profile/1"
PACKAGE = Path(__file__).resolve().parent

_NOT_SHAPE = ("expert_offset", "routed_scaling_factor")
_FAR = 2
"""Buckets beyond this factor of the nearest measured one are not the profile's to choose."""

logger = logging.getLogger("graphmoe")


def shape_of(spec: MoESpec) -> MoESpec:
    """The layer without what decides no kernel: its expert offset and its routed scaling factor."""
    return replace(spec, expert_offset=0, routed_scaling_factor=1.0)


@dataclass(frozen=True)
class BucketRecord:
    """What was measured for one bucket.

    Args:
        tokens: the bucket.
        recipe: the fastest of the candidates.
        replay_us: median time of one graph replay, microseconds.
        spread_us: spread of that time, microseconds.
        floor_us: time to read the bucket's weights at the device's measured bandwidth, microseconds.
        launches: kernels in the graph.
        worst_row: largest relative error of one token's output against the reference.
        tried: candidates measured.

    Raises:
        PlanError: an impossible value, by name.
    """

    tokens: int
    recipe: Recipe
    replay_us: float
    spread_us: float
    floor_us: float
    launches: int
    worst_row: float
    tried: int

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe) or not isinstance(self.recipe.path, str) or not self.recipe.path:
            raise PlanError(f"recipe={self.recipe!r} must be a Recipe that names a path")
        for name in ("tokens", "launches", "tried"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise PlanError(f"{name}={value!r} must be an int of at least 1")
        for name, positive in (("replay_us", True), ("spread_us", False), ("floor_us", True), ("worst_row", False)):
            object.__setattr__(self, name, finite_number(name, getattr(self, name), positive=positive))
        finite_number("ratio", self.ratio, positive=False)

    @property
    def ratio(self) -> float:
        """`replay_us / floor_us`: 1.0 is as fast as the memory."""
        return self.replay_us / self.floor_us

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` gives an equal record back."""
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "recipe": self.recipe.to_json(), "ratio": self.ratio}

    @classmethod
    def from_json(cls, data: Any) -> BucketRecord:
        """A stored record.

        Raises:
            PlanError: a field is missing, unknown or impossible, or `ratio` is not that of the two times (to 1 %).
        """
        given = _object(data, (*(field.name for field in fields(cls)), "ratio"))
        record = cls(**{**{name: value for name, value in given.items() if name != "ratio"}, "recipe": _recipe(given["recipe"])})
        if not math.isclose(finite_number("ratio", given["ratio"], positive=False), record.ratio, rel_tol=0.01):
            raise PlanError(f"ratio={given['ratio']!r} is not replay_us / floor_us = {record.ratio:.4g}: the record was edited; measure it anew")
        return record


@dataclass(frozen=True)
class Profile:
    """The measured recipes of one (device, shape, weight format).

    Args:
        device: as torch names it, such as `"NVIDIA H200"`.
        fmt: weight format.
        shape: the layer; its expert offset and routed scaling factor are forgotten, they decide no kernel.
        kernels: path name -> `kernels_version` of it when it was measured, for at least every path that a record names.
        provenance: what was measured with: `date` at least; driver, library versions, command, bandwidth.
        buckets: records, one a bucket; kept in ascending order.

    Raises:
        PlanError: an impossible value, by name.
    """

    device: str
    fmt: str
    shape: MoESpec
    kernels: Mapping[str, str]
    provenance: Mapping[str, str]
    buckets: tuple[BucketRecord, ...]

    def __post_init__(self) -> None:
        for name in ("device", "fmt"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name).strip():
                raise PlanError(f"{name}={getattr(self, name)!r} must be a name")
        with _inside("fmt"):
            get_format(self.fmt)
        if not isinstance(self.shape, MoESpec):
            raise PlanError(f"shape={self.shape!r} must be a MoESpec")
        object.__setattr__(self, "shape", shape_of(self.shape))
        for name in ("kernels", "provenance"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        if not self.provenance.get("date"):
            raise PlanError("provenance lacks 'date': a profile says when it was measured")
        for path, version in self.kernels.items():
            if not re.fullmatch("[0-9a-f]{16}", version):
                raise PlanError(f"kernels.{path}={version!r} must be the 16 hex digits of kernels_version({path!r})")
        if not isinstance(self.buckets, tuple | list) or not self.buckets or not all(isinstance(one, BucketRecord) for one in self.buckets):
            raise PlanError(f"buckets={self.buckets!r} must hold at least one BucketRecord")
        object.__setattr__(self, "buckets", tuple(sorted(self.buckets, key=lambda record: record.tokens)))
        sizes = [record.tokens for record in self.buckets]
        if len(set(sizes)) < len(sizes):
            raise PlanError(f"buckets has two records of one number of tokens: {sizes}")
        for record in self.buckets:
            if record.recipe.path not in self.kernels:
                raise PlanError(f"kernels lacks path {record.recipe.path!r}, which bucket {record.tokens} runs; add kernels_version of it")

    @property
    def title(self) -> str:
        """What a plan calls it: `profile NVIDIA H200 2026-11-29`."""
        return f"profile {self.device} {self.provenance['date']}"

    def choose(self, tokens: int) -> tuple[Recipe, str] | None:
        """The recipe for a bucket and the rule that a plan prints; None if `void` gives a reason.

        A bucket that was not measured takes the recipe of the nearest one by ratio of sizes, of two equally near the larger.
        """
        record = self._nearest(tokens)
        if record is None or self.void(tokens):
            return None
        measured = f"{record.ratio:.2f} of the floor" if record.tokens == tokens else f"as measured at {record.tokens} tokens"
        return record.recipe, f"{self.title}: {measured}"

    def void(self, tokens: int) -> str | None:
        """Why the profile has no recipe for a bucket, or None: too far from every measured bucket, or measured with other kernels."""
        record = self._nearest(tokens)
        if record is None:
            return f"{self.title} measured {self.buckets[0].tokens} to {self.buckets[-1].tokens} tokens, none near this bucket"
        path = record.recipe.path
        if path not in PATHS:
            return f"{self.title} is void for {path} (this version has no such path)"
        if self.kernels[path] != kernels_version(path):
            return f"{self.title} is void for {path} (its kernels changed)"
        return None

    def check(self, spec: MoESpec, fmt: str) -> None:
        """Raise UnknownRecipe, naming both sides, unless this profile was measured for exactly this shape and format."""
        measured, wanted = ({"fmt": name, **_shape_json(shape)} for name, shape in ((self.fmt, self.shape), (fmt, spec)))
        differ = [name for name in measured if measured[name] != wanted[name]]
        if differ:
            theirs, ours = (", ".join(f"{name}={side[name]}" for name in differ) for side in (measured, wanted))
            raise UnknownRecipe(f"{self.title} was measured for {theirs}, the plan has {ours}; find_profile gives the one that fits, if there is one")

    def to_json(self) -> dict[str, Any]:
        """Plain data with the schema version; `from_json` gives an equal profile back."""
        return {
            "schema": SCHEMA,
            "device": self.device,
            "fmt": self.fmt,
            "shape": _shape_json(self.shape),
            "kernels": dict(self.kernels),
            "provenance": dict(self.provenance),
            "buckets": [record.to_json() for record in self.buckets],
        }

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """A stored profile.

        Raises:
            SchemaMismatch: another schema version.
            PlanError: a field, by name, is missing, unknown or impossible.
        """
        if not isinstance(data, Mapping):
            raise PlanError(f"a stored profile is a JSON object, not a {type(data).__name__}")
        if data.get("schema") != SCHEMA:
            raise SchemaMismatch(f"the profile has schema {data.get('schema')!r}, this graphmoe reads {SCHEMA!r}; measure it anew")
        given = {name: value for name, value in _object(data, ("schema", *(field.name for field in fields(cls)))).items() if name != "schema"}
        if not isinstance(given["buckets"], list):
            raise PlanError(f"buckets must be a list, not a {type(given['buckets']).__name__}")
        records = []
        for number, record in enumerate(given["buckets"]):
            with _inside(f"buckets[{number}]"):
                records.append(BucketRecord.from_json(record))
        with _inside("shape"):
            shape = _shape(given["shape"])
        return cls(**{**given, "shape": shape, "buckets": tuple(records)})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file; it appears under its name only when complete. Makes the folder if it is absent.

        Raises:
            PlanError: it cannot be written.
        """
        target, temporary = Path(path), None
        text = json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=target.name, suffix=".tmp", dir=target.parent)
            temporary = Path(name)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.chmod(0o644)  # mkstemp makes files that nobody else can read
            temporary.replace(target)
        except OSError as error:
            raise PlanError(f"the profile cannot be written to {target}: {error.strerror}") from error
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a file.

        Raises:
            SchemaMismatch, PlanError: as `from_json`, and for a file that cannot be read; the file is named.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{path} is no JSON: {error}") from error
        with _inside(str(path)):
            return cls.from_json(data)

    def _nearest(self, tokens: int) -> BucketRecord | None:
        sizes = [record.tokens for record in self.buckets]
        if tokens > _FAR * sizes[-1] or _FAR * tokens < sizes[0]:
            return None
        above = bisect_left(sizes, tokens)
        if above in (0, len(sizes)):
            return self.buckets[min(above, len(sizes) - 1)]
        below = above - 1
        nearest = self.buckets[above if tokens * tokens >= sizes[below] * sizes[above] else below]
        return nearest if nearest.tokens <= _FAR * tokens and tokens <= _FAR * nearest.tokens else None


def kernels_version(path_name: str) -> str:
    """16 hex digits of SHA-256 over the source files that a path declares: what is measured stays true while they stay the same.

    Raises:
        UnknownRecipe: no such path.
    """
    return _digest(PACKAGE, tuple(get_path(path_name).sources))


@cache  # files that change beneath a running process are not what it runs
def _digest(package: Path, sources: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in sorted(sources):
        content = (package / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def profiles_root() -> Path:
    """The folder of the shipped profiles: inside an installed package, or at the root of a source tree."""
    packaged, beside = PACKAGE / "capture_profiles", PACKAGE.parent / "capture_profiles"
    return beside if beside.is_dir() and not packaged.is_dir() else packaged


def device_slug(device_name: str) -> str:
    """The folder of a device's profiles: `NVIDIA H200` -> `nvidia-h200`."""
    return re.sub("[^a-z0-9]+", "-", device_name.lower()).strip("-")


def find_profile(spec: MoESpec, fmt: str, device_name: str, *, root: str | os.PathLike[str] | None = None) -> Profile | None:
    """The profile of exactly this device, shape and format, or None. A file that is no profile is skipped with a warning.

    Args:
        spec: the layer as this rank sees it, already sharded.
        fmt: weight format.
        device_name: as torch names it.
        root: folder of device folders; the shipped ones by default.
    """
    folder = (profiles_root() if root is None else Path(root)) / device_slug(device_name)
    wanted = (device_name, fmt, shape_of(spec))
    for file in sorted(folder.glob("*.json")):
        try:
            profile = Profile.load(file)
        except PlanError as error:
            logger.warning("skipped a capture profile: %s", error)
            continue
        if (profile.device, profile.fmt, profile.shape) == wanted:
            return profile
    return None


def profiled_devices() -> list[str]:
    """Devices that shipped profiles were measured on, as torch names them."""
    devices = set()
    for file in profiles_root().glob("*/*.json"):
        with suppress(PlanError):
            devices.add(Profile.load(file).device)
    return sorted(devices)


def profile_for(wish: Profile | Literal["auto"] | None, spec: MoESpec, fmt: str, device_name: str | None) -> Profile | None:
    """The profile that a runtime uses.

    Args:
        wish: `"auto"` looks for one of the device, None uses none, a Profile is used as it is.
        spec: the layer.
        fmt: weight format.
        device_name: as torch names it; None on the CPU, which `"auto"` has no profile for.

    Raises:
        UnknownRecipe: the given profile is of another device.
        PlanError: `wish` is none of these.
    """
    if wish is None:
        return None
    if isinstance(wish, str) and wish == "auto":
        return None if device_name is None else find_profile(spec, fmt, device_name)
    if not isinstance(wish, Profile):
        raise PlanError(f"profile={wish!r} must be 'auto', None or a Profile; Profile.load(path) reads one")
    if wish.device != (device_name or "cpu"):
        raise UnknownRecipe(f"{wish.title} was measured on {wish.device!r}, this runtime is on {device_name or 'cpu'!r}; pass profile='auto' or None")
    return wish


def _shape_json(spec: MoESpec) -> dict[str, Any]:
    return {name: value for name, value in asdict(spec).items() if name not in _NOT_SHAPE}


def _shape(data: Any) -> MoESpec:
    given = _object(data, tuple(field.name for field in fields(MoESpec) if field.name not in _NOT_SHAPE))
    try:
        shape = MoESpec(**given)
    except SpecError as error:
        raise PlanError(str(error)) from error
    if shape.num_local_experts != given["num_local_experts"]:
        raise PlanError(f"num_local_experts={given['num_local_experts']} must be at least 1")
    return shape


def _recipe(data: Any) -> Recipe:
    with _inside("recipe"):
        given = _object(data, ("path", "options"))
        if not isinstance(given["path"], str) or not isinstance(given["options"], Mapping):
            raise PlanError(f"path={given['path']!r} must be a name and options={given['options']!r} an object of ints")
        try:
            return Recipe.from_json(dict(given))
        except TypeError as error:  # an option called "path"
            raise PlanError(f"options={given['options']!r}: {error}") from error


def finite_number(name: str, value: Any, *, positive: bool) -> float:
    """A finite float from 0 up, or above 0.

    Raises:
        PlanError: it is none; the message names it.
    """
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise PlanError(f"{name}={value!r} must be a finite number {'above 0' if positive else 'of at least 0'}")
    return number


def _texts(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and isinstance(text, str) for key, text in value.items()):
        raise PlanError(f"{name}={value!r} must map names to strings")
    return dict(value)


def _object(data: Any, names: tuple[str, ...]) -> Mapping[str, Any]:
    """A JSON object with exactly these fields."""
    if not isinstance(data, Mapping):
        raise PlanError(f"{data!r} must be a JSON object with {', '.join(names)}")
    missing, unknown = [name for name in names if name not in data], [name for name in data if name not in names]
    if missing or unknown:
        raise PlanError(f"missing fields: {missing}, unknown fields: {unknown}; the fields are {', '.join(names)}")
    return data


@contextmanager
def _inside(where: str) -> Iterator[None]:
    """Errors say where in the file they are, and keep their type."""
    try:
        yield
    except PlanError as error:
        raise type(error)(f"{where}: {error}") from error
