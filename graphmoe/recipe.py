"""A recipe: which path a bucket runs and with which options. Plain data, comparable, and written to plans and profiles as JSON."""

from __future__ import annotations

import re
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
        """A recipe from a recipe or from text, see `parse`."""
        return recipe if isinstance(recipe, Recipe) else cls.parse(recipe)

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """A recipe from `"compact"`, `"compact:block_e=128"` or `"gathered:tile=32,up_rows=64"`; what `str` makes of one is read too.

        Raises:
            UnknownRecipe: an option that is not `name=int`, or named twice. Names and values are judged when a plan is made.
        """
        if not isinstance(text, str):
            raise UnknownRecipe(f"{text!r} is no recipe; give a path's name such as 'psum', text such as 'psum:block_e=128', or a Recipe")
        path, *parts = re.split(r"[\s:,]+", text.strip())
        options: dict[str, int] = {}
        for part in parts:
            name, _, value = part.partition("=")
            if not name.isidentifier() or not re.fullmatch("-?[0-9]{1,9}", value) or name in ("self", "path", *options):
                raise UnknownRecipe(f"{part!r} in recipe {text!r} is not one name=int; write path:name=int,name=int, such as 'psum:block_e=128'")
            options[name] = int(value)
        return cls(path, **options)

    def __str__(self) -> str:
        return self.path + "".join(f" {name}={value}" for name, value in self.options)

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "options": dict(self.options)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Recipe:
        return cls(data["path"], **data["options"])
