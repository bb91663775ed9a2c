"""What `auto` runs where no profile speaks: a rule of thumb drawn from the profiles of one H200, stated in every plan that uses it."""

from __future__ import annotations

from collections.abc import Iterator

from graphmoe.recipe import Recipe
from graphmoe.spec import MoESpec

_DIRECT_TOKENS = 4
_TILE_16_ROWS, _TILE_32_ROWS = 12, 32
_MASKED_EXPERTS = 32


def fallback(spec: MoESpec, tokens: int, layout: str) -> Iterator[tuple[Recipe, str]]:
    """Recipes for a bucket, best first, each with its reason; a plan takes the first that can run and fits the memory.

    Rows an expert gets on average, `T * K / num_experts`, decide: while they are few, what counts is how fast weights stream in.

    Args:
        spec: the layer.
        tokens: the bucket.
        layout: of its weights, see `Path.weight_layout`.
    """
    whole = spec.num_local_experts == spec.num_experts
    rows = tokens * spec.top_k / spec.num_experts
    if layout == "w4":  # not measured yet: the tile that holds an expert's rows
        yield Recipe("gathered_w4", tile=16 if rows <= _TILE_16_ROWS else 32 if rows <= _TILE_32_ROWS else 64), f"{rows:.3g} rows an expert, int4"
        return
    if whole and tokens <= _DIRECT_TOKENS:
        yield Recipe("direct"), f"at most {_DIRECT_TOKENS} tokens"
    if rows <= _TILE_16_ROWS:
        yield Recipe("gathered", tile=16), f"{rows:.3g} rows an expert, at most {_TILE_16_ROWS}"
    elif rows <= _TILE_32_ROWS:
        yield Recipe("gathered", tile=32), f"{rows:.3g} rows an expert, at most {_TILE_32_ROWS}"
    if not whole and spec.num_local_experts <= _MASKED_EXPERTS:
        yield Recipe("masked"), f"expert-parallel rank of at most {_MASKED_EXPERTS} experts"
    yield Recipe("psum", block_e=64), "psum with block_e 64"
