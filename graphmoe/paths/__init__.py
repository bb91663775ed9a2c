"""The registered paths. Adding one is one file here and one line in `PATHS`."""

from __future__ import annotations

from graphmoe.errors import UnknownRecipe
from graphmoe.formats import Format, Rounding
from graphmoe.paths.base import Path
from graphmoe.paths.direct import DirectPath
from graphmoe.paths.gathered import GatheredPath
from graphmoe.paths.gathered_w4 import GatheredW4Path
from graphmoe.paths.grouped import GroupedPath
from graphmoe.recipe import Recipe
from graphmoe.spec import MoESpec

_REGISTERED: tuple[Path, ...] = (
    GroupedPath("masked"),
    GroupedPath("compact"),
    GroupedPath("psum"),
    GatheredPath(),
    GatheredW4Path(),
    DirectPath(),
)
PATHS: dict[str, Path] = {path.name: path for path in _REGISTERED}


def get_path(name: str) -> Path:
    """The registered path, or UnknownRecipe naming the known ones."""
    if name not in PATHS:
        raise UnknownRecipe(f"unknown path {name!r}; known: {', '.join(PATHS)}, or 'auto'")
    return PATHS[name]


def why_not(name: str, spec: MoESpec, fmt: Format, arch: str) -> str | None:
    """Why a path cannot run this, or None.

    Raises:
        UnknownRecipe: no path of this name.
    """
    path = get_path(name)
    if path.weight_layout != fmt.layout:
        others = ", ".join(repr(other.name) for other in _REGISTERED if other.weight_layout == fmt.layout)
        return f"it does not read weights of format {fmt.name!r}; take {others}"
    return path.supports(spec, fmt, arch)


def filled(recipe: Recipe) -> Recipe:
    """The recipe with every option of its path, so that one recipe has one name."""
    return Recipe(recipe.path, **get_path(recipe.path).options(recipe))


def rounding_of(recipe: Recipe | str) -> Rounding:
    """Where the path of a recipe rounds activations."""
    recipe = Recipe.of(recipe)
    path = get_path(recipe.path)
    return path.rounding(path.options(recipe))
