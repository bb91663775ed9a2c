"""Block FP8 against its meaning in float64: e4m3 bytes are decoded here from their bits, blocks are cut out by hand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphmoe import MoESpec, formats
from graphmoe.errors import UnsupportedShape
from graphmoe.formats import FORMATS, get_format
from graphmoe.formats.fp8_block import dequantize_rows, dequantize_weight, holds_nan, quantize_rows, quantize_weight, to_e4m3
from tests import strategies

WEIGHT_BLOCK, ROW_GROUP = (128, 128), (1, 128)
SMALLEST_NORMAL = 2.0**-126
ROUNDED_BY_FLOAT32 = 1 + 4e-6
"""What float32 scale and quotient (2^-24 of a value each) add to half a step of e4m3, which is at least 2^-5 of a value."""


def _decode(code: int) -> float:
    """The value of an e4m3 byte: sign, 4 exponent bits (bias 7), 3 mantissa bits, subnormals, no infinity."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 0xF, code & 0x7
    if code & 0x7F == 0x7F:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


E4M3 = np.array([_decode(code) for code in range(256)])
DTYPES = (torch.float32, torch.bfloat16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def decoded(payload: Tensor) -> np.ndarray:
    return E4M3[payload.view(torch.uint8).numpy()]


def half_step(values: np.ndarray) -> np.ndarray:
    """Half the distance between neighbours on the e4m3 grid around `values`."""
    return np.exp2(np.clip(np.floor(np.log2(np.maximum(np.abs(values), 2.0**-20))), -6, 8) - 4)


def blocks(shape: tuple[int, int], block: tuple[int, int]) -> Iterator[tuple[tuple[int, int], tuple[slice, slice]]]:
    """Scale index and slice of every block."""
    for row in range(-(-shape[0] // block[0])):
        for column in range(-(-shape[1] // block[1])):
            yield (row, column), (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))


def finite(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """`values` as `dtype`, kept where rounding to it does not overflow."""
    tensor = torch.from_numpy(values).to(dtype)
    return torch.where(tensor.isfinite(), tensor, torch.zeros((), dtype=dtype))


def check_quantised(x: Tensor, payload: Tensor, scale: Tensor, restored: Tensor, block: tuple[int, int]) -> None:
    """Everything that `value = payload * scale` promises, block by block."""
    exact, codes, back = x.double().numpy(), decoded(payload), restored.double().numpy()
    assert payload.shape == restored.shape == x.shape
    assert payload.dtype == torch.float8_e4m3fn
    assert scale.dtype == restored.dtype == torch.float32
    assert scale.shape == tuple(-(-side // length) for side, length in zip(x.shape, block, strict=True))
    assert not np.isnan(codes).any()
    assert not np.isnan(back).any()
    for index, cut in blocks(exact.shape, block):
        own, amax = float(scale[index]), np.abs(exact[cut]).max()
        assert own >= SMALLEST_NORMAL
        normal = amax / 448 >= SMALLEST_NORMAL
        assert own == pytest.approx(amax / 448, rel=2.0**-23) if normal else own == SMALLEST_NORMAL
        wanted = exact[cut] / own
        room = half_step(wanted) * ROUNDED_BY_FLOAT32 + np.abs(wanted) * 2.0**-23
        off = np.abs(codes[cut] - wanted)
        assert (off <= room).all(), f"block {index}: payload off by {(off / room).max():.3f} half steps"
        # 1/16 of a value, or half the smallest step; float32 holds the product to 2^-24 or to its own smallest step.
        bound = np.abs(exact[cut]) * 0.0626 + own * 2.0**-10 + 2.0**-149
        error = np.abs(back[cut] - exact[cut])
        assert (error <= bound).all(), f"block {index}: dequantised value off by {error.max()} at amax {amax}"
        assert not normal or error.max() <= amax / 27, f"block {index}: off by {error.max()} at amax {amax}"


@by_dtype
@given(data=st.data())
def test_weights_are_rounded_per_block_to_half_a_step(dtype, data):
    x = finite(data.draw(strategies.blocked_values(block=WEIGHT_BLOCK)), dtype)
    payload, scale = quantize_weight(x)
    check_quantised(x, payload, scale, dequantize_weight(payload, scale), WEIGHT_BLOCK)


@by_dtype
@given(data=st.data())
def test_rows_are_rounded_per_group_to_half_a_step(dtype, data):
    x = finite(data.draw(strategies.blocked_values(block=ROW_GROUP, whole=True)), dtype)
    payload, scale = quantize_rows(x)
    check_quantised(x, payload, scale, dequantize_rows(payload, scale), ROW_GROUP)


@given(values=strategies.blocked_values(block=WEIGHT_BLOCK))
def test_a_second_rounding_changes_nothing(values):
    """What dequantises exactly must quantise back to the same values: a scale off by a block or a reciprocal would drift."""
    once = dequantize_weight(*quantize_weight(torch.from_numpy(values)))
    twice = dequantize_weight(*quantize_weight(once))
    torch.testing.assert_close(twice, once, rtol=2.0**-22, atol=2.0**-149)


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (300, 200), (128, 640)])
def test_every_block_has_its_own_scale(shape):
    """Each block is one constant, a power of two apart from all others, so a scale of a wrong block is off by a factor of 2 or more."""
    x = torch.empty(shape)
    for number, (_, cut) in enumerate(blocks(shape, WEIGHT_BLOCK)):
        x[cut] = 2.0 ** (3 * number - 10)
    payload, scale = quantize_weight(x)
    torch.testing.assert_close(dequantize_weight(payload, scale), x, rtol=2.0**-22, atol=0.0)
    for axis in (0, 1):
        if scale.shape[axis] > 1:
            shifted = dequantize_weight(payload, scale.roll(1, axis))
            assert ((shifted - x).abs() / x).min() > 0.5


def test_every_row_group_has_its_own_scale():
    x = torch.exp2(torch.arange(3 * 4) * 3.0 - 15).view(3, 4).repeat_interleave(128, -1)
    payload, scale = quantize_rows(x)
    assert scale.shape == (3, 4)
    torch.testing.assert_close(dequantize_rows(payload, scale), x, rtol=2.0**-22, atol=0.0)


def test_leading_dimensions_are_independent():
    x = torch.randn(2, 3, 130, 260, generator=torch.Generator().manual_seed(1)) * torch.exp2(torch.arange(6.0) * 4).view(2, 3, 1, 1)
    payload, scale = quantize_weight(x)
    assert scale.shape == (2, 3, 2, 3)
    for index in np.ndindex(2, 3):
        alone, alone_scale = quantize_weight(x[index])
        assert torch.equal(payload[index].view(torch.uint8), alone.view(torch.uint8))
        assert torch.equal(scale[index], alone_scale)
    assert torch.equal(dequantize_weight(payload, scale)[1, 2], dequantize_weight(payload[1, 2], scale[1, 2]))
    rows = x[..., :128]
    row_payload, row_scale = quantize_rows(rows)
    assert row_scale.shape == (2, 3, 130, 1)
    flat_payload, flat_scale = quantize_rows(rows.reshape(-1, 128))
    assert torch.equal(row_payload.view(torch.uint8).reshape(-1, 128), flat_payload.view(torch.uint8))
    assert torch.equal(row_scale.reshape(-1, 1), flat_scale)


def test_no_rows_give_no_scales():
    payload, scale = quantize_rows(torch.empty(0, 256, dtype=torch.bfloat16))
    assert payload.shape == (0, 256)
    assert scale.shape == (0, 2)
    assert dequantize_rows(payload, scale).shape == (0, 256)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_block_of_zeros_has_a_positive_scale_and_zeros(zero):
    for payload, scale, restored in (
        (*(quantised := quantize_weight(torch.full((128, 256), zero))), dequantize_weight(*quantised)),
        (*(quantised := quantize_rows(torch.full((3, 256), zero))), dequantize_rows(*quantised)),
    ):
        assert bool((scale > 0).all())
        assert bool((decoded(payload) == 0).all())
        assert bool((restored == 0).all())


@given(data=st.data(), bad=st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_a_group_that_is_not_finite_is_nan_and_its_neighbours_are_untouched(data, bad):
    x = torch.from_numpy(data.draw(strategies.blocked_values(block=ROW_GROUP, whole=True)))
    rows, groups = x.shape[0], x.shape[1] // 128
    clean = dequantize_rows(*quantize_rows(x))
    hit = torch.zeros(rows, groups, dtype=torch.bool)
    for _ in range(data.draw(st.integers(1, 3))):
        row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, x.shape[1] - 1))
        x[row, column] = bad
        hit[row, column // 128] = True
    payload, scale = quantize_rows(x)
    restored = dequantize_rows(payload, scale)
    assert torch.equal(scale.isnan(), hit)
    assert torch.equal(restored.isnan(), hit.repeat_interleave(128, -1))
    assert torch.equal(restored[~restored.isnan()], clean[~restored.isnan()])


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=200))
def test_the_cast_saturates_and_takes_the_nearest_value(values):
    codes = to_e4m3(torch.tensor(values, dtype=torch.float32)).view(torch.uint8).tolist()
    positive = E4M3[:0x7F]
    for value, code in zip(values, codes, strict=True):
        if np.isnan(value):
            assert code & 0x7F == 0x7F
            continue
        distance = np.abs(positive - min(abs(value), 448.0))
        nearest = np.flatnonzero(distance == distance.min())
        even = next(int(one) for one in nearest if len(nearest) == 1 or one % 2 == 0)
        assert code == even | (0x80 if np.signbit(value) else 0), f"{value} became {E4M3[code]}, nearest is {E4M3[even]}"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (448.0, 0x7E),
        (449.0, 0x7E),
        (464.1, 0x7E),
        (1e9, 0x7E),
        (float("inf"), 0x7E),
        (-449.0, 0xFE),
        (-float("inf"), 0xFE),
        (-0.0, 0x80),
        (0.0, 0x00),
    ],
)
@by_dtype
def test_the_cast_never_overflows(value, code, dtype):
    assert to_e4m3(torch.tensor([value], dtype=dtype)).view(torch.uint8).item() == code


@by_dtype
def test_the_cast_keeps_nan(dtype):
    assert bool(to_e4m3(torch.tensor([float("nan")], dtype=dtype)).float().isnan())


@pytest.mark.parametrize("size", [1, 2, 130, 1000])
def test_nan_is_found_wherever_it_is(size):
    codes = torch.arange(size, dtype=torch.int32).mul(37).remainder(256).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    assert not holds_nan(codes.view(torch.float8_e4m3fn))
    for code in range(256):
        for place in {0, size // 2, size - 1}:
            one = codes.clone()
            one[place] = code
            assert holds_nan(one.view(torch.float8_e4m3fn)) == bool(np.isnan(E4M3[code]))
    assert not holds_nan(codes[:0].view(torch.float8_e4m3fn))


def test_requantising_is_found_beside_the_formats():
    """On first use: that importing the formats does without torch is seen where planning is."""
    from graphmoe.formats import requantize_ue8m0

    assert requantize_ue8m0 is formats.requantize_ue8m0 is formats.ue8m0.requantize_ue8m0
    with pytest.raises(AttributeError, match=r"'graphmoe\.formats' has no attribute 'requantize_int3'"):
        _ = formats.requantize_int3


@given(
    hidden=st.integers(1, 20).map(lambda n: n * 32),
    intermediate=st.integers(1, 20).map(lambda n: n * 32),
    name=st.sampled_from(["fp8_block", "bf16"]),
)
def test_a_format_takes_multiples_of_its_divisor_only(hidden, intermediate, name):
    """A 128-block that a shard would cut in two is refused by name, never rounded up."""
    divisor = {"fp8_block": 128, "bf16": 64}[name]
    spec = MoESpec(4, 2, hidden, intermediate)
    if hidden % divisor == intermediate % divisor == 0:
        get_format(name).check(spec)
        return
    culprit, value = ("hidden_size", hidden) if hidden % divisor else ("intermediate_size", intermediate)
    with pytest.raises(UnsupportedShape, match=f"{culprit}={value} is not a multiple of {divisor}.*'{name}'"):
        get_format(name).check(spec)


def test_an_unknown_format_names_the_known_ones():
    with pytest.raises(UnsupportedShape, match=", ".join(FORMATS)):
        get_format("int3")
