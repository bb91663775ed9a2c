"""A recipe as text: what may be written, that it means the recipe, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphmoe import MoESpec, Recipe, plan
from graphmoe.errors import UnknownRecipe

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(lambda name: name not in ("self", "path"))


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("auto", Recipe("auto")),
        ("psum", Recipe("psum")),
        ("compact:block_e=128", Recipe("compact", block_e=128)),
        ("gathered:tile=32,up_rows=64", Recipe("gathered", tile=32, up_rows=64)),
        (" gathered: up_rows=64, tile=32 ", Recipe("gathered", tile=32, up_rows=64)),
        ("psum block_e=64", Recipe("psum", block_e=64)),
    ],
)
def test_text_means_a_recipe(text: str, recipe: Recipe) -> None:
    assert Recipe.parse(text) == Recipe.of(text) == recipe
    assert Recipe.of(recipe) is recipe


@given(path=NAMES, options=st.dictionaries(NAMES, st.integers(-999, 99999)))
def test_what_is_printed_is_read_back(path: str, options: dict[str, int]) -> None:
    recipe = Recipe(path, **options)
    assert Recipe.parse(str(recipe)) == recipe
    assert Recipe.parse(f"{path}:" + ",".join(f"{name}={value}" for name, value in options.items()) if options else path) == recipe


@pytest.mark.parametrize(
    "text",
    ["psum:", "psum:block_e", "psum:block_e=", "psum:=64", "psum:block_e=64=64", "psum:block_e=1.5", "psum:block_e=64,block_e=64", "psum:path=1",
     "psum:self=1", "psum:block_e=" + "9" * 5000],
)  # fmt: skip
def test_text_that_means_none_says_how_to_write_one(text: str) -> None:
    with pytest.raises(UnknownRecipe, match="write path:name=int,name=int, such as 'psum:block_e=128'"):
        Recipe.parse(text)


@pytest.mark.parametrize("wish", [None, 3, ["psum"], ("psum", 64)], ids=repr)
def test_what_is_neither_text_nor_a_recipe_is_refused(wish: object) -> None:
    with pytest.raises(UnknownRecipe, match="is no recipe"):
        Recipe.of(wish)


def test_a_plan_takes_text() -> None:
    spec = MoESpec(8, 2, 256, 128)
    made = plan(spec, [1, 2], recipes={1: "compact:block_e=128", 2: "psum"})
    assert [bucket.recipe for bucket in made.buckets] == [Recipe("compact", block_e=128), Recipe("psum", block_e=64)]
    with pytest.raises(UnknownRecipe, match="block_e in"):
        plan(spec, [1], recipes="compact:block_e=96")
