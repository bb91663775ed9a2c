"""Power-of-two scales against their meaning: the scale as the smallest power of two that fits, looked up among all 254; e4m3 by its bits; packed
words byte by byte at their addresses. Then the whole layer with such weights, unpacked and packed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphmoe import ExpertWeights, MoERuntime, MoESpec, Recipe, plan, reference
from graphmoe.errors import CheckpointError, GraphMoEError, UnsupportedShape, WeightsError, WeightsMismatch
from graphmoe.formats import ScaleFormat, get_format
from graphmoe.formats.ue8m0 import is_power_of_two, pack, pack_weight_scale, quantize_rows, requantize_ue8m0, scale_of, unpack
from graphmoe.gemm.torch import TorchGemm
from graphmoe.layout import RowLayout
from graphmoe.paths import get_path
from graphmoe.step import step
from tests import strategies
from tests.checks import GROUPED, POISONS, assert_rows, bits, oracle, poison, random_inputs, random_weights, routings
from tests.test_formats import E4M3, decoded

POWERS = 2.0 ** np.arange(-126, 128)
LIMITS = 448 * POWERS
"""Largest magnitude that each power of two takes; exact in float64."""
SMALLEST_SCALE = 2.0**-126

by_recipe = pytest.mark.parametrize("recipe", GROUPED, ids=str)


def formula(amax: np.ndarray) -> np.ndarray:
    """The smallest power of two `s` in `2^-126 .. 2^127` with `amax <= 448 * s`, 2^127 where there is none; float64."""
    return POWERS[np.minimum(np.searchsorted(LIMITS, amax), len(POWERS) - 1)]


def step_of(quotient: np.ndarray) -> np.ndarray:
    """Distance between neighbours on the e4m3 grid around each value, from its own exponent."""
    return 2.0 ** (np.clip(np.frexp(quotient)[1] - 1, -6, 8) - 3)


def raw(tensor: Tensor) -> Tensor:
    """Bytes of a copy: `contiguous` keeps odd strides of a dimension of length 1, which `view` then refuses."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


# the scale


def edge_magnitudes() -> np.ndarray:
    """float32: 2^k, 1.75 * 2^k and 448 * 2^k for every k from -149 to 127 with both neighbours of each, zero, and the ends of float32."""
    exact = np.concatenate([factor * 2.0 ** np.arange(-149, 128) for factor in (1, 1.75, 448)])
    with np.errstate(over="ignore"):
        at = exact.astype(np.float32)
        near = np.concatenate([at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(np.inf))])
    ends = np.array([0.0, 2.0**-149, 2.0**120, np.finfo(np.float32).max], dtype=np.float32)
    return np.unique(np.concatenate([near[np.isfinite(near)], ends]))


EDGES = edge_magnitudes()


def wrong_scales(scales: Callable[[Tensor], Tensor], amax: np.ndarray) -> np.ndarray:
    """The magnitudes whose scale is not exactly the formula's."""
    found = scales(torch.from_numpy(amax))
    assert found.dtype == torch.float32
    assert found.shape == amax.shape
    return amax[found.double().numpy() != formula(amax.astype(np.float64))]


def by_logarithm(amax: Tensor) -> Tensor:
    """The mutant: exact but for its float32 logarithm."""
    power = (amax / 448).log2().ceil().clamp(-126, 127)
    return (2.0 ** power.double()).float()


def test_the_scale_is_exact_at_and_next_to_every_power():
    assert len(EDGES) > 1600
    assert wrong_scales(scale_of, EDGES).tolist() == []


def test_the_scale_is_exact_wherever_exponent_or_mantissa_change_its_course():
    """Every exponent with the mantissas around 1, 1.75 and 2: all that the formula can tell apart."""
    mantissas = np.array([0, 1, 0x400000, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF])
    patterns = (np.arange(255)[:, None] << 23 | mantissas).astype(np.int32)
    assert wrong_scales(scale_of, patterns.view(np.float32)).tolist() == []


def test_a_float32_logarithm_fails_at_the_edges():
    """The usual way to write it: wrong at hundreds of these magnitudes, among them the next ones above 448 * 2^k."""
    wrong = wrong_scales(by_logarithm, EDGES)
    assert len(wrong) > 100
    above = np.nextafter((448 * 2.0 ** np.arange(-126, 120)).astype(np.float32), np.float32(np.inf))
    assert np.isin(wrong, above).sum() > 100


@given(patterns=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=200))
def test_the_scale_of_any_float32(patterns):
    amax = np.array(patterns, dtype=np.int32).view(np.float32)
    finite = np.isfinite(amax)
    assert wrong_scales(scale_of, amax[finite]).tolist() == []
    assert scale_of(torch.from_numpy(amax)).isnan().tolist() == (~finite).tolist()


@given(amax=st.lists(st.one_of(st.floats(0, 1e300), st.sampled_from(LIMITS.tolist())), min_size=1, max_size=50))
def test_the_scale_of_any_float64_and_its_neighbours(amax):
    """A product of payload and scale has more bits than float32: no rounding to float32 may come first."""
    at = np.array(amax)
    near = np.stack([at, np.nextafter(at, 0), np.nextafter(at, np.inf)])
    assert wrong_scales(scale_of, near).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_scale_of_what_is_not_finite_is_nan_there_alone(dtype):
    amax = torch.tensor([[1.0, torch.nan, 448.0], [torch.inf, 449.0, 0.0]], dtype=dtype)
    want = torch.tensor([[2.0**-8, torch.nan, 1.0], [torch.nan, 2.0, SMALLEST_SCALE]])
    torch.testing.assert_close(scale_of(amax), want, rtol=0, atol=0, equal_nan=True)


@example(patterns=[top << 23 for top in range(512)])
@given(patterns=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100))
def test_powers_of_two_are_recognised(patterns):
    values = np.array(patterns, dtype=np.uint32).view(np.float32)
    assert is_power_of_two(torch.from_numpy(values)).tolist() == np.isin(values, POWERS.astype(np.float32)).tolist()


# weights requantised


def as_e4m3(codes: np.ndarray | list[Any]) -> Tensor:
    return torch.from_numpy(np.asarray(codes, dtype=np.uint8)).view(torch.float8_e4m3fn)


def blown_up(scale: Tensor, shape: torch.Size, block: tuple[int, int]) -> np.ndarray:
    """float64: each element's own scale."""
    return scale.double().numpy().repeat(block[0], -2)[..., : shape[-2], :].repeat(block[1], -1)[..., : shape[-1]]


def largest_of_blocks(values: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    rows, columns = (np.arange(0, values.shape[axis], block[axis]) for axis in (-2, -1))
    return np.maximum.reduceat(np.maximum.reduceat(np.abs(values), rows, axis=-2), columns, axis=-1)


def check_requantised(weight: Tensor, scale: Tensor, block: tuple[int, int], made: tuple[Tensor, Tensor]) -> None:
    """Everything that `made`, the requantised form of `weight` and `scale`, promises, element by element; all arithmetic here is exact."""
    payload, new = made
    assert payload.dtype == torch.float8_e4m3fn
    assert payload.shape == weight.shape
    assert payload.is_contiguous()
    assert new.dtype == torch.float32
    assert new.shape == scale.shape
    true = decoded(weight) * blown_up(scale, weight.shape, block)
    assert (new.double().numpy() == formula(largest_of_blocks(true, block))).all(), "a scale is not the formula's"
    values, own = decoded(payload), blown_up(new, weight.shape, block)
    assert not np.isnan(values).any(), "a payload is NaN"
    quotient = true / own
    saturated = np.abs(quotient) > 448
    assert (own[saturated] == 2.0**127).all()
    assert (values[saturated] == 448 * np.sign(quotient[saturated])).all()
    worst = float((np.abs(values - quotient) / (step_of(quotient) / 2)).max(initial=0, where=~saturated))
    assert worst <= 1, f"a payload is off by {worst:.9f} half steps"
    assert (values[true == 0] == 0).all(), "a zero became something"


@example(made=strategies.BlockFp8(np.full((1, 1), 0x7E, dtype=np.uint8), np.full((1, 1), 2.0**120, dtype=np.float32), (1, 1)))
@given(made=strategies.block_fp8())
def test_requantised_weights_keep_every_value_to_half_a_step(made):
    weight, scale = as_e4m3(made.codes), torch.from_numpy(made.scales)
    kept = weight.clone(), scale.clone()
    payload, new = once = requantize_ue8m0(weight, scale, made.block)
    check_requantised(weight, scale, made.block, once)
    assert torch.equal(raw(weight), raw(kept[0]))
    assert torch.equal(scale, kept[1])
    twice = requantize_ue8m0(payload, new, made.block)
    check_requantised(payload, new, made.block, twice)
    values = [decoded(p) * blown_up(s, p.shape, made.block) for p, s in (once, twice)]
    assert np.array_equal(*values)


def test_a_value_next_to_the_middle_of_two_neighbours_goes_to_the_nearer_one():
    """A payload of 4 bits times a scale of 24 bits lies closer to the middle than float32 can tell: no rounding to float32 may come first."""
    codes, scales = [], []
    for payload in (9, 10, 11, 12, 13, 14, 15):
        for middle in range(17, 32, 2):
            shift = 23 - (middle // payload).bit_length() + 1
            for near in (middle << shift) // payload, (middle << shift) // payload + 1:
                scale = np.float32(near) * np.float32(2.0**-23)
                assert int(scale * 2.0**23) == near
                codes.append(0x50 | (payload - 8))
                scales.append(scale)
    shape = (len(codes), 1)
    weight, scale = as_e4m3(codes).view(shape), torch.tensor(scales).view(shape)
    check_requantised(weight, scale, (1, 1), requantize_ue8m0(weight, scale, (1, 1)))


def relabelled(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The mutant that rounds the scale and keeps the payload."""
    largest = largest_of_blocks(decoded(weight) * blown_up(scale, weight.shape, block), block)
    return weight, torch.from_numpy(formula(largest)).float()


def scaled_by_logarithm(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The mutant whose scale comes out of a float32 logarithm and whose payload is right for it."""
    values = torch.from_numpy(decoded(weight) * blown_up(scale, weight.shape, block))
    new = by_logarithm(torch.from_numpy(largest_of_blocks(values.numpy(), block)).float())
    quotient = values / torch.from_numpy(blown_up(new, weight.shape, block))
    return quotient.float().clamp(-448, 448).to(torch.float8_e4m3fn), new


@pytest.mark.parametrize(
    ("mutant", "scale", "reason"),
    [
        (relabelled, 1.5, "half steps"),
        (relabelled, float(np.nextafter(np.float32(2.0**-9), np.float32(1))), "half steps"),
        (relabelled, 2.0**-130, "half steps"),
        (scaled_by_logarithm, float(np.nextafter(np.float32(2.0**-9), np.float32(1))), "not the formula's"),
        (scaled_by_logarithm, float(np.nextafter(np.float32(2.0**-20), np.float32(1))), "not the formula's"),
    ],
)
def test_the_property_kills_mutants(mutant, scale, reason):
    weight = as_e4m3([[0x7E, 0xFE, 0x71, 0x35, 0x00]])
    block = (1, 5)
    harmless, scales = torch.ones(1, 1), torch.tensor([[scale]])
    check_requantised(weight, harmless, block, mutant(weight, harmless, block))
    check_requantised(weight, scales, block, requantize_ue8m0(weight, scales, block))
    with pytest.raises(AssertionError, match=reason):
        check_requantised(weight, scales, block, mutant(weight, scales, block))


def test_leading_dimensions_are_requantised_alone():
    rng = np.random.default_rng(0)
    weight = as_e4m3(rng.integers(0, 0x7F, (2, 3, 130, 200)))
    scale = torch.from_numpy(np.exp2(rng.uniform(-20, 20, (2, 3, 2, 2))).astype(np.float32))
    payload, new = requantize_ue8m0(weight, scale)
    for index in np.ndindex(2, 3):
        alone, alone_scale = requantize_ue8m0(weight[index], scale[index])
        assert torch.equal(raw(payload[index]), raw(alone))
        assert torch.equal(new[index], alone_scale)


def test_strides_and_scale_dtypes_change_nothing():
    rng = np.random.default_rng(1)
    weight = as_e4m3(rng.integers(0, 0x7F, (256, 384)))
    powers = torch.from_numpy(2.0 ** rng.integers(-12, 12, (2, 3))).float()
    want = requantize_ue8m0(weight, powers)
    strided = weight.view(torch.uint8).T.contiguous().T.view(torch.float8_e4m3fn)
    assert not strided.is_contiguous()
    for values, scales in (
        (strided, powers),
        *((weight, powers.to(d)) for d in (torch.float64, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)),
    ):
        payload, new = requantize_ue8m0(values, scales)
        assert torch.equal(raw(payload), raw(want[0]))
        assert torch.equal(new, want[1])


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (torch.zeros(4, 4), torch.ones(1, 1), "weight is torch.float32"),
        (as_e4m3(np.zeros((129, 4))), torch.ones(1, 1), r"\(1, 1\), expected floating \(2, 1\)"),
        (as_e4m3(np.zeros((2, 4, 4))), torch.ones(1, 1), r"\(1, 1\), expected floating \(2, 1, 1\)"),
        (as_e4m3(np.zeros((4, 4))), torch.ones(1, 1, dtype=torch.int32), "torch.int32"),
        (as_e4m3(np.zeros((4, 4))), torch.tensor([[-1.0]]), "NaN, infinite or negative"),
        (as_e4m3(np.zeros((4, 4))), torch.tensor([[torch.nan]]), "NaN, infinite or negative"),
        (as_e4m3(np.zeros((4, 4))), torch.tensor([[torch.inf]]), "NaN, infinite or negative"),
    ],
)
def test_what_cannot_be_requantised_is_refused(weight, scale, message):
    with pytest.raises(WeightsError, match=message):
        requantize_ue8m0(weight, scale)


def test_a_payload_of_nan_is_refused_or_stays_alone():
    """One bad element must not silently take the other 16383 of its block with it."""
    codes = np.full((128, 256), 0x38)
    codes[3, 5] = 0x7F
    try:
        payload, new = requantize_ue8m0(as_e4m3(codes), torch.full((1, 2), 1.5))
    except WeightsError:
        return
    values = decoded(payload) * blown_up(new, payload.shape, (128, 128))
    assert np.isnan(values).sum() == 1
    assert (values[~np.isnan(values)] == 1.5).all()


# activations


def model_codes(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Bytes of `values / scale` rounded to e4m3, half to even, in exact float64 arithmetic."""
    quotient = np.abs(values) / scale
    grid = step_of(quotient)
    rounded = np.minimum(np.rint(quotient / grid) * grid, 448)
    return (np.searchsorted(E4M3[:0x7F], rounded) | np.signbit(values) << 7).astype(np.uint8)


@st.composite
def rows_at_edges(draw: st.DrawFn) -> np.ndarray:
    """float32 `[rows, groups * 128]` whose groups' largest magnitudes are `EDGES`, with zeros and values half way between e4m3 neighbours."""
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 3)), 128)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    amax = rng.choice(EDGES, (*shape[:2], 1))
    values = (rng.uniform(-1, 1, shape) * 2.0 ** rng.integers(-20, 1, shape) * amax).astype(np.float32)
    middle = (rng.integers(16, 32, shape) * 2.0 ** rng.integers(-14, 5, shape) * formula(amax)).clip(max=float(EDGES.max())).astype(np.float32)
    here = (rng.random(shape) < 0.3) & (middle <= amax)
    values = np.where(here, middle * rng.choice([-1, 1], shape), values).astype(np.float32)
    values[rng.random(shape) < draw(st.sampled_from([0.0, 0.5]))] = draw(st.sampled_from([0.0, -0.0]))
    values[..., draw(st.integers(0, 127))] = amax[..., 0] * draw(st.sampled_from([-1, 1]))
    return values.reshape(shape[0], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(values=rows_at_edges())
def test_rows_are_rounded_with_the_rounded_scale_bit_for_bit(dtype, values):
    x = torch.from_numpy(values).to(dtype)
    x = torch.where(x.isfinite(), x, torch.ones((), dtype=dtype))
    payload, scale = quantize_rows(x)
    exact = x.double().numpy().reshape(len(values), -1, 128)
    want = formula(np.abs(exact).max(-1))
    assert scale.dtype == torch.float32
    assert np.array_equal(scale.double().numpy(), want)
    codes = payload.view(torch.uint8).numpy().reshape(exact.shape)
    assert np.array_equal(codes, model_codes(exact, want[..., None]))


def test_halves_are_met_and_go_to_even():
    """The inputs above do contain ties: a cast that rounds half up would be seen."""
    x = torch.tensor([17.0, 19.0, 232.0, 248.0, 400.0, 432.0, 448.0, 2.0**-10, 3 * 2.0**-10]).repeat_interleave(128)[: 9 * 128].view(9, 128)
    x[:, 0] = 448.0
    payload, scale = quantize_rows(x)
    assert scale.flatten().tolist() == [1.0] * 9
    assert decoded(payload)[:, 1].tolist() == [16.0, 20.0, 224.0, 256.0, 384.0, 448.0, 448.0, 0.0, 2.0**-8]


@given(values=rows_at_edges(), data=st.data())
def test_a_group_that_is_not_finite_is_nan_alone(values, data):
    x = torch.from_numpy(values)
    clean, clean_scale = quantize_rows(x)
    hit = torch.zeros(clean_scale.shape, dtype=torch.bool)
    for _ in range(data.draw(st.integers(1, 3))):
        row, column = data.draw(st.integers(0, x.shape[0] - 1)), data.draw(st.integers(0, x.shape[1] - 1))
        x[row, column] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
        hit[row, column // 128] = True
    payload, scale = quantize_rows(x)
    assert torch.equal(scale.isnan(), hit)
    assert torch.equal(scale[~hit], clean_scale[~hit])
    untouched = ~hit.repeat_interleave(128, -1)
    assert torch.equal(payload.view(torch.uint8)[untouched], clean.view(torch.uint8)[untouched])


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_groups_of_zeros_have_the_smallest_scale(zero):
    x = torch.full((2, 384), zero)
    x[1, 128:256] = 3.0
    payload, scale = quantize_rows(x)
    assert scale.tolist() == [[SMALLEST_SCALE] * 3, [SMALLEST_SCALE, 2.0**-7, SMALLEST_SCALE]]
    assert (decoded(payload)[0] == 0).all()
    assert (decoded(payload)[1] == [0.0] * 128 + [384.0] * 128 + [0.0] * 128).all()


def test_no_rows_give_no_scales_and_leading_dimensions_stay():
    assert [part.shape for part in quantize_rows(torch.empty(0, 256))] == [(0, 256), (0, 2)]
    x = torch.from_numpy(np.random.default_rng(3).choice(EDGES, (2, 3, 256)))
    payload, scale = quantize_rows(x)
    flat, flat_scale = quantize_rows(x.view(6, 256))
    assert scale.shape == (2, 3, 2)
    assert torch.equal(raw(payload).view(6, 256), raw(flat))
    assert torch.equal(scale.view(6, 2), flat_scale)


# packed words


def random_powers(*shape: int, seed: int = 0) -> Tensor:
    """Powers of two from all over float32, the ends among them; neighbours differ."""
    exponents = np.random.default_rng(seed).permutation(np.prod(shape, dtype=int)) * 37 % 254 - 126
    return torch.from_numpy((2.0**exponents).astype(np.float32).reshape(shape))


def biased(scale: float) -> int:
    """The exponent byte of a scale: 1 .. 254, 255 for NaN."""
    return 255 if np.isnan(scale) else int(np.frexp(scale)[1]) + 126


def stored_bytes(tensor: Tensor) -> np.ndarray:
    """All bytes of a tensor's storage from its first element on."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return storage.numpy()[tensor.storage_offset() * tensor.element_size() :]


PACKED_SHAPES = [(*leading, rows) for leading in ((), (1,), (3,), (2, 2)) for rows in (1, 2, 3, 5, 64, 7)]
by_columns = pytest.mark.parametrize("columns", [1, 3, 4, 5, 56])


@by_columns
def test_every_exponent_lies_at_its_byte(columns):
    words = -(-columns // 4)
    for *leading, rows in PACKED_SHAPES:
        scale = random_powers(*leading, rows, columns, seed=rows)
        scale[..., rows - 1, columns - 1] = torch.nan
        packed = pack(scale)
        assert packed.dtype == torch.int32
        assert packed.shape == (*leading, rows, words)
        padded, stored, blocks = -(-rows // 4) * 4, stored_bytes(packed), scale.view(-1, rows, columns).tolist()
        assert len(stored) >= len(blocks) * words * padded * 4, "the padding of the last rows is read too: it must belong to the storage"
        for block, values in enumerate(blocks):
            for row in range(rows):
                for word in range(words):
                    for byte in range(4):
                        column = 4 * word + byte
                        want = biased(values[row][column]) if column < columns else 0
                        assert stored[((block * words + word) * padded + row) * 4 + byte] == want, (leading, block, row, column)
        back = unpack(packed, columns)
        assert back.dtype == torch.float32
        torch.testing.assert_close(back, scale, rtol=0, atol=0, equal_nan=True)


@by_columns
def test_strides_are_what_the_gemm_asserts(columns):
    """deep_gemm compares the strides themselves, those of a dimension of length 1 too."""
    for *leading, rows in PACKED_SHAPES:
        packed = pack(random_powers(*leading, rows, columns))
        words, padded = -(-columns // 4), -(-rows // 4) * 4
        assert packed.stride()[-2:] == (1, padded), packed.shape
        if leading:
            assert packed.stride(-3) == padded * words, packed.shape


def test_nan_is_255_and_back():
    nans = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert bool(nans.isnan().all())
    assert pack(nans.view(1, 4)).item() == -1
    assert bool(unpack(torch.tensor([[-1]], dtype=torch.int32), 4).isnan().all())
    assert unpack(torch.tensor([[0x0180FE7F]], dtype=torch.int32), 4).tolist() == [[1.0, 2.0**127, 2.0, SMALLEST_SCALE]]


@given(patterns=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40), columns=st.integers(1, 4))
def test_any_word_unpacks_to_its_bytes(patterns, columns):
    """Words with the sign bit set too: the shift must not smear it over the other bytes."""
    words = torch.tensor(patterns, dtype=torch.int32).view(-1, 1)
    for values, pattern in zip(unpack(words, columns).tolist(), patterns, strict=True):
        for value, byte in zip(values, (pattern % 2**32).to_bytes(4, "little"), strict=False):
            assert np.isnan(value) if byte == 255 else value == 2.0 ** (byte - 127) or byte == value == 0


@pytest.mark.parametrize("rows", [128, 129, 200, 255, 384])
@pytest.mark.parametrize("columns", [1, 4, 5])
def test_weight_scales_repeat_for_every_row_of_their_block(rows, columns):
    scale = random_powers(2, -(-rows // 128), columns)
    packed = pack_weight_scale(scale, rows)
    assert packed.shape == (2, rows, -(-columns // 4))
    assert packed.stride(1) == 1
    back = unpack(packed, columns).tolist()
    for expert in range(2):
        for row in range(rows):
            assert back[expert][row] == scale[expert, row // 128].tolist(), (expert, row)


# expert weights

SPEC = MoESpec(num_experts=4, top_k=2, hidden_size=640, intermediate_size=384, routed_scaling_factor=1.5)
"""Two packed words a row in H, one with an unused byte in I."""
LONG = MoESpec(num_experts=12, top_k=4, hidden_size=128, intermediate_size=640, num_local_experts=3, expert_offset=6)
"""Two words in I; some tokens have no expert here."""
NARROW = MoESpec(num_experts=4, top_k=2, hidden_size=256, intermediate_size=128)


@cache
def uneven_parts(spec: MoESpec, seed: int = 0) -> tuple[Tensor, Tensor]:
    """bf16 `w13`, `w2` of about unit gain whose 128-blocks differ by powers of two, so that a scale of another block shows."""
    rng = np.random.default_rng(seed)
    parts = []
    for rows, columns in ((2 * spec.intermediate_size, spec.hidden_size), (spec.hidden_size, spec.intermediate_size)):
        values = rng.normal(0, columns**-0.5, (spec.num_local_experts, rows, columns))
        gain = 2.0 ** rng.integers(-2, 3, (spec.num_local_experts, rows // 128, columns // 128))
        parts.append(torch.from_numpy(values * gain.repeat(128, 1).repeat(128, 2)).bfloat16())
    return parts[0], parts[1]


def copied(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(weights.spec, weights.fmt, **{name: tensor.clone() for name, tensor in weights.tensors().items()})


@cache
def made_once(spec: MoESpec, fmt: str, seed: int) -> ExpertWeights:
    return ExpertWeights.from_bf16(spec, *uneven_parts(spec, seed), fmt=fmt)


def uneven_weights(spec: MoESpec, fmt: str, seed: int = 0) -> ExpertWeights:
    return copied(made_once(spec, fmt, seed))


def pairs(weights: ExpertWeights) -> list[tuple[Tensor, Tensor]]:
    assert weights.w13_scale_inv is not None
    assert weights.w2_scale_inv is not None
    return [(weights.w13, weights.w13_scale_inv), (weights.w2, weights.w2_scale_inv)]


def assert_same(mine: ExpertWeights, want: ExpertWeights) -> None:
    assert mine.fmt == want.fmt
    for name, tensor in want.tensors().items():
        assert mine.tensors()[name].dtype == tensor.dtype
        assert torch.equal(raw(mine.tensors()[name]), raw(tensor)), name


def addresses(weights: ExpertWeights) -> list[int]:
    return [tensor.data_ptr() for tensor in weights.tensors().values()]


def test_both_pairs_are_requantised_in_place():
    weights = uneven_weights(SPEC, "fp8_block")
    before, places = copied(weights), addresses(weights)
    assert not any(bool(is_power_of_two(scale).all()) for _, scale in pairs(weights))
    made = weights.requantize("ue8m0")
    assert made.fmt == "ue8m0"
    assert addresses(made) == addresses(weights) == places
    for (payload, scale), new in zip(pairs(before), pairs(made), strict=True):
        check_requantised(payload, scale, (128, 128), new)
    assert made.requantize("ue8m0") is made


class Interrupting(TorchDispatchMode):
    """Ctrl-C just before the n-th copy into a tensor, or just after it."""

    def __init__(self, n: int, *, after: bool) -> None:
        super().__init__()
        self.left, self.after = n, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.left -= 1
        if self.left == 0 and not self.after:
            raise KeyboardInterrupt
        made = func(*args, **(kwargs or {}))
        if self.left == 0:
            raise KeyboardInterrupt
        return made


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 16])
def test_requantising_that_was_interrupted_is_called_again(n, after):
    """At every copy of a payload and of its scales: no expert is left with one new and one old."""
    weights = uneven_weights(NARROW, "fp8_block")
    want = copied(weights).requantize("ue8m0").dequantize()
    before = weights.dequantize()
    with pytest.raises(KeyboardInterrupt), Interrupting(n, after=after):
        weights.requantize("ue8m0")
    for mine, old, new in zip(weights.dequantize(), before, want, strict=True):
        assert all(torch.equal(mine[e], old[e]) or torch.equal(mine[e], new[e]) for e in range(NARROW.num_local_experts))
    for mine, new in zip(weights.requantize("ue8m0").dequantize(), want, strict=True):
        assert torch.equal(mine, new)


def test_tensors_that_share_memory_are_not_requantised():
    """Each is written in place: the second would be computed from what the first became."""
    spec = MoESpec(2, 1, 256, 128)
    weights = random_weights(spec, "fp8_block")
    storage = torch.full((12,), 1.5)
    shared, beside = (
        ExpertWeights(spec, "fp8_block", weights.w13, weights.w2, storage[:8].view(2, 2, 2), storage[at : at + 4].view(2, 2, 1)) for at in (7, 8)
    )
    before = copied(shared)
    with pytest.raises(WeightsMismatch, match=r"w13_scale_inv and w2_scale_inv share memory.*pass clones"):
        shared.requantize("ue8m0")
    assert_same(shared, before)
    assert beside.requantize("ue8m0").fmt == "ue8m0"


def test_weights_made_as_ue8m0_are_rounded_once():
    """Straight from bf16 they are as accurate as float32 scales; through block FP8 they would be rounded twice."""
    exact = random_weights(SPEC, "bf16").dequantize()
    errors = {}
    for name, made in (("straight", random_weights(SPEC, "ue8m0")), ("twice", random_weights(SPEC, "fp8_block").requantize("ue8m0"))):
        errors[name] = [float((mine - want).norm() / want.norm()) for mine, want in zip(made.dequantize(), exact, strict=True)]
    assert all(error < 0.029 for error in errors["straight"])
    assert all(error > 0.031 for error in errors["twice"])


@pytest.mark.parametrize(("fmt", "wanted"), [("bf16", "ue8m0"), ("bf16", "fp8_block"), ("fp8_block", "bf16"), ("ue8m0", "fp8_block")])
def test_what_has_no_way_to_the_format_is_refused(fmt, wanted):
    weights = random_weights(NARROW, fmt)
    before = copied(weights)
    with pytest.raises(WeightsMismatch, match=rf"'{fmt}' cannot be requantised to '{wanted}'.*from_bf16\(spec, \*weights.dequantize\(\), fmt="):
        weights.requantize(wanted)
    assert_same(weights, before)
    assert ExpertWeights.from_bf16(NARROW, *weights.dequantize(), fmt=wanted).fmt == wanted


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations made and that are still alive."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.alive.values()))
        return made


def peak_of_requantising(experts: int) -> tuple[int, int]:
    """Bytes alive at a time beyond the weights themselves; bytes of the larger weight."""
    weights = random_weights(MoESpec(experts, 1, 256, 128), "fp8_block")
    with LiveBytes(list(weights.tensors().values())) as live:
        weights.requantize("ue8m0")
    return live.peak, weights.w13.nbytes


def test_requantising_takes_the_memory_of_one_expert():
    few, _ = peak_of_requantising(2)
    many, whole = peak_of_requantising(12)
    expert = whole // 12
    assert many == few, "memory grows with the number of experts"
    assert 8 * expert <= many <= 48 * expert, "not a few times one expert in float64"


def test_making_ue8m0_from_bf16_takes_the_result_and_one_expert():
    peaks, sizes = [], []
    for experts in (2, 12):
        spec = MoESpec(experts, 1, 256, 128)
        w13, w2 = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((experts, 256, 256), (experts, 256, 128)))
        with LiveBytes([w13, w2]) as live:
            sizes.append(ExpertWeights.from_bf16(spec, w13, w2, fmt="ue8m0").nbytes)
        peaks.append(live.peak)
    assert peaks[1] - peaks[0] <= sizes[1] - sizes[0] + 4096


@pytest.mark.parametrize("fmt", ["fp8_block", "bf16"])
def test_looking_for_nan_takes_no_memory(fmt):
    """Weights that are used in place are looked through without a temporary, be it of one expert."""
    weights = random_weights(NARROW, fmt)
    tensors = weights.tensors()
    with LiveBytes(list(tensors.values())) as live:
        ExpertWeights.from_bf16(NARROW, **tensors, fmt=fmt) if fmt == "bf16" else ExpertWeights.from_fp8(NARROW, **tensors)
    assert live.peak < 1024


@pytest.mark.parametrize("fmt", ["fp8_block", "ue8m0", "bf16"])
def test_loading_takes_the_result_and_one_projection_with_its_shard(fmt, tmp_path):
    weights = random_weights(SPEC, fmt)
    weights.save(tmp_path)
    with LiveBytes([]) as live:
        ExpertWeights.load(tmp_path, SPEC)
    assert 0 <= live.peak - weights.nbytes - 2 * weights.w2[0].nbytes < 1024


def test_a_runtime_follows_its_weights_in_place():
    """It aliases them, so its next call computes with the new values."""
    weights = uneven_weights(SPEC, "fp8_block")
    x, router = random_inputs(SPEC, 4)
    ids = dict(routings(SPEC, 4))["balanced"]
    with MoERuntime(SPEC, weights, buckets=[4], device="cpu") as runtime:
        before = runtime(x, ids, router).clone()
        weights.requantize("ue8m0")
        after = runtime(x, ids, router).clone()
    with MoERuntime(SPEC, copied(weights), buckets=[4], device="cpu") as fresh:
        assert torch.equal(bits(after), bits(fresh(x, ids, router)))
    assert not torch.equal(bits(after), bits(before))


@pytest.mark.parametrize("name", ["w13_scale_inv", "w2_scale_inv"])
@pytest.mark.parametrize("value", [3.0, float(np.nextafter(np.float32(1), np.float32(2))), 0.0, 2.0**-127, -1.0, float("nan"), float("inf")])
def test_a_label_that_the_scales_contradict_is_refused(name, value):
    weights = uneven_weights(NARROW, "ue8m0")
    tensors = {key: tensor.clone() for key, tensor in weights.tensors().items()}
    ExpertWeights.from_fp8(NARROW, **tensors, fmt="ue8m0")
    tensors[name][1, 0, 0] = value
    with pytest.raises(WeightsMismatch, match=name):
        ExpertWeights.from_fp8(NARROW, **tensors, fmt="ue8m0")


def test_the_scales_dtype_says_the_format():
    weights = uneven_weights(NARROW, "ue8m0")
    (w13, scale13), (w2, scale2) = pairs(weights)
    short13, short2 = scale13.to(torch.float8_e8m0fnu), scale2.to(torch.float8_e8m0fnu)
    assert_same(ExpertWeights.from_fp8(NARROW, w13, short13, w2, short2), weights)
    assert ExpertWeights.from_fp8(NARROW, w13, scale13, w2, scale2).fmt == "fp8_block"
    assert ExpertWeights.from_fp8(NARROW, w13, short13, w2, short2, fmt="fp8_block").fmt == "fp8_block"
    for mixed in ((short13, scale2), (scale13, short2)):
        with pytest.raises(WeightsMismatch, match=r"two scale formats in one layer; say which with fmt="):
            ExpertWeights.from_fp8(NARROW, w13, mixed[0], w2, mixed[1])
        assert_same(ExpertWeights.from_fp8(NARROW, w13, mixed[0], w2, mixed[1], fmt="ue8m0"), weights)
    with pytest.raises(WeightsMismatch, match="'bf16' is not a block FP8 format"):
        ExpertWeights.from_fp8(NARROW, w13, scale13, w2, scale2, fmt="bf16")


def test_layers_of_two_scale_formats_are_refused():
    layers = [uneven_weights(NARROW, fmt) for fmt in ("ue8m0", "fp8_block")]
    with pytest.raises(WeightsMismatch, match="share a format; got 'ue8m0' and 'fp8_block'"):
        MoERuntime(NARROW, layers=layers, buckets=[2], device="cpu")


# checkpoints


def key(expert: int, projection: str) -> str:
    return f"model.layers.0.mlp.experts.{expert}.{projection}_proj.weight_scale_inv"


def test_a_checkpoint_keeps_label_and_bits(tmp_path: Path):
    """The smallest and the largest scale too; each is stored as the one byte that its exponent is."""
    weights = uneven_weights(SPEC, "ue8m0", seed=4)
    for place, value in (((0, 0, 0), 2.0**-126), ((1, 5, 4), 2.0**127), ((2, 3, 0), 2.0**-125)):
        weights.w13_scale_inv[place] = value
    path = weights.save(tmp_path)
    loaded = ExpertWeights.load(tmp_path, SPEC)
    assert_same(loaded, weights)
    assert loaded.w13_scale_inv.dtype == torch.float32
    assert loaded.requantize("ue8m0") is loaded
    stored = load_file(path)
    for expert in range(SPEC.num_local_experts):
        parts = {"gate": weights.w13_scale_inv[expert, :3], "up": weights.w13_scale_inv[expert, 3:], "down": weights.w2_scale_inv[expert]}
        for projection, scale in parts.items():
            found = stored[key(expert, projection)]
            assert found.dtype == torch.float8_e8m0fnu
            assert found.view(torch.uint8).tolist() == [[biased(value) for value in row] for row in scale.tolist()]


def test_ranks_of_a_ue8m0_checkpoint(tmp_path: Path):
    full = uneven_weights(NARROW, "ue8m0", seed=5)
    full.save(tmp_path)
    for rank in range(2):
        part = ExpertWeights.load(tmp_path, NARROW.shard(ep=2, ep_rank=rank))
        assert part.fmt == "ue8m0"
        for name, tensor in part.tensors().items():
            assert torch.equal(raw(tensor), raw(full.tensors()[name][2 * rank : 2 * rank + 2])), name


@pytest.mark.parametrize("odd", [(0, "gate"), (2, "up"), (3, "down")], ids=str)
@pytest.mark.parametrize("fmt", ["ue8m0", "fp8_block"])
def test_a_checkpoint_of_two_scale_dtypes_is_refused(fmt, odd, tmp_path):
    path = uneven_weights(NARROW, "ue8m0").save(tmp_path)
    tensors = load_file(path)
    short, long = torch.float8_e8m0fnu, torch.float32
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            tensors[name] = tensor.to(short if (fmt == "ue8m0") != (name == key(*odd)) else long)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="F8_E8M0 scales beside others"):
        ExpertWeights.load(tmp_path, NARROW)


@pytest.mark.parametrize("byte", [0, 255])
def test_a_stored_exponent_that_no_scale_has_is_refused(byte, tmp_path):
    """255 is NaN, and 0 is 2^-127, which is no normal float32."""
    path = uneven_weights(NARROW, "ue8m0").save(tmp_path)
    tensors = load_file(path)
    tensors[key(1, "up")].view(torch.uint8)[0, 0] = byte
    save_file(tensors, path)
    with pytest.raises(WeightsError, match="scale"):
        ExpertWeights.load(tmp_path, NARROW)


# what an arch takes


@pytest.mark.parametrize("spec", [SPEC, NARROW], ids=["two words", "one word"])
def test_prepared_weights_are_packed_per_row(spec):
    weights = uneven_weights(spec, "ue8m0")
    assert weights.prepared("sm90") is weights
    assert weights.prepared("cpu") is weights
    packed = weights.prepared("sm100")
    assert packed.fmt == "ue8m0"
    for (payload, words), (plain, scale) in zip(pairs(packed), pairs(weights), strict=True):
        assert payload.data_ptr() == plain.data_ptr()
        experts, rows, columns = plain.shape
        assert words.dtype == torch.int32
        assert words.shape == (experts, rows, -(-columns // 512))
        assert torch.equal(unpack(words, columns // 128), scale[:, torch.arange(rows) // 128])
    assert weights.w13_scale_inv.dtype == torch.float32


def test_only_powers_of_two_are_prepared_for_sm100():
    bf16 = random_weights(NARROW, "bf16")
    assert bf16.prepared("sm100") is bf16
    with pytest.raises(UnsupportedShape, match=r"requantize\('ue8m0'\)"):
        random_weights(NARROW, "fp8_block").prepared("sm100")


def unless_refused(call: Callable[[], Any]) -> Any:
    """What `call` gives, None where graphmoe refuses it."""
    try:
        return call()
    except GraphMoEError:
        return None


@pytest.mark.parametrize("use", ["dequantise", "prepare again", "save", "shard"])
def test_packed_weights_are_not_mistaken_for_plain_ones(use, tmp_path):
    """Their scales are other numbers in another shape: every use is right or refused, never silently wrong."""
    weights = uneven_weights(NARROW, "ue8m0")
    packed = weights.prepared("sm100")
    if use == "dequantise":
        for mine, want in zip(unless_refused(packed.dequantize) or (), weights.dequantize(), strict=False):
            assert torch.equal(mine, want)
    elif use == "prepare again":
        again = unless_refused(lambda: packed.prepared("sm100"))
        if again is not None:
            assert_same(again, packed)
    elif use == "shard":
        with pytest.raises(WeightsMismatch, match="packed for kernels"):
            packed.shard(1, 0)
    elif unless_refused(lambda: packed.save(tmp_path)) is None:
        assert not list(tmp_path.glob("*.safetensors"))
    else:
        assert_same(ExpertWeights.load(tmp_path, NARROW), weights)


@by_recipe
@pytest.mark.parametrize(("hidden", "intermediate"), [(128, 512), (640, 384), (7168, 2048), (512, 1024)])
def test_a_plan_for_sm100_has_packed_scale_buffers(recipe, hidden, intermediate):
    spec = MoESpec(8, 2, hidden, intermediate)
    made = plan(spec, [1, 33], fmt="ue8m0", arch="sm100", recipes=recipe)
    assert (made.fmt, made.arch, made.gemm) == ("ue8m0", "sm100", "deep_gemm")
    for bucket in made.buckets:
        buffers = {buffer.name: buffer for buffer in bucket.buffers}
        for operand, columns in (("x", hidden), ("act", intermediate)):
            segments, rows, width = buffers[f"{operand}_rows"].shape
            scales = buffers[f"{operand}_scales"]
            assert (width, buffers[f"{operand}_rows"].dtype) == (columns, "float8_e4m3fn")
            assert (scales.shape, scales.dtype) == ((segments, (columns + 511) // 512, rows), "int32")
            assert rows % 4 == 0
            assert scales.nbytes == 4 * segments * ((columns + 511) // 512) * rows
            assert (scales.first, scales.last) == (buffers[f"{operand}_rows"].first, buffers[f"{operand}_rows"].last)


def test_a_plan_elsewhere_keeps_float32_scales_and_sm100_refuses_them():
    scales = {}
    for fmt, arch in (("ue8m0", "sm90"), ("ue8m0", "cpu"), ("fp8_block", "sm90")):
        made = plan(SPEC, [8], fmt=fmt, arch=arch)
        scales[fmt, arch] = [(b.name, b.shape, b.dtype) for b in made.buckets[0].buffers if b.name.endswith("scales")]
        assert {dtype for *_, dtype in scales[fmt, arch]} == {"float32"}
    assert len({str(found) for found in scales.values()}) == 1
    with pytest.raises(UnsupportedShape, match=r"'fp8_block' has float32 scales.*weights\.requantize\('ue8m0'\)"):
        plan(SPEC, [8], fmt="fp8_block", arch="sm100")
    plain = plan(SPEC, [8], fmt="bf16", arch="sm100")
    assert not [b.name for b in plain.buckets[0].buffers if b.name.endswith("scales")]


# the whole layer


@by_recipe
@pytest.mark.parametrize("spec", [SPEC, LONG], ids=["all experts", "a rank's"])
def test_a_layer_equals_the_oracle_of_its_own_weights(spec, recipe):
    weights = made_once(spec, "ue8m0", 0)
    with MoERuntime(spec, weights, buckets=[2, 13], path=recipe, device="cpu") as runtime:
        for round_, (tokens, kinds) in enumerate(
            ((0, ["balanced"]), (1, ["zipf"]), (2, ["sentinels"]), (13, ["balanced", "one_expert", "witness64"]))
        ):
            named = dict(routings(spec, tokens, seed=tokens))
            for kind in kinds:
                x, router = random_inputs(spec, tokens, seed=tokens)
                poison(runtime, POISONS[round_ % 3])
                y = runtime(x, named[kind], router)
                assert_rows(y, oracle(x, named[kind], router, weights), "ue8m0", f"{kind} T={tokens}")


def run_by_hand(
    weights: ExpertWeights, recipe: Recipe, arch: str, word: int, x: Tensor, ids: Tensor, router: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The step of `arch`'s plan on the CPU: buffers of their own, filled with `word`, the torch twins and the torch GEMM."""
    bucket = plan(weights.spec, [len(x)], fmt="ue8m0", arch=arch, recipes=recipe).buckets[0]
    buffers = {b.name: torch.full((b.nbytes // 4,), word, dtype=torch.int32).view(getattr(torch, b.dtype)).view(b.shape) for b in bucket.buffers}
    buffers["flags"] = torch.zeros(1, dtype=torch.int32)
    fmt = get_format("ue8m0").on(arch)
    bound = get_path(recipe.path).bind(weights.spec, fmt, len(x), bucket.options, buffers, weights, reference, TorchGemm())
    out = torch.full_like(x, torch.nan)
    step(bound, x, ids, router, out)
    assert int(buffers["flags"]) == 0
    return out, buffers


@by_recipe
@pytest.mark.parametrize("spec", [SPEC, LONG], ids=["two words in H", "two words in I"])
def test_the_packed_form_gives_the_same_bits(spec, recipe):
    weights = made_once(spec, "ue8m0", 0)
    x, router = random_inputs(spec, 9)
    gain = 2.0 ** (torch.arange(spec.hidden_size // 128) * 3 - 6)
    x = (x.float() * gain.repeat_interleave(128)).bfloat16()
    named = dict(routings(spec, 9))
    for kind, word in zip(("balanced", "sentinels", "one_expert"), POISONS, strict=True):
        ids = named[kind].int()
        want, plain = run_by_hand(weights, recipe, "cpu", word, x, ids, router)
        mine, packed = run_by_hand(weights.prepared("sm100"), recipe, "sm100", word ^ 0x5A5A5A5A, x, ids, router)
        assert torch.equal(bits(mine), bits(want)), kind
        live = plain["row_of"][plain["row_of"] >= 0].long()
        assert len(live) > 0
        for scales, columns in (("x_scales", spec.hidden_size // 128), ("act_scales", spec.intermediate_size // 128)):
            assert packed[scales].dtype == torch.int32
            unpacked = unpack(packed[scales].transpose(1, 2), columns).flatten(0, 1)[live]
            assert torch.equal(unpacked, plain[scales].transpose(1, 2).flatten(0, 1)[live]), kind
    with MoERuntime(spec, weights, buckets=[9], path=recipe, device="cpu") as runtime:
        assert torch.equal(bits(runtime(x, ids, router)), bits(want))


def test_bytes_in_another_order_change_the_result():
    """Scales of one row differ here, so the comparison above sees words or bytes that changed places."""
    recipe = GROUPED[3]
    weights = uneven_weights(SPEC, "ue8m0")
    x, router = random_inputs(SPEC, 5)
    ids = dict(routings(SPEC, 5))["balanced"].int()
    packed = weights.prepared("sm100")
    want, _ = run_by_hand(packed, recipe, "sm100", -1, x, ids, router)
    for field in ("w13_scale_inv", "w2_scale_inv"):
        words = getattr(packed, field)
        turned = raw(words).unflatten(-1, (-1, 4))[..., [1, 0, 2, 3]].contiguous().flatten(-2).view(torch.int32)
        swapped = ExpertWeights(**{**vars(packed), field: turned})
        got, _ = run_by_hand(swapped, recipe, "sm100", -1, x, ids, router)
        with pytest.raises(AssertionError, match="is off"):
            assert_rows(got, want.double(), "ue8m0")


# kernels


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here; tests/gpu compares them")
    from graphmoe import kernels

    return kernels


few = settings(max_examples=max(5, settings().max_examples // 6))
POISON = 0x5A5A5A5A


def bf16_edges(rng: np.random.Generator, shape: tuple[int, int, int]) -> Tensor:
    """bf16 `[T, C]` of groups `(T, C / 128, 128)` with largest magnitudes at and next to powers of two and 448 times them; some not finite."""
    with np.errstate(over="ignore"):
        at = np.concatenate([EDGES[::7], (np.array([1, 1.75, 448])[:, None] * 2.0 ** np.arange(-133, 119)).ravel()]).astype(np.float32)
    patterns = (at.view(np.uint32) >> 16).astype(np.int32)[:, None] + np.array([-1, 0, 1])
    patterns = patterns[(patterns >= 0) & (patterns <= 0x7F7F)].astype(np.int16)
    amax = torch.from_numpy(rng.choice(patterns, (*shape[:2], 1))).view(torch.bfloat16)
    x = (torch.from_numpy(rng.uniform(-1, 1, shape)).float() * amax.float() * 0.99).bfloat16()
    x[..., rng.integers(128)] = amax[..., 0] * float(rng.choice([-1, 1]))
    bad = torch.from_numpy(rng.random(shape[:2]) < 0.1)
    x[..., 17] = torch.where(bad, float(rng.choice([np.nan, np.inf, -np.inf])), x[..., 17])
    return x.flatten(1)


def empty_scales(layout: RowLayout, columns: int, scale_format: ScaleFormat) -> Tensor:
    width = -(-columns // 512) if scale_format is ScaleFormat.UE8M0_PACKED else columns // 128
    words = torch.full((layout.segments, width, layout.segment_rows), POISON, dtype=torch.int32)
    return words if scale_format is ScaleFormat.UE8M0_PACKED else words.view(torch.float32)


def expected_scales(layout: RowLayout, row_of: Tensor, exact: np.ndarray, scale_format: ScaleFormat) -> np.ndarray:
    """Bytes of the scale buffer by loops: `exact` float64 `[T, K, groups, 128]` is what each assignment's row holds."""
    groups = exact.shape[2]
    packed = scale_format is ScaleFormat.UE8M0_PACKED
    width = -(-groups // 4) if packed else groups
    stored = np.full((layout.segments, width, layout.segment_rows, 4), 0x5A, dtype=np.uint8)
    for token, rows in enumerate(row_of.tolist()):
        for k, row in enumerate(rows):
            if row < 0:
                continue
            segment, slot = divmod(row, layout.segment_rows)
            if packed:
                stored[segment, :, slot] = 0
            for group in range(groups):
                values = np.abs(exact[token, k, group])
                exponent = biased(float(formula(values.max()))) if np.isfinite(values).all() else 255
                if packed:
                    stored[segment, group // 4, slot, group % 4] = exponent
                else:
                    word = 0x7FC00000 if exponent == 255 else exponent << 23
                    stored[segment, group, slot] = np.frombuffer(word.to_bytes(4, "little"), dtype=np.uint8)
    return stored


def as_bytes(scales: Tensor) -> np.ndarray:
    """Bytes of a scale buffer, every float32 NaN as the one that a computation makes."""
    if scales.dtype == torch.float32:
        scales = torch.where(scales.isnan(), torch.nan, scales)
    return scales.view(torch.uint8).numpy().reshape(*scales.shape, 4)


def small_layouts(spec: MoESpec, tokens: int) -> list[RowLayout]:
    return [RowLayout.masked(spec, tokens, 64), RowLayout.contiguous("psum", spec, tokens, 64)]


def routed(spec: MoESpec, layout: RowLayout, ids: Tensor) -> Tensor:
    row_of = torch.empty(ids.shape, dtype=torch.int32)
    groups, flags = torch.empty(layout.group_entries, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    counts = torch.empty(1, spec.num_local_experts, dtype=torch.int32)
    reference.count(ids, distinct=True, block_counts=counts, flags=flags)
    reference.route(ids, layout, distinct=True, block_counts=counts, row_of=row_of, groups=groups)
    return row_of


by_packing = pytest.mark.parametrize("scale_format", [ScaleFormat.UE8M0, ScaleFormat.UE8M0_PACKED], ids=lambda one: one.value)


@by_packing
@few
@example(groups=9, seed=0)
@given(groups=st.sampled_from([1, 2, 3, 4, 5, 9]), seed=st.integers(0, 2**32 - 1))
def test_scatter_writes_exactly_the_scales_of_live_rows(kernels, scale_format, groups, seed):
    """The kernel and its twin: same bytes as by hand in live rows, unused bytes zero, no other byte touched. 9 groups take two programs a token."""
    spec = MoESpec(5, 2, 128 * groups, 128)
    rng = np.random.default_rng(seed)
    x = bf16_edges(rng, (4, groups, 128))
    ids = torch.tensor([[0, 3], [-1, 3], [4, 0], [5, -7]])
    for layout in small_layouts(spec, 4):
        row_of = routed(spec, layout, ids)
        exact = np.broadcast_to(x.double().numpy().reshape(4, 1, groups, 128), (4, 2, groups, 128))
        want = expected_scales(layout, row_of, exact, scale_format)
        for ops in (reference, kernels):
            rows = torch.zeros(layout.segments, layout.segment_rows, 128 * groups, dtype=torch.uint8).view(torch.float8_e4m3fn)
            scales = empty_scales(layout, 128 * groups, scale_format)
            ops.scatter(x, row_of, rows=rows, scales=scales, scale_format=scale_format)
            assert np.array_equal(as_bytes(scales), want), (ops.__name__, layout)


@by_packing
@few
@given(groups=st.sampled_from([1, 3, 4, 5, 9]), seed=st.integers(0, 2**32 - 1))
def test_act_writes_exactly_the_scales_of_live_rows(kernels, scale_format, groups, seed):
    """Gates of 64 and more, whose sigmoid is exactly 1: the product with `up` is exact, and so is its scale."""
    spec = MoESpec(5, 2, 128, 128 * groups)
    rng = np.random.default_rng(seed)
    ids = torch.tensor([[0, 3], [-1, 3], [5, 0]])
    for layout in small_layouts(spec, 3):
        row_of = routed(spec, layout, ids)
        up = bf16_edges(rng, (layout.rows, groups, 128)).clamp(-1e30, 1e30)
        up[up.abs() < 1e-30] = 0.0
        gate = torch.from_numpy(2.0 ** rng.integers(6, 10, (layout.rows, 1))).bfloat16().expand_as(up)
        gate_up = torch.cat([gate, up], dim=1).view(layout.segments, layout.segment_rows, -1)
        product = (gate.double() * up.double()).numpy()
        exact = product[row_of.clamp(min=0).numpy()].reshape(3, 2, groups, 128)
        want = expected_scales(layout, row_of, exact, scale_format)
        for ops in (reference, kernels):
            rows = torch.zeros(layout.segments, layout.segment_rows, 128 * groups, dtype=torch.uint8).view(torch.float8_e4m3fn)
            scales = empty_scales(layout, 128 * groups, scale_format)
            ops.act(gate_up, row_of, rows=rows, scales=scales, scale_format=scale_format)
            assert np.array_equal(as_bytes(scales), want), (ops.__name__, layout)
