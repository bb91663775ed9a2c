"""The ladder of batch sizes that get a graph each, and which of them a batch runs in."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from graphmoe.errors import BatchTooLarge, SpecError

Overflow = Literal["raise", "chunk"]

_PRESETS: dict[str, tuple[int, tuple[int, ...]]] = {
    "vllm": (512, (1, 2, 4, *range(8, 256, 8), *range(256, 1 << 16, 16))),
    "sglang": (256, (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, 1 << 16, 32))),
}


@dataclass(frozen=True)
class BucketLadder:
    """Ascending batch sizes, each captured once; a batch runs in the smallest that holds it.

    Args:
        sizes: at least one positive int; sorted and deduplicated here.
        overflow: what a batch beyond the largest does: `"raise"` BatchTooLarge, or `"chunk"`: run in pieces of the largest bucket.

    Raises:
        SpecError: no sizes, or a size below 1.
    """

    sizes: tuple[int, ...]
    overflow: Overflow = "raise"

    def __init__(self, sizes: Iterable[int], overflow: Overflow = "raise") -> None:
        try:
            given = tuple(sizes)
        except TypeError:
            raise SpecError(f"a bucket ladder needs positive ints, got {sizes!r}") from None
        if not given or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in given):
            raise SpecError(f"a bucket ladder needs positive ints, got {given}")
        ladder = tuple(sorted(set(given)))
        if overflow not in ("raise", "chunk"):
            raise SpecError(f"overflow={overflow!r} must be 'raise' or 'chunk'")
        object.__setattr__(self, "sizes", ladder)
        object.__setattr__(self, "overflow", overflow)

    @classmethod
    def preset(cls, name: str, max_tokens: int | None = None, overflow: Overflow = "raise") -> BucketLadder:
        """The capture sizes of `"vllm"` (to 512 by default) or `"sglang"` (to 256), cut at `max_tokens`, which is always a bucket itself."""
        if name not in _PRESETS:
            raise SpecError(f"unknown preset {name!r}; presets: {', '.join(_PRESETS)}; a ladder of your own is BucketLadder([1, 2, 4, 8])")
        default_max, sizes = _PRESETS[name]
        top = default_max if max_tokens is None else max_tokens
        return cls([*(size for size in sizes if size <= top), top], overflow)

    @classmethod
    def of(cls, buckets: BucketLadder | str | Iterable[int], overflow: Overflow | None = None) -> BucketLadder:
        """A ladder from a ladder, a preset's name, a string like `"1,2,4"`, or ints. `overflow` overrides the ladder's own."""
        if isinstance(buckets, BucketLadder):
            return buckets if overflow is None else cls(buckets.sizes, overflow)
        policy: Overflow = overflow or "raise"
        if isinstance(buckets, str):
            if re.fullmatch(r"\s*[0-9]+(\s*,\s*[0-9]+)*\s*,?\s*", buckets):
                return cls([int(size) for size in buckets.split(",") if size.strip()], policy)
            if buckets not in _PRESETS:
                raise SpecError(f"{buckets!r} is neither a preset ({', '.join(_PRESETS)}) nor batch sizes such as '1,2,4,8' (positive ints)")
            return cls.preset(buckets, overflow=policy)
        return cls(buckets, policy)

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def bucket_for(self, tokens: int) -> int:
        """The smallest bucket that holds `tokens` (0 tokens run in the smallest).

        Raises:
            BatchTooLarge: beyond the largest bucket, whatever the overflow policy: see `chunks`.
        """
        if tokens < 0:
            raise SpecError(f"a batch cannot have {tokens} tokens")
        if tokens > self.largest:
            raise BatchTooLarge(f"{tokens} tokens exceed the largest bucket {self.largest}; add a bucket >= {tokens} or use overflow='chunk'")
        return self.sizes[bisect_left(self.sizes, tokens)]

    def chunks(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """The pieces `(first token, tokens)` that a batch runs in: one, or under `chunk` as many as the largest bucket needs."""
        if tokens <= self.largest or self.overflow == "raise":
            self.bucket_for(tokens)
            return ((0, tokens),)
        return tuple((first, min(self.largest, tokens - first)) for first in range(0, tokens, self.largest))
