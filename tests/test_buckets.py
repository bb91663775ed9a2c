"""Every batch has a bucket, or an error that says what to do; the presets are the engines' own lists."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphmoe import BucketLadder
from graphmoe.errors import BatchTooLarge, SpecError

SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=8)

# Written as in the engines: vLLM's cudagraph_capture_sizes and SGLang's default capture batch sizes.
VLLM = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
SGLANG = [1, 2, 4, 8, 12, *range(16, 257, 8)]


@given(sizes=SIZES)
def test_sizes_are_sorted_and_deduplicated(sizes: list[int]) -> None:
    ladder = BucketLadder(sizes)
    assert ladder.sizes == tuple(sorted(set(sizes)))
    assert ladder.largest == max(sizes)
    assert ladder == BucketLadder(reversed(sizes))
    assert hash(ladder) == hash(BucketLadder(reversed(sizes)))


@given(sizes=SIZES)
def test_every_batch_up_to_the_largest_runs_in_the_smallest_bucket_that_holds_it(sizes: list[int]) -> None:
    """A hole in the ladder, or an off-by-one at a bucket."""
    ladder = BucketLadder(sizes)
    for tokens in range(max(sizes) + 1):
        assert ladder.bucket_for(tokens) == min(size for size in sizes if size >= tokens)


@given(sizes=SIZES, beyond=st.integers(1, 1 << 40), overflow=st.sampled_from(["raise", "chunk"]))
def test_a_batch_beyond_the_largest_bucket_is_refused_by_number(sizes: list[int], beyond: int, overflow: str) -> None:
    ladder = BucketLadder(sizes, overflow)
    for tokens in (max(sizes) + 1, max(sizes) + beyond):
        with pytest.raises(BatchTooLarge, match=rf"\b{tokens} tokens\b.*\b{max(sizes)}\b"):
            ladder.bucket_for(tokens)


@given(sizes=SIZES, tokens=st.integers(0, 5000))
def test_chunks_cover_the_batch_exactly(sizes: list[int], tokens: int) -> None:
    ladder = BucketLadder(sizes, "chunk")
    pieces = ladder.chunks(tokens)
    assert [token for first, count in pieces for token in range(first, first + count)] == list(range(tokens))
    assert all(ladder.bucket_for(count) >= count for _, count in pieces)
    assert len(pieces) == max(1, -(-tokens // max(sizes)))


@given(sizes=SIZES, data=st.data())
def test_without_chunking_a_batch_is_one_piece_or_refused(sizes: list[int], data: st.DataObject) -> None:
    ladder = BucketLadder(sizes)
    tokens = data.draw(st.integers(0, max(sizes)))
    assert ladder.chunks(tokens) == ((0, tokens),)
    with pytest.raises(BatchTooLarge, match=rf"\b{max(sizes) + 1} tokens\b.*overflow='chunk'"):
        ladder.chunks(max(sizes) + 1)


@pytest.mark.parametrize("overflow", ["raise", "chunk"])
def test_a_negative_batch_is_refused(overflow: str) -> None:
    ladder = BucketLadder([4], overflow)
    for lookup in (ladder.bucket_for, ladder.chunks):
        with pytest.raises(SpecError, match="-1 tokens"):
            lookup(-1)


@pytest.mark.parametrize(("name", "sizes"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_presets_are_the_engines_lists(name: str, sizes: list[int]) -> None:
    assert list(BucketLadder.preset(name).sizes) == sizes
    assert BucketLadder.preset(name).overflow == "raise"


@given(max_tokens=st.integers(1, 1 << 14))
def test_presets_follow_the_engines_to_any_maximum(max_tokens: int) -> None:
    engines = {
        "vllm": [1, 2, 4, *range(8, 256, 8), *range(256, max_tokens + 1, 16)],
        "sglang": [*SGLANG, *range(272, 512, 16), *range(512, max_tokens + 1, 32)],
    }
    for name, sizes in engines.items():
        ladder = BucketLadder.preset(name, max_tokens, "chunk")
        assert list(ladder.sizes) == sorted({size for size in sizes if size <= max_tokens} | {max_tokens})
        assert ladder.overflow == "chunk"


@pytest.mark.parametrize(
    ("buckets", "sizes"),
    [
        ("vllm", tuple(VLLM)),
        ("sglang", tuple(SGLANG)),
        ("1,2,4", (1, 2, 4)),
        (" 4, 2 ,1,", (1, 2, 4)),
        ("8", (8,)),
        ([4, 1, 4, 2], (1, 2, 4)),
        ((2,), (2,)),
        ({16, 8}, (8, 16)),
        (range(1, 4), (1, 2, 3)),
        ((size for size in (2, 1)), (1, 2)),
        (BucketLadder([3, 1]), (1, 3)),
    ],
)
def test_a_ladder_of_anything_that_names_sizes(buckets: BucketLadder | str | Iterable[int], sizes: tuple[int, ...]) -> None:
    ladder = BucketLadder.of(buckets, "chunk")
    assert ladder == BucketLadder(sizes, "chunk")
    assert BucketLadder.of(ladder) is ladder


def test_a_ladder_keeps_its_overflow_policy_unless_told() -> None:
    chunking = BucketLadder([1], "chunk")
    assert BucketLadder.of(chunking).overflow == "chunk"
    assert BucketLadder.of(chunking, "raise").overflow == "raise"
    for buckets in ("vllm", "1,2", [1, 2]):
        assert BucketLadder.of(buckets).overflow == "raise"


@pytest.mark.parametrize(
    "sizes",
    [[], [0], [4, -1], [1.5], [2.0], [True], ["4"], [None], [1, "2"], [2, None], [1, True], [True, 1], [2, 2.0], [[1]]],
    ids=repr,
)
def test_sizes_that_are_not_positive_ints_are_refused(sizes: list) -> None:
    with pytest.raises(SpecError, match="positive int"):
        BucketLadder(sizes)


@pytest.mark.parametrize("buckets", ["", ",", "tensorrt", "0", "1,0", "-1,2", "1;2", "1 2", "1.5", "²", "1,²", 8, None], ids=repr)
def test_buckets_that_name_no_sizes_are_refused(buckets: object) -> None:
    with pytest.raises(SpecError):
        BucketLadder.of(buckets)


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_a_preset_needs_a_positive_maximum(max_tokens: int) -> None:
    with pytest.raises(SpecError, match=str(max_tokens)):
        BucketLadder.preset("vllm", max_tokens)


def test_an_unknown_preset_is_told_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"'tensorrt'.*vllm, sglang"):
        BucketLadder.preset("tensorrt")
    for text in ("tensorrt", "1,x", "1 2", ""):
        with pytest.raises(SpecError, match=f"'{text}' is neither a preset .vllm, sglang. nor batch sizes such as '1,2,4,8'"):
            BucketLadder.of(text)


def test_an_unknown_overflow_policy_is_refused() -> None:
    with pytest.raises(SpecError, match="'wait'"):
        BucketLadder([1], "wait")
