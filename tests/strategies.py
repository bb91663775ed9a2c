"""The one hypothesis vocabulary of the tests: small specs and routings that meet every edge. A new feature joins here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from graphmoe import MoESpec

NOT_HERE = (-1, -7, "E", "E+1", 2**31 - 1)
"""Ids that land nowhere; "E" stands for the number of local experts."""


@dataclass(frozen=True)
class Routing:
    """A spec, and `ids` int64 `[T, K]` that keep its promises."""

    spec: MoESpec
    ids: np.ndarray

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]


@st.composite
def specs(draw: st.DrawFn, *, max_experts: int = 12, max_top_k: int = 6) -> MoESpec:
    """E not a power of two, K = 1, K = E, K > E (an expert-parallel shard), distinct or not."""
    experts = draw(st.integers(1, max_experts))
    distinct = draw(st.booleans())
    top_k = draw(st.integers(1, max_top_k))
    others = draw(st.integers(0, 2 * max_experts))
    if distinct:
        others = max(others, top_k - experts)
    offset = draw(st.integers(0, others))
    return MoESpec(
        num_experts=experts + others,
        top_k=top_k,
        hidden_size=128 * draw(st.integers(1, 2)),
        intermediate_size=128 * draw(st.integers(1, 2)),
        num_local_experts=experts,
        expert_offset=offset,
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        distinct_topk=distinct,
    )


@st.composite
def routings(draw: st.DrawFn, *, spec: st.SearchStrategy[MoESpec] | None = None, max_tokens: int = 20) -> Routing:
    """Random, skewed and one-expert routings with sentinels, from 0 tokens on; duplicates only where the spec allows them."""
    of = draw(spec if spec is not None else specs())
    tokens = draw(st.integers(0, max_tokens))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    e, k = of.num_local_experts, of.top_k
    sharpness = draw(st.sampled_from([0.0, 1.0, 4.0, 50.0]))
    liking = np.exp(-sharpness * np.arange(e))
    away = [{"E": e, "E+1": e + 1}.get(str(code), code) for code in NOT_HERE]
    absent = draw(st.sampled_from([0.0, 0.3, 1.0]))
    ids = np.empty((tokens, k), dtype=np.int64)
    for token in range(tokens):
        if of.distinct_topk:
            keys = rng.gumbel(size=e) + np.log(liking + 1e-300)
            row = np.full(k, -1, dtype=np.int64)
            chosen = np.argsort(-keys)[:k]
            row[: len(chosen)] = chosen
            row = rng.permutation(row)
        else:
            row = rng.choice(e, size=k, p=liking / liking.sum())
        gone = (rng.random(k) < absent) | (row < 0)
        ids[token] = np.where(gone, rng.choice(np.array(away, dtype=np.int64), size=k), row)
    return Routing(of, ids)


@st.composite
def plan_arguments(
    draw: st.DrawFn,
    recipes: st.SearchStrategy,
    *,
    guard_bytes: st.SearchStrategy[int] | None = None,
    max_experts: int = 40,
    max_top_k: int = 10,
    max_tokens: int = 300,
    max_dim: int = 1024,
) -> dict[str, object]:
    """Arguments of `plan`: any spec, an unsorted ladder, one of `recipes` for all buckets or one each for some of them, guards or none."""
    fmt, divisor = draw(st.sampled_from([("fp8_block", 128), ("bf16", 64)]))
    dims = st.integers(1, max_dim // divisor).map(lambda blocks: blocks * divisor)
    base = draw(specs(max_experts=max_experts, max_top_k=max_top_k))
    ladder = draw(st.lists(st.integers(1, max_tokens), min_size=1, max_size=5))
    each = st.dictionaries(st.sampled_from(ladder), recipes)
    return {
        "spec": MoESpec(**{**vars(base), "hidden_size": draw(dims), "intermediate_size": draw(dims)}),
        "ladder": ladder,
        "fmt": fmt,
        "arch": draw(st.sampled_from(["sm90", "cpu"])),
        "recipes": draw(st.one_of(recipes, each)),
        "guard_bytes": draw(guard_bytes if guard_bytes is not None else st.sampled_from([0, 0, 1, 255, 256, 257, 4096])),
    }


MAGNITUDES = (0.0, 1e-44, 3e-38, 5.3e-36, 1e-20, 1.0, 448.0, 1e30, 3e38)
"""Largest magnitudes of a quantisation block: zero, a subnormal, two around 448 times the smallest normal float32, and on to the top of float32."""


@st.composite
def blocked_values(draw: st.DrawFn, *, block: tuple[int, int], whole: bool = False) -> np.ndarray:
    """float32 `[N, K]` whose blocks have magnitudes of their own (`MAGNITUDES`), ragged at the edges unless `whole`, zeros in between."""
    shape = []
    for side in block:
        count = draw(st.integers(1, 3))
        cut = 0 if whole or side == 1 else draw(st.sampled_from([0, 1, side // 2, side - 1]))
        shape.append(side * count - cut)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.uniform(-1.0, 1.0, shape)
    values[rng.random(shape) < draw(st.sampled_from([0.0, 0.5, 0.99]))] = 0.0
    for first_row in range(0, shape[0], block[0]):
        for first_column in range(0, shape[1], block[1]):
            values[first_row : first_row + block[0], first_column : first_column + block[1]] *= draw(st.sampled_from(MAGNITUDES))
    return values.astype(np.float32)


@dataclass(frozen=True)
class BlockFp8:
    """e4m3 bytes `[..., N, K]`, float32 scales of their blocks `[..., ceil(N/rows), ceil(K/columns)]`, and the block `(rows, columns)`."""

    codes: np.ndarray
    scales: np.ndarray
    block: tuple[int, int]


SCALE_EXPONENTS = (*range(-20, 21), -149, -140, -127, -126, -125, -118, 118, 119, 120, 127)
"""Powers of two of block scales: ordinary ones, and the ends of float32 with its subnormals."""


@st.composite
def block_fp8(draw: st.DrawFn) -> BlockFp8:
    """Any finite payloads with zeros of both signs, subnormals and +-448; scales at, just above and just below powers of two, zero, or anywhere."""
    block = draw(st.sampled_from([(128, 128), (1, 128), (64, 32), (5, 3)]))
    leading = draw(st.sampled_from([(), (), (1,), (3,), (2, 2)]))
    counts = [draw(st.integers(1, 2 if side == 128 else 3)) for side in block]
    cuts = [draw(st.sampled_from(sorted({0, 1 % side, side // 2, side - 1}))) for side in block]
    shape = (*leading, *(side * count - cut for side, count, cut in zip(block, counts, cuts, strict=True)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    largest = draw(st.sampled_from([0x7E, 0x7E, 0x76, 0x30, 0x07, 0x00]))  # 448, 224, 1, the largest subnormal, zero
    codes = rng.integers(0, largest + 1, shape, dtype=np.uint8)
    codes[rng.random(shape) < draw(st.sampled_from([0.0, 0.5, 0.99]))] = 0
    codes[rng.random(shape) < draw(st.sampled_from([0.0, 0.01]))] = largest
    codes |= rng.integers(0, 2, shape, dtype=np.uint8) << 7
    one = st.tuples(st.sampled_from(SCALE_EXPONENTS), st.sampled_from(["at", "above", "below", "between", "zero"]))
    scales = np.empty((*leading, *counts), dtype=np.float32)
    for index, (exponent, place) in zip(np.ndindex(scales.shape), draw(st.lists(one, min_size=scales.size, max_size=scales.size)), strict=True):
        power = np.float32(2.0**exponent)
        scales[index] = {
            "at": power,
            "above": np.nextafter(power, np.float32(np.inf)),
            "below": np.nextafter(power, np.float32(0)),
            "between": power * np.float32(rng.uniform(1, 1.99)),
            "zero": 0.0,
        }[place]
    return BlockFp8(codes, scales, block)


@dataclass(frozen=True)
class ScaledRows:
    """e4m3 bytes `[E, slots, K]` or `[R, K]`, float32 scales of each row and 128 columns, one scale for all of them, and which rows are live:
    int32 counts `[E]`, or int32 `[R]` that is negative elsewhere, or None: all are.
    """

    codes: np.ndarray
    scales: np.ndarray
    out_scale: float
    live: np.ndarray | None

    @property
    def alive(self) -> np.ndarray:
        """bool, of the rows' shape."""
        if self.live is None:
            return np.ones(self.codes.shape[:-1], dtype=bool)
        return np.arange(self.codes.shape[1]) < self.live[:, None] if self.codes.ndim == 3 else self.live >= 0


@st.composite
def scaled_rows(draw: st.DrawFn, *, exact: bool = False, powers: bool = False) -> ScaledRows:
    """Rows of every byte with scales of any size, NaN in both, `powers` of two or not; everything about rows that are not live is NaN.

    With `exact`, finite ones whose quotients by the one scale are e4m3 values, or saturate: what every implementation must give bit for bit.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.sampled_from([(1, 1), (3, 5), (2, 9), (4, 4), (1,), (7,), (12,)]))
    columns = draw(st.sampled_from([128, 640, 1152, 130, 60]))
    grouped = (*shape, -(-columns // 128))
    codes = rng.integers(0, 256, (*shape, columns), dtype=np.uint8)
    if exact:
        base = draw(st.sampled_from([-126, -100, 0, 5, 100, 127]))
        power = np.clip(rng.integers(-3, 10, grouped), -126 - base, 127 - base)
        scales, out_scale = 2.0 ** (power + base), 2.0**base
        codes = np.where(codes & 0x7F == 0x7F, codes & 0x80, codes)
        shrinks = np.repeat(power < 0, 128, axis=-1)[..., :columns]
        codes = np.where(shrinks & (codes & 0x7F < 32), codes & 0x80, codes)  # 2^-3 stays normal when it is divided by 8
    else:
        out_scale = float(np.float32(2.0 ** draw(st.sampled_from((*range(-8, 9), -126, -60, 60, 126))) * rng.uniform(1, 1.99)))
        size = out_scale * 2.0 ** rng.integers(-12, 13, grouped) if draw(st.booleans()) else 2.0 ** rng.choice(SCALE_EXPONENTS[:-1], grouped)
        anywhere = np.minimum(size * rng.uniform(1, 1.99, grouped), 3e38)
        scales = 2.0 ** np.clip(np.floor(np.log2(size)), -126, 127) if powers else anywhere
        scales[rng.random(grouped) < draw(st.sampled_from([0.0, 0.1]))] = np.nan
    kind = draw(st.sampled_from(["all", "some", "none"]))
    live = None
    if kind != "all":
        most = shape[1] if len(shape) == 2 else 3
        live = rng.integers(0, most + 1, shape[:1]) if len(shape) == 2 else rng.integers(-1, most, shape)
        live = (live if kind == "some" else live * 0 - (len(shape) == 1)).astype(np.int32)
    made = ScaledRows(codes, scales.astype(np.float32), out_scale, live)
    codes[~made.alive], made.scales[~made.alive] = 0xFF, np.nan
    return made
