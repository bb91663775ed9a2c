"""What will run and where every byte lies, decided before any device is touched. Pure integers; no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from graphmoe.bounds import round_up
from graphmoe.buckets import BucketLadder
from graphmoe.errors import ArenaTooLarge, PlanError, SchemaMismatch, UnknownRecipe, UnsupportedShape
from graphmoe.fallback import fallback
from graphmoe.formats import Format, get_format
from graphmoe.paths import PATHS, get_path, why_not
from graphmoe.paths.base import DTYPE_BYTES, BufferSpec, Stage
from graphmoe.profile import Profile
from graphmoe.recipe import Recipe
from graphmoe.spec import MoESpec

SCHEMA = "graphmoe.plan/1"
ALIGNMENT = 256
"""Bytes that every buffer's offset is a multiple of: enough for TMA (16) and for full cache lines."""

Wish = Recipe | str
"""A recipe, a path's name, or "auto"."""

_GRID_AXIS = 65535
"""Programs along the second axis of a CUDA grid."""

_GEMM_OF_ARCH = {"sm90": "deep_gemm", "sm100": "deep_gemm", "cpu": "torch"}


@dataclass(frozen=True)
class PlacedBuffer:
    """A buffer with its place in the arena."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    first: Stage
    last: Stage
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: its recipe, who chose it, its row bound and its scratch buffers."""

    tokens: int
    recipe: Recipe
    rule: str
    rows: int
    buffers: tuple[PlacedBuffer, ...]

    @property
    def options(self) -> dict[str, int]:
        return get_path(self.recipe.path).options(self.recipe)


@dataclass(frozen=True)
class Plan:
    """Everything a runtime allocates and captures; equal arguments give equal plans, byte for byte.

    The arena is `[static buffers | scratch]`. Static inputs, the output and the flag share bytes with nothing and lie at one offset in every bucket;
    scratch is shared by all buckets and all layers, and within a bucket by buffers whose lifetimes do not meet.

    Attributes:
        static: input, output and flag buffers, sized for the largest bucket.
        arena_bytes: size of the one allocation.
        static_bytes: where scratch begins.
        guard_bytes: untouched bytes behind every buffer; above 0, buffers of a bucket share nothing.
    """

    spec: MoESpec
    ladder: BucketLadder
    fmt: str
    arch: str
    gemm: str
    guard_bytes: int
    static: tuple[PlacedBuffer, ...]
    static_bytes: int
    arena_bytes: int
    buckets: tuple[BucketPlan, ...]

    def bucket(self, tokens: int) -> BucketPlan:
        """The plan of the bucket that `tokens` tokens run in."""
        return self.buckets[self.ladder.sizes.index(self.ladder.bucket_for(tokens))]

    def bucket_bytes(self, bucket: BucketPlan) -> int:
        """Arena bytes up to the end of this bucket's scratch; the static buffers before it are sized for the largest bucket."""
        return max([self.static_bytes, *(_end(buffer, self.guard_bytes) for buffer in bucket.buffers)])

    def to_json(self) -> dict[str, Any]:
        """Plain data with the schema version and the fingerprint; `from_json` gives an equal plan back."""
        return {**self._content(), "fingerprint": self.fingerprint}

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the plan's content: two plans with one fingerprint lay out and run the same."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "spec": asdict(self.spec),
            "ladder": {"sizes": list(self.ladder.sizes), "overflow": self.ladder.overflow},
            "fmt": self.fmt,
            "arch": self.arch,
            "gemm": self.gemm,
            "guard_bytes": self.guard_bytes,
            "static_bytes": self.static_bytes,
            "arena_bytes": self.arena_bytes,
            "static": [_buffer_json(buffer) for buffer in self.static],
            "buckets": [
                {
                    "tokens": bucket.tokens,
                    "recipe": bucket.recipe.to_json(),
                    "rule": bucket.rule,
                    "rows": bucket.rows,
                    "buffers": [_buffer_json(buffer) for buffer in bucket.buffers],
                }
                for bucket in self.buckets
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """A stored plan.

        Raises:
            SchemaMismatch: another schema version.
            PlanError: a field is missing, or the content does not match its fingerprint.
        """
        if not isinstance(data, Mapping):
            raise PlanError(f"a stored plan is a JSON object, not a {type(data).__name__}")
        if data.get("schema") != SCHEMA:
            raise SchemaMismatch(f"the plan has schema {data.get('schema')!r}, this graphmoe reads {SCHEMA!r}; make the plan anew")
        try:
            stored = cls(
                spec=MoESpec(**data["spec"]),
                ladder=BucketLadder(data["ladder"]["sizes"], data["ladder"]["overflow"]),
                fmt=data["fmt"],
                arch=data["arch"],
                gemm=data["gemm"],
                guard_bytes=data["guard_bytes"],
                static=tuple(_buffer_from(buffer) for buffer in data["static"]),
                static_bytes=data["static_bytes"],
                arena_bytes=data["arena_bytes"],
                buckets=tuple(
                    BucketPlan(
                        b["tokens"], Recipe.from_json(b["recipe"]), b["rule"], b["rows"], tuple(_buffer_from(buffer) for buffer in b["buffers"])
                    )
                    for b in data["buckets"]
                ),
            )
            same = stored.to_json() == dict(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"the plan lacks or misspells a field: {type(error).__name__}: {error}; make the plan anew") from error
        if not same:
            raise PlanError("the plan's content does not match its fingerprint: it was edited; make the plan anew")
        return stored


def plan(
    spec: MoESpec,
    ladder: BucketLadder | str | Iterable[int],
    *,
    fmt: str = "fp8_block",
    arch: str = "sm90",
    recipes: Wish | Mapping[int, Wish] = "auto",
    max_arena_bytes: int | None = None,
    guard_bytes: int = 0,
    profile: Profile | None = None,
) -> Plan:
    """Decide every bucket's path, rows and buffers.

    Args:
        spec: the layer.
        ladder: batch sizes: a BucketLadder, a preset's name, or ints.
        fmt: weight format, `"fp8_block"`, `"ue8m0"`, `"w4afp8"` or `"bf16"`; activations between the stages take the same scales.
        arch: `"sm90"` (deep_gemm), `"sm100"` (deep_gemm with packed scales; not run on Blackwell yet) or `"cpu"` (torch).
        recipes: one recipe or path name for all buckets, `"auto"`, or a mapping from bucket to recipe (buckets it leaves out are auto).
        max_arena_bytes: refuse a larger arena.
        guard_bytes: bytes behind every buffer that nothing may write (for verification).
        profile: measured recipes for the buckets that are auto; `find_profile` gives the shipped one. Where it does not apply the stated rule does,
            and says why. Whether this machine is the profile's device is the caller's to know: a plan names no device.

    Raises:
        UnknownRecipe: a path or option nobody registered, or a profile of another shape or format.
        UnsupportedShape, ArenaTooLarge.
    """
    ladder = BucketLadder.of(ladder)
    if arch not in _GEMM_OF_ARCH:
        raise UnsupportedShape(f"unknown arch {arch!r}; known: {', '.join(_GEMM_OF_ARCH)}")
    weight_format = get_format(fmt).on(arch)
    weight_format.check(spec)
    if isinstance(guard_bytes, bool) or not isinstance(guard_bytes, int) or guard_bytes < 0:
        raise PlanError(f"guard_bytes={guard_bytes} must be an int of at least 0")
    if isinstance(recipes, Mapping) and not set(recipes) <= set(ladder.sizes):
        strangers = [bucket for bucket in recipes if bucket not in ladder.sizes]
        raise UnknownRecipe(f"recipes name buckets {strangers} that the ladder {list(ladder.sizes)} lacks")

    if profile is not None:
        if not isinstance(profile, Profile):
            raise PlanError(f"profile={profile!r} must be a Profile or None; Profile.load(path) reads one")
        profile.check(spec, weight_format.name)

    if max_arena_bytes is not None and (isinstance(max_arena_bytes, bool) or not isinstance(max_arena_bytes, int)):
        raise PlanError(f"max_arena_bytes={max_arena_bytes!r} must be a number of bytes")
    planner = _Planner(spec, weight_format, arch, guard_bytes, max_arena_bytes, profile)
    made = planner.plan(ladder, recipes)
    if max_arena_bytes is not None and made.arena_bytes > max_arena_bytes:
        raise planner.too_large(made, recipes, max_arena_bytes)
    return made


@dataclass(frozen=True)
class _Planner:
    """The arguments of a `plan` call that do not change while a remedy is looked for."""

    spec: MoESpec
    fmt: Format
    arch: str
    guard_bytes: int
    max_arena_bytes: int | None
    profile: Profile | None

    def plan(self, ladder: BucketLadder, recipes: Wish | Mapping[int, Wish]) -> Plan:
        """The plan whether it fits `max_arena_bytes` or not."""
        static = self._static(ladder)
        static_bytes = max(_end(buffer, self.guard_bytes) for buffer in static)
        buckets = tuple(
            self._bucket(tokens, recipes.get(tokens, "auto") if isinstance(recipes, Mapping) else recipes, static_bytes) for tokens in ladder.sizes
        )
        arena_bytes = max([static_bytes, *(self._bytes(bucket) for bucket in buckets)])
        gemm = _GEMM_OF_ARCH[self.arch]
        return Plan(self.spec, ladder, self.fmt.name, self.arch, gemm, self.guard_bytes, static, static_bytes, arena_bytes, buckets)

    def _static(self, ladder: BucketLadder) -> tuple[PlacedBuffer, ...]:
        t, h, k = ladder.largest, self.spec.hidden_size, self.spec.top_k
        specs = (
            BufferSpec("x", (t, h), "bfloat16", Stage.STAGE, Stage.COMBINE),
            BufferSpec("topk_ids", (t, k), "int32", Stage.STAGE, Stage.COMBINE),
            BufferSpec("topk_weights", (t, k), "float32", Stage.STAGE, Stage.COMBINE),
            BufferSpec("y", (t, h), "bfloat16", Stage.STAGE, Stage.COMBINE),
            BufferSpec("flags", (1,), "int32", Stage.STAGE, Stage.COMBINE),
        )
        return place(specs, 0, self.guard_bytes)

    def _bucket(self, tokens: int, wish: Wish, static_bytes: int) -> BucketPlan:
        if wish not in ("auto", Recipe("auto")):
            return self._with_recipe(tokens, Recipe.of(wish), "asked for", static_bytes)
        if self.profile is None:
            return self._unmeasured(tokens, None, static_bytes)
        measured = self._measured(tokens, self.profile, static_bytes)
        return measured if isinstance(measured, BucketPlan) else self._unmeasured(tokens, measured, static_bytes)

    def _measured(self, tokens: int, profile: Profile, static_bytes: int) -> BucketPlan | str:
        """The profile's choice, or why it does not apply."""
        choice = profile.choose(tokens)
        if choice is None:
            return str(profile.void(tokens))
        try:
            bucket = self._with_recipe(tokens, *choice, static_bytes)
        except PlanError as error:
            return f"{profile.title} chose {choice[0]}, which cannot run: {error}"
        return bucket if self._fits(bucket) else f"{profile.title} chose {choice[0]}, which exceeds max_arena_bytes"

    def _unmeasured(self, tokens: int, why: str | None, static_bytes: int) -> BucketPlan:
        """The stated rule. `why`: what keeps the profile from speaking, if there is one."""
        because = f"auto: {why or 'no profile'}"
        misfits: list[BucketPlan] = []
        for recipe, reason in fallback(self.spec, tokens, self.fmt.layout):
            if why_not(recipe.path, self.spec, self.fmt, self.arch):
                continue
            bucket = self._with_recipe(tokens, recipe, f"{because}, {reason}", static_bytes)
            if self._fits(bucket):
                return bucket
            because += f", {recipe.path} exceeds max_arena_bytes"
            misfits.append(bucket)
        if not misfits:
            return self._with_recipe(tokens, recipe, because, static_bytes)  # raises: the last resort says what it cannot take
        return min(misfits, key=self._bytes)  # the plan will be refused: by what it misses at least

    def _fits(self, bucket: BucketPlan) -> bool:
        return self.max_arena_bytes is None or self._bytes(bucket) <= self.max_arena_bytes

    def _with_recipe(self, tokens: int, recipe: Recipe, rule: str, static_bytes: int) -> BucketPlan:
        path = get_path(recipe.path)
        options = path.options(recipe)
        reason = why_not(recipe.path, self.spec, self.fmt, self.arch)
        if reason:
            raise UnsupportedShape(f"path {recipe.path!r}: {reason}")
        rows = path.rows(self.spec, tokens, options)
        if rows >= 1 << 31:
            raise UnsupportedShape(f"bucket {tokens} needs {rows} rows in path {recipe.path!r}; row indices are int32: use smaller buckets")
        specs = path.buffers(self.spec, self.fmt, tokens, options)
        if path.gemm_layout is None:
            # Kernels of our own launch a program a tile, or a row, along the grid's second axis.
            programs = {buffer.name: buffer.shape[0] for buffer in specs}.get("tiles", rows)
            if programs > _GRID_AXIS:
                raise UnsupportedShape(
                    f"bucket {tokens} needs {programs} programs in path {recipe.path!r}, a grid has {_GRID_AXIS}: use psum or masked"
                )
        buffers = place(specs, static_bytes, self.guard_bytes)
        return BucketPlan(tokens, Recipe(recipe.path, **options), rule, rows, buffers)

    def _bytes(self, bucket: BucketPlan) -> int:
        return max(_end(buffer, self.guard_bytes) for buffer in bucket.buffers)

    def too_large(self, made: Plan, recipes: Wish | Mapping[int, Wish], limit: int) -> ArenaTooLarge:
        """The refusal of a plan, with every remedy that works."""
        worst = max(made.buckets, key=self._bytes)
        remedies = []
        for name in PATHS:
            with suppress(PlanError):
                other = self.plan(made.ladder, name)
                if other.arena_bytes <= limit:
                    remedies.append(f"pass path='{name}' ({_size(other.arena_bytes)})")
        for count in range(len(made.ladder.sizes) - 1, 0, -1):
            if self.plan(BucketLadder(made.ladder.sizes[:count]), recipes).arena_bytes <= limit:
                remedies.append(f"drop buckets above {made.ladder.sizes[count - 1]}")
                break
        remedies.append(f"raise it: max_arena_bytes must be at least {made.arena_bytes}")
        need = f"bucket {worst.tokens} needs {_size(self._bytes(worst))} in path '{worst.recipe.path}'"
        return ArenaTooLarge(f"{need} but max_arena_bytes is {_size(limit)}; {', or '.join(remedies)}")


def place(specs: Iterable[BufferSpec], base: int, guard_bytes: int) -> tuple[PlacedBuffer, ...]:
    """First fit, largest first: each buffer at the lowest aligned offset where it meets no placed buffer that is alive in one of its stages.

    With guard bytes every pair counts as alive together: a guard band must stay untouched for the whole call.
    """
    placed: list[PlacedBuffer] = []
    for spec in sorted(specs, key=lambda spec: (-spec.nbytes, spec.name)):
        size = spec.nbytes + guard_bytes
        offset = base
        for other in sorted(placed, key=lambda other: other.offset):
            together = guard_bytes > 0 or (spec.first <= other.last and other.first <= spec.last)
            if together and offset < _end(other, guard_bytes) and other.offset < offset + size:
                offset = _end(other, guard_bytes)
        placed.append(PlacedBuffer(spec.name, spec.shape, spec.dtype, spec.first, spec.last, offset))
    return tuple(placed)


def _end(buffer: PlacedBuffer, guard_bytes: int) -> int:
    return round_up(buffer.offset + buffer.nbytes + guard_bytes, ALIGNMENT)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.2f} MiB" if nbytes >= 1 << 20 else f"{nbytes} bytes"


def _buffer_json(buffer: PlacedBuffer) -> dict[str, Any]:
    lifetime = [buffer.first.name.lower(), buffer.last.name.lower()]
    return {
        "name": buffer.name,
        "shape": list(buffer.shape),
        "dtype": buffer.dtype,
        "lifetime": lifetime,
        "offset": buffer.offset,
        "nbytes": buffer.nbytes,
    }


def _buffer_from(data: Mapping[str, Any]) -> PlacedBuffer:
    first, last = (Stage[name.upper()] for name in data["lifetime"])
    return PlacedBuffer(data["name"], tuple(data["shape"]), data["dtype"], first, last, data["offset"])
