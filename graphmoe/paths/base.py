"""What a path is: a pure half that the planner asks, and a bound half that the step runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING, Protocol

from graphmoe.errors import UnknownRecipe
from graphmoe.formats import Format, Rounding
from graphmoe.layout import LayoutKind
from graphmoe.recipe import Recipe
from graphmoe.spec import MoESpec

if TYPE_CHECKING:
    from torch import Tensor

    from graphmoe.gemm import GroupedGemm
    from graphmoe.ops import Ops
    from graphmoe.weights import ExpertWeights

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "int32": 4}


class Stage(IntEnum):
    """The seven stages of a call, in launch order; buffer lifetimes are counted in them."""

    STAGE = 0
    ROUTE = 1
    SCATTER = 2
    UP = 3
    ACT = 4
    DOWN = 5
    COMBINE = 6


@dataclass(frozen=True)
class BufferSpec:
    """A buffer that a step needs: written first in stage `first`, read last in stage `last`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    first: Stage
    last: Stage

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class BoundPath(Protocol):
    """One layer's step over one bucket's buffers; `step.step` calls these in order."""

    @property
    def launches(self) -> int:
        """Kernels that one step launches on a GPU."""

    def route(self, topk_ids: Tensor, x: Tensor) -> None: ...
    def up(self, x: Tensor, topk_ids: Tensor) -> None: ...
    def down(self) -> None: ...
    def combine(self, topk_ids: Tensor, topk_weights: Tensor, out: Tensor) -> None: ...


class Path(Protocol):
    """The pure half, registered by name in `graphmoe.paths.PATHS`. No torch, no device."""

    @property
    def name(self) -> str: ...

    @property
    def weight_layout(self) -> str:
        """Which prepared form of the weights it reads; `"plain"` is the checkpoint's own `[E, N, K]`."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Files of this package whose change makes what was measured of this path void, such as `kernels/route.py`."""

    @property
    def gemm_layout(self) -> LayoutKind | None:
        """The row layout of the library GEMMs that it calls; None if its kernels are its own."""

    def options(self, recipe: Recipe) -> dict[str, int]:
        """Every option with its value. Raises UnknownRecipe for an unknown option or value."""

    def rounding(self, options: Mapping[str, int]) -> Rounding:
        """Where it rounds activations inside the layer."""

    def supports(self, spec: MoESpec, fmt: Format, arch: str) -> str | None:
        """Why this path cannot run, or None."""

    def rows(self, spec: MoESpec, tokens: int, options: Mapping[str, int]) -> int:
        """Rows of activations that the bucket holds."""

    def buffers(self, spec: MoESpec, fmt: Format, tokens: int, options: Mapping[str, int]) -> tuple[BufferSpec, ...]:
        """Every scratch buffer of a step over `tokens` tokens."""

    def bind(
        self,
        spec: MoESpec,
        fmt: Format,
        tokens: int,
        options: Mapping[str, int],
        buffers: Mapping[str, Tensor],
        weights: ExpertWeights,
        ops: Ops,
        gemm: GroupedGemm | None,
    ) -> BoundPath:
        """The step of one layer over these buffers."""

    def check_blocks(self, options: Mapping[str, int], gemm_threads: tuple[int, ...]) -> str | None:
        """Judge the thread counts of a captured step's GEMM kernels: why they break the plan, or None."""


_MOST_SLOTS = 128


def too_many_slots(spec: MoESpec, arch: str, most: int = _MOST_SLOTS) -> str | None:
    """Why the kernels do not take this many experts a token, or None: they compare a token's slots with each other."""
    if arch == "cpu" or spec.top_k <= most:
        return None
    way_out = "use gathered or psum" if most < _MOST_SLOTS else "no path takes more on a GPU"
    return f"K={spec.top_k} experts a token are more than its kernels take, {most}; {way_out}"


def choose(recipe: Recipe, **allowed: tuple[int, ...]) -> dict[str, int]:
    """The recipe's options, each out of its allowed values; the first allowed value is the default."""
    given = dict(recipe.options)
    unknown = given.keys() - allowed.keys()
    if unknown:
        raise UnknownRecipe(f"path {recipe.path!r} has no option {', '.join(sorted(unknown))}; its options: {', '.join(allowed)}")
    chosen = {name: given.get(name, values[0]) for name, values in allowed.items()}
    for name, value in chosen.items():
        if value not in allowed[name]:
            raise UnknownRecipe(f"path {recipe.path!r} takes {name} in {allowed[name]}, not {value}")
    return chosen
