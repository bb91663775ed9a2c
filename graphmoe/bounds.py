"""How many rows any routing can need: theorems over integers, with a routing that attains each of them.

Letters: `T` tokens, `K` experts per token, `E` local experts, `b` the row alignment of an expert's segment,
`A` the assignments that can land on this rank. A routing is *distinct* if no token names a local expert twice, which is what
top-k selection gives; *arbitrary* otherwise. Sentinels (ids outside `[0, E)`) land nowhere and only lower the counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphmoe.errors import SpecError


def assignments(tokens: int, top_k: int, num_local_experts: int, *, distinct: bool = True) -> int:
    """`A`: most assignments that can land here: `T * min(K, E)` if distinct, else `T * K`."""
    _require(tokens, top_k, num_local_experts)
    return tokens * (min(top_k, num_local_experts) if distinct else top_k)


def compact_blocks(tokens: int, top_k: int, num_local_experts: int, block_e: int, *, distinct: bool = True) -> int:
    """Most `block_e`-row blocks that any routing can open in the compact layout.

    Hypothesis: at most `A` assignments land here (see `assignments`); with `distinct`, no expert gets more than `tokens`.
    Formula: `g + (A - g) // b`, and with `distinct` `g + min((A - g) // b, g * ((T - 1) // b))`, where `g = min(A, E)`.
    Reason: an expert with n >= 1 rows opens `1 + (n - 1) // b` blocks. Giving `g` experts one row each opens `g` blocks, and no
    routing has more live experts. Every further block costs `b` more rows of one expert, so at most `(A - g) // b` more open; an expert
    of at most `T` rows opens at most `(T - 1) // b` more. `worst_case_topk_ids` attains it.

    Raises:
        SpecError: negative tokens, or top_k, experts or block_e below 1.
    """
    total = assignments(tokens, top_k, num_local_experts, distinct=distinct)
    _require_block(block_e)
    live = min(total, num_local_experts)
    further = (total - live) // block_e
    if distinct and tokens > 0:
        further = min(further, live * ((tokens - 1) // block_e))
    return live + further


def compact_rows(tokens: int, top_k: int, num_local_experts: int, block_e: int, *, distinct: bool = True) -> int:
    """`R`: rows of a compact layout that holds every routing: `block_e * compact_blocks(...)`."""
    return block_e * compact_blocks(tokens, top_k, num_local_experts, block_e, distinct=distinct)


def masked_slots(tokens: int, top_k: int, row_tile: int, *, distinct: bool = True) -> int:
    """Rows that each expert of a masked layout needs.

    Hypothesis: as above; the GEMM stores whole tiles of `row_tile` rows.
    Formula: `T` (distinct) or `T * K`, rounded up to `row_tile`.
    Reason: an expert can receive every token once (or, arbitrary, every assignment). Its last tile is stored whole, so a count
    that is not a multiple of `row_tile` would overwrite its neighbour's first rows.
    """
    _require(tokens, top_k, 1)
    _require_block(row_tile)
    return round_up(tokens if distinct else tokens * top_k, row_tile)


def worst_case_topk_ids(tokens: int, top_k: int, num_local_experts: int, block_e: int, *, distinct: bool = True) -> NDArray[np.int64]:
    """A routing that opens exactly `compact_blocks(...)` blocks: the stress input of capture and of tests.

    Counts: `g` experts start at one row; while the budget `A - g` allows, `b` more rows go to one expert at a time (never beyond `T`
    if distinct); what is left is spread where it opens no new block. Any counts `n_e <= T` that sum to `T * min(K, E)` are the column sums of a
    0/1 matrix with equal row sums (Gale-Ryser); dealing the columns out cyclically, expert by expert, builds one.

    Returns:
        int64 `[tokens, top_k]`; slots that cannot land here (distinct and `K > E`) hold the sentinel -1.
    """
    per_token = assignments(1, top_k, num_local_experts, distinct=distinct)
    counts = _worst_case_counts(tokens, top_k, num_local_experts, block_e, distinct=distinct)
    dealt = np.repeat(np.arange(num_local_experts, dtype=np.int64), counts)
    ids = np.full((tokens, top_k), -1, dtype=np.int64)
    # Assignment i goes to token i mod T: an expert's n <= T rows are consecutive, so they meet n different tokens.
    ids[:, :per_token] = dealt.reshape(per_token, tokens).T
    return ids


def _worst_case_counts(tokens: int, top_k: int, num_local_experts: int, block_e: int, *, distinct: bool) -> list[int]:
    total = assignments(tokens, top_k, num_local_experts, distinct=distinct)
    _require_block(block_e)
    live = min(total, num_local_experts)
    most = tokens if distinct else total
    counts = [1] * live + [0] * (num_local_experts - live)
    left = total - live
    for expert in range(live):
        steps = min(left // block_e, (most - 1) // block_e)
        counts[expert] += steps * block_e
        left -= steps * block_e
    for expert in range(live):
        rest = min(left, most - counts[expert])
        counts[expert] += rest
        left -= rest
    assert left == 0
    return counts


def expert_counts(topk_ids: Any, num_local_experts: int) -> list[int]:
    """Rows each local expert receives from `topk_ids` (any array of ints; ids outside `[0, E)` land nowhere)."""
    ids = np.asarray(topk_ids, dtype=np.int64).reshape(-1)
    return np.bincount(ids[(ids >= 0) & (ids < num_local_experts)], minlength=num_local_experts).tolist()


def blocks_used(counts: Iterable[int], block_e: int) -> int:
    """Blocks of `block_e` rows that experts with these row counts open."""
    return sum(-(-count // block_e) for count in counts)


def compact_rows_padded_each(tokens: int, top_k: int, num_local_experts: int, block_e: int) -> int:
    """A looser bound that serving engines use: `T * K + E * (b - 1)`, rounded up to `b`.

    Every expert is charged a full `b - 1` rows of padding, live or not (vLLM's `compute_aligned_M` before its DeepGEMM permutation).
    """
    _require(tokens, top_k, num_local_experts)
    _require_block(block_e)
    return round_up(tokens * top_k + num_local_experts * (block_e - 1), block_e)


def masked_slots_padded_256(tokens: int) -> int:
    """A looser slot count, of SGLang's masked DeepGEMM path: `(T // 256 + 1) * 256` rows an expert."""
    _require(tokens, 1, 1)
    return (tokens // 256 + 1) * 256


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def _require(tokens: int, top_k: int, num_local_experts: int) -> None:
    if tokens < 0 or top_k < 1 or num_local_experts < 1:
        raise SpecError(f"need tokens >= 0, top_k >= 1 and experts >= 1, got tokens={tokens}, top_k={top_k}, num_local_experts={num_local_experts}")


def _require_block(rows: int) -> None:
    if rows < 1:
        raise SpecError(f"a row alignment must be at least 1, got {rows}")


__all__: Sequence[str] = [
    "assignments",
    "blocks_used",
    "compact_blocks",
    "compact_rows",
    "compact_rows_padded_each",
    "expert_counts",
    "masked_slots",
    "masked_slots_padded_256",
    "round_up",
    "worst_case_topk_ids",
]
