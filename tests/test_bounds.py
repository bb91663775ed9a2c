"""The bounds are theorems: every routing of small layers is counted, random ones try to beat them, and the witness attains them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement, product

import numpy as np
import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st

from graphmoe import bounds
from graphmoe.errors import SpecError
from tests import strategies

BLOCKS = (1, 2, 3, 4, 5, 7, 64)
EXPERTS_AND_TOP_K = [(experts, top_k) for experts in range(1, 6) for top_k in range(1, 7)]  # K < E, K = E and K > E

Counts = tuple[int, ...]


def _choices_of_a_token(top_k: int, experts: int, elsewhere: int, *, distinct: bool) -> set[Counts]:
    """Rows that one token can add to each local expert when `elsewhere` more experts live on other ranks; they come last."""
    pick_from = combinations if distinct else combinations_with_replacement
    picks = pick_from(range(experts + elsewhere), top_k)
    return {tuple(pick.count(expert) for expert in range(experts)) for pick in picks}


def _reachable_counts(choices: set[Counts], experts: int, max_tokens: int) -> Iterator[tuple[int, set[Counts]]]:
    """For each number of tokens the row counts of every routing: all choices of each token with all of the others."""
    reachable: set[Counts] = {(0,) * experts}
    yield 0, reachable
    for tokens in range(1, max_tokens + 1):
        reachable = {tuple(map(int.__add__, counts, choice)) for counts in reachable for choice in choices}
        yield tokens, reachable


@pytest.mark.parametrize("distinct", [True, False], ids=["distinct", "arbitrary"])
@pytest.mark.parametrize(("experts", "top_k"), EXPERTS_AND_TOP_K)
def test_the_bounds_are_the_maximum_over_every_routing(experts: int, top_k: int, distinct: bool) -> None:
    """A bound that is too small or not tight; E_global from the fewest experts that allow K to E + K, where any slot may be a sentinel."""
    max_tokens = 4 + (experts < 5) + 2 * (experts < 4) if distinct else max(2, (14 - experts) // top_k)
    fewest = max(0, top_k - experts) if distinct else 0
    for elsewhere in range(fewest, top_k + 1) if distinct else (0, 1):
        choices = _choices_of_a_token(top_k, experts, elsewhere, distinct=distinct)
        for tokens, reachable in _reachable_counts(choices, experts, max_tokens):
            where = f"T={tokens} K={top_k} E={experts} E_global={experts + elsewhere}"
            assert max(map(sum, reachable)) == bounds.assignments(tokens, top_k, experts, distinct=distinct), where
            most_rows = max(map(max, reachable))
            for b in BLOCKS:
                most_blocks = max(bounds.blocks_used(counts, b) for counts in reachable)
                assert most_blocks == bounds.compact_blocks(tokens, top_k, experts, b, distinct=distinct), f"{where} b={b}"
                assert b * most_blocks == bounds.compact_rows(tokens, top_k, experts, b, distinct=distinct), f"{where} b={b}"
                assert -(-most_rows // b) * b == bounds.masked_slots(tokens, top_k, b, distinct=distinct), f"{where} row_tile={b}"


@pytest.mark.parametrize("distinct", [True, False], ids=["distinct", "arbitrary"])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (1, 3, 2), (2, 2, 2), (3, 2, 2), (2, 2, 3), (4, 1, 3)])
def test_the_bounds_are_the_maximum_over_every_array_of_ids(tokens: int, top_k: int, experts: int, distinct: bool) -> None:
    """As above without the counting by hand: every `[T, K]` of ids with the sentinels -1 and E, counted by `expert_counts`."""
    rows = [row for row in product(range(-1, experts + 1), repeat=top_k) if not distinct or all(row.count(expert) <= 1 for expert in range(experts))]
    every_count = [bounds.expert_counts(ids, experts) for ids in product(rows, repeat=tokens)]
    assert max(map(max, every_count)) == bounds.masked_slots(tokens, top_k, 1, distinct=distinct)
    for b in (1, 2, 3):
        most = max(bounds.blocks_used(counts, b) for counts in every_count)
        assert most == bounds.compact_blocks(tokens, top_k, experts, b, distinct=distinct)


@given(routing=strategies.routings(), block_e=st.sampled_from([1, 2, 3, 16, 64, 128]))
def test_no_random_routing_beats_a_bound(routing: strategies.Routing, block_e: int) -> None:
    spec = routing.spec
    shape = {"tokens": routing.tokens, "top_k": spec.top_k, "distinct": spec.distinct_topk}
    counts = bounds.expert_counts(routing.ids, spec.num_local_experts)
    assert sum(counts) <= bounds.assignments(num_local_experts=spec.num_local_experts, **shape) == spec.assignments(routing.tokens)
    assert max(counts) <= bounds.masked_slots(row_tile=block_e, **shape)
    assert bounds.blocks_used(counts, block_e) <= bounds.compact_blocks(num_local_experts=spec.num_local_experts, block_e=block_e, **shape)


@given(data=st.data(), tokens=st.integers(0, 40), top_k=st.integers(1, 12), experts=st.integers(1, 16), block_e=st.integers(1, 20))
def test_no_count_vector_beats_the_distinct_bound(data: st.DataObject, tokens: int, top_k: int, experts: int, block_e: int) -> None:
    """An adversary who may choose any counts that the hypothesis of the theorem allows: `n_e <= T`, sum `<= A`."""
    left = bounds.assignments(tokens, top_k, experts)
    counts = []
    for _ in range(experts):
        counts.append(data.draw(st.integers(0, min(tokens, left))))
        left -= counts[-1]
    used, bound = bounds.blocks_used(counts, block_e), bounds.compact_blocks(tokens, top_k, experts, block_e)
    target(float(used - bound))
    assert used <= bound, counts


@given(data=st.data(), tokens=st.integers(0, 40), top_k=st.integers(1, 12), experts=st.integers(1, 16), block_e=st.integers(1, 20))
def test_no_count_vector_beats_the_arbitrary_bound(data: st.DataObject, tokens: int, top_k: int, experts: int, block_e: int) -> None:
    """As above without the promise of distinct experts: only the sum is bounded."""
    left = bounds.assignments(tokens, top_k, experts, distinct=False)
    counts = []
    for _ in range(experts):
        counts.append(data.draw(st.integers(0, left)))
        left -= counts[-1]
    used, bound = bounds.blocks_used(counts, block_e), bounds.compact_blocks(tokens, top_k, experts, block_e, distinct=False)
    target(float(used - bound))
    assert used <= bound, counts


@given(
    tokens=st.integers(0, 600),
    top_k=st.integers(1, 40),
    experts=st.integers(1, 300),
    block_e=st.sampled_from([1, 16, 32, 64, 128]),
    distinct=st.booleans(),
)
def test_the_witness_attains_the_bound_and_is_a_legal_routing(tokens: int, top_k: int, experts: int, block_e: int, distinct: bool) -> None:
    ids = bounds.worst_case_topk_ids(tokens, top_k, experts, block_e, distinct=distinct)
    assert ids.shape == (tokens, top_k)
    assert ids.dtype == np.int64
    assert ((ids >= -1) & (ids < experts)).all()
    local = ids >= 0
    assert local.sum() == bounds.assignments(tokens, top_k, experts, distinct=distinct)
    if distinct:
        ascending = np.sort(ids, axis=1)
        assert not ((ascending[:, 1:] == ascending[:, :-1]) & (ascending[:, 1:] >= 0)).any(), "a token names an expert twice"
    counts = bounds.expert_counts(ids, experts)
    assert bounds.blocks_used(counts, block_e) == bounds.compact_blocks(tokens, top_k, experts, block_e, distinct=distinct)
    assert max(counts) <= bounds.masked_slots(tokens, top_k, block_e, distinct=distinct)


@given(tokens=st.integers(0, 600), top_k=st.integers(1, 40), experts=st.integers(1, 300), block_e=st.sampled_from([1, 16, 32, 64, 128]))
def test_distinct_experts_never_need_more(tokens: int, top_k: int, experts: int, block_e: int) -> None:
    def both(bound: str, *numbers: int) -> tuple[int, int]:
        function = getattr(bounds, bound)
        return function(*numbers), function(*numbers, distinct=False)

    for bound, numbers in (
        ("assignments", (tokens, top_k, experts)),
        ("compact_blocks", (tokens, top_k, experts, block_e)),
        ("compact_rows", (tokens, top_k, experts, block_e)),
        ("masked_slots", (tokens, top_k, block_e)),
    ):
        distinct, arbitrary = both(bound, *numbers)
        assert distinct <= arbitrary, bound


def test_distinct_experts_save_blocks_where_top_k_is_close_to_the_experts() -> None:
    assert bounds.compact_blocks(128, 8, 8, 128) == 8
    assert bounds.compact_blocks(128, 8, 8, 128, distinct=False) == 15
    assert bounds.compact_rows(128, 8, 8, 128) == 1024
    assert bounds.compact_rows(128, 8, 8, 128, distinct=False) == 1920


@given(tokens=st.integers(0, 5000), top_k=st.integers(1, 40), experts=st.integers(1, 400), block_e=st.integers(1, 256), distinct=st.booleans())
def test_the_engines_compact_bound_is_never_below_ours(tokens: int, top_k: int, experts: int, block_e: int, distinct: bool) -> None:
    theirs = bounds.compact_rows_padded_each(tokens, top_k, experts, block_e)
    assert theirs % block_e == 0
    assert theirs >= bounds.compact_rows(tokens, top_k, experts, block_e, distinct=distinct)


@given(tokens=st.integers(0, 5000), top_k=st.integers(1, 40), row_tile=st.sampled_from([64, 128, 256]))
def test_the_engines_slot_count_is_never_below_ours(tokens: int, top_k: int, row_tile: int) -> None:
    assert bounds.masked_slots_padded_256(tokens) >= bounds.masked_slots(tokens, top_k, row_tile)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (bounds.compact_rows_padded_each(1, 8, 128, 128), 16_384),  # 8 + 128 * 127 = 16264, rounded up
        (bounds.compact_rows(1, 8, 128, 128), 1_024),
        (bounds.masked_slots_padded_256(0), 256),
        (bounds.masked_slots_padded_256(255), 256),
        (bounds.masked_slots_padded_256(256), 512),
        (bounds.masked_slots(256, 8, 128), 256),
        (bounds.masked_slots(1, 8, 128), 128),
        (bounds.masked_slots(129, 8, 128), 256),
        (bounds.masked_slots(129, 8, 64), 192),
        (bounds.masked_slots(129, 8, 128, distinct=False), 1_152),
        (bounds.assignments(7, 8, 4), 28),
        (bounds.assignments(7, 8, 4, distinct=False), 56),
        (bounds.compact_blocks(0, 8, 4, 64), 0),
        (bounds.compact_blocks(0, 8, 4, 64, distinct=False), 0),
        (bounds.masked_slots(0, 8, 64), 0),
    ],
)
def test_known_numbers(got: int, want: int) -> None:
    assert got == want


@pytest.mark.parametrize(
    ("count", "want"),
    [
        (bounds.assignments(1 << 30, 8, 256), 1 << 33),
        # g = 256 live experts, (A - g) // b = 2**26 - 2 further blocks of 128 rows
        (bounds.compact_rows(1 << 30, 8, 256, 128), (1 << 33) + 254 * 128),
        (bounds.compact_rows(1 << 30, 8, 256, 128, distinct=False), (1 << 33) + 254 * 128),
        (bounds.masked_slots(1 << 30, 8, 128, distinct=False), 1 << 33),
        (bounds.compact_rows_padded_each(1 << 30, 8, 1024, 128), (1 << 33) + 1016 * 128),
        (bounds.masked_slots_padded_256(1 << 33), (1 << 33) + 256),
    ],
)
def test_counts_beyond_32_bits_are_exact_python_ints(count: int, want: int) -> None:
    """A count that went through numpy or a float."""
    assert type(count) is int
    assert count == want > 1 << 31


_NUMBERS = {"tokens": 4, "top_k": 2, "num_local_experts": 8, "block_e": 64, "row_tile": 64}
_TAKES = {
    "assignments": ("tokens", "top_k", "num_local_experts"),
    "compact_blocks": ("tokens", "top_k", "num_local_experts", "block_e"),
    "compact_rows": ("tokens", "top_k", "num_local_experts", "block_e"),
    "masked_slots": ("tokens", "top_k", "row_tile"),
    "worst_case_topk_ids": ("tokens", "top_k", "num_local_experts", "block_e"),
    "compact_rows_padded_each": ("tokens", "top_k", "num_local_experts", "block_e"),
    "masked_slots_padded_256": ("tokens",),
}


@pytest.mark.parametrize(("function", "name"), [(function, name) for function, names in _TAKES.items() for name in names])
@given(below=st.integers(0, 1 << 40))
def test_impossible_numbers_are_refused_by_value(function: str, name: str, below: int) -> None:
    bad = -1 - below if name == "tokens" else -below
    numbers = {taken: _NUMBERS[taken] for taken in _TAKES[function]} | {name: bad}
    with pytest.raises(SpecError, match=rf"{bad}\b"):
        getattr(bounds, function)(**numbers)


def test_expert_counts_ignore_every_id_that_is_not_local() -> None:
    ids = [[0, 1, 2], [1, -1, 2], [1, 3, 2**31 - 1], [-(2**31), 1, 4]]
    for array in (ids, np.array(ids), np.array(ids, dtype=np.int32), torch.tensor(ids), torch.tensor(ids, dtype=torch.int32)):
        counts = bounds.expert_counts(array, 3)
        assert counts == [1, 4, 2]
        assert all(type(count) is int for count in counts)
    assert bounds.expert_counts(np.empty((0, 3), dtype=np.int64), 2) == [0, 0]


@pytest.mark.parametrize(
    ("counts", "block_e", "want"),
    [([], 64, 0), ([0, 0], 64, 0), ([1, 0, 64], 64, 2), ([65, 64, 63], 64, 4), ([3, 1, 2], 1, 6), ([128], 128, 1), ([129], 128, 2)],
)
def test_blocks_used_rounds_each_expert_up(counts: list[int], block_e: int, want: int) -> None:
    assert bounds.blocks_used(counts, block_e) == want


@given(value=st.integers(0, 1 << 40), multiple=st.integers(1, 1 << 20))
def test_round_up_is_the_smallest_multiple_that_is_enough(value: int, multiple: int) -> None:
    rounded = bounds.round_up(value, multiple)
    assert rounded % multiple == 0
    assert rounded - multiple < value <= rounded
