"""A recipe: which path a bucket runs and with which options. Plain data, comparable, and written to plans and profiles as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphmoe.errors import UnknownRecipe


@dataclass(frozen=True)
class Recipe:
    """`Recipe("compact", block_e=64)`: a path's name and its options; options left out take the path's defaults.

    The path checks its options when a plan is made; here they only have to be ints.
    """

    path: str
    options: tuple[tuple[str, int], ...] = ()

    def __init__(self, path: str, **options: int) -> None:
        for name, value in options.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise UnknownRecipe(f"option {name}={value!r} of recipe {path!r} must be an int")
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "options", tuple(sorted(options.items())))

    @classmethod
    def of(cls, recipe: Recipe | str) -> Recipe:
        return recipe if isinstance(recipe, Recipe) else cls(recipe)

    def __str__(self) -> str:
        return self.path + "".join(f" {name}={value}" for name, value in self.options)

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "options": dict(self.options)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Recipe:
        return cls(data["path"], **data["options"])
