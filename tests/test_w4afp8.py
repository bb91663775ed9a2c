"""W4AFP8 against its meaning: nibbles by their arithmetic, groups cut out by hand, errors in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphmoe.errors import UnsupportedShape, WeightsError
from graphmoe.formats import FORMATS, get_format, w4afp8
from graphmoe.formats.w4afp8 import GROUPS, dequantize_weight, group_of, one_input_scale, pack, quantize_weight, unpack
from tests import strategies

SMALLEST_NORMAL = 2.0**-126
BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.int8)
by_group = pytest.mark.parametrize("group", GROUPS)


def signed(nibble: int) -> int:
    return nibble - 16 if nibble > 7 else nibble


VALUES = np.array([[signed(byte % 16), signed(byte // 16)] for byte in range(256)])
"""What each byte holds: its even column, its odd column."""


def error_of(x: Tensor, group: int, restored: Tensor) -> np.ndarray:
    """Squared error of each group, float64."""
    return ((restored.double() - x.double()) ** 2).unflatten(-1, (-1, group)).sum(-1).numpy()


# bytes


def test_every_byte_holds_two_values_and_is_found_again() -> None:
    assert unpack(BYTES).tolist() == VALUES.flatten().tolist()
    assert torch.equal(pack(unpack(BYTES)), BYTES)
    assert pack(torch.tensor([1, -2], dtype=torch.int8)).view(torch.uint8).tolist() == [0xE1], "the even column is the low nibble"


def test_every_pair_of_values_is_packed_and_found_again() -> None:
    pairs = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8)
    assert torch.equal(unpack(pack(pairs)), pairs)
    assert pack(pairs).unique().numel() == 256


def test_strides_and_empty_tensors_are_packed() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)
    assert torch.equal(unpack(pack(values.T.contiguous().T)), values)
    assert torch.equal(unpack(pack(values)[:, ::2]), values.unflatten(-1, (-1, 2))[:, ::2].flatten(-2))
    assert unpack(pack(values[:, :0])).shape == (3, 0)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        (torch.tensor([8, 0], dtype=torch.int8), "from 0 to 8 are no int4"),
        (torch.tensor([0, -9], dtype=torch.int8), "from -9 to 0 are no int4"),
        (torch.zeros(3, dtype=torch.int8), "3 columns"),
        (torch.zeros(2), "float32"),
    ],
)
def test_what_cannot_be_packed_is_refused(values: Tensor, part: str) -> None:
    with pytest.raises(WeightsError, match=part):
        pack(values)
    with pytest.raises(WeightsError, match="uint8"):
        unpack(BYTES.view(torch.uint8))


# quantised


@by_group
@given(data=st.data())
def test_values_are_within_half_a_scale(group: int, data: st.DataObject) -> None:
    x = torch.from_numpy(data.draw(strategies.blocked_values(block=(1, group), whole=True)))
    packed, scale = quantize_weight(x, group=group)
    assert packed.dtype == torch.int8
    assert packed.shape == (x.shape[0], x.shape[1] // 2)
    assert scale.dtype == torch.float32
    assert scale.shape == (x.shape[0], x.shape[1] // group)
    assert torch.equal(scale.bfloat16().float(), scale), "what bf16 holds at run time is the scale that was divided by"
    own, amax = scale.double().numpy(), x.double().abs().unflatten(-1, (-1, group)).amax(-1).numpy()
    wanted = np.maximum(amax / 7, SMALLEST_NORMAL)
    assert (np.abs(own - wanted) <= wanted * 2.0**-8).all()
    error = (dequantize_weight(packed, scale).double() - x.double()).abs().unflatten(-1, (-1, group)).amax(-1).numpy()
    assert (error <= own * 0.500001).all()


def test_halves_go_to_even_and_both_ends_are_met() -> None:
    x = torch.zeros(1, 32)
    x[0, :9] = torch.tensor([7.0, -7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.4999])
    packed, scale = quantize_weight(x, group=32)
    assert scale.tolist() == [[1.0]]
    assert unpack(packed)[0, :9].tolist() == [7, -7, 0, 2, 2, 0, -2, -2, 3]


@by_group
def test_every_group_has_its_own_scale(group: int) -> None:
    x = torch.exp2(torch.arange(3 * 4) * 3.0 - 15).view(3, 4).repeat_interleave(group, -1) * 7
    packed, scale = quantize_weight(x, group=group)
    assert torch.equal(dequantize_weight(packed, scale), x)
    for axis in (0, 1):
        assert not torch.isclose(dequantize_weight(packed, scale.roll(1, axis)), x, rtol=0.5).any()


def test_leading_dimensions_and_strides_change_nothing() -> None:
    x = torch.randn(2, 3, 5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed, scale = quantize_weight(x, group=64)
    for index in np.ndindex(2, 3):
        alone, alone_scale = quantize_weight(x[index].T.contiguous().T, group=64)
        assert torch.equal(packed[index], alone)
        assert torch.equal(scale[index], alone_scale)
    assert torch.equal(dequantize_weight(packed, scale)[1, 2], dequantize_weight(packed[1, 2], scale[1, 2]))
    assert quantize_weight(x[:, :, :0])[1].shape == (2, 3, 0, 1)


def test_the_weights_given_are_not_changed() -> None:
    x = torch.randn(4, 128)
    before = x.clone()
    for clip_search in (False, True):
        quantize_weight(x, clip_search=clip_search)
        assert torch.equal(x, before)


@given(values=strategies.blocked_values(block=(1, 32), whole=True))
def test_a_second_rounding_changes_nothing(values: np.ndarray) -> None:
    once = dequantize_weight(*quantize_weight(torch.from_numpy(values), group=32))
    twice = dequantize_weight(*quantize_weight(once, group=32))
    torch.testing.assert_close(twice, once, rtol=2.0**-7, atol=2.0**-126)


@pytest.mark.parametrize("clip_search", [False, True])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_group_of_zeros_has_a_positive_scale_and_zeros(zero: float, clip_search: bool) -> None:
    packed, scale = quantize_weight(torch.full((3, 256), zero), clip_search=clip_search)
    assert bool((scale == SMALLEST_NORMAL).all())
    assert bool((packed == 0).all())


@pytest.mark.parametrize("clip_search", [False, True])
@given(data=st.data(), bad=st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_a_group_that_is_not_finite_is_nan_and_its_neighbours_are_untouched(data: st.DataObject, clip_search: bool, bad: float) -> None:
    x = torch.from_numpy(data.draw(strategies.blocked_values(block=(1, 32), whole=True)))
    clean = dequantize_weight(*quantize_weight(x, group=32, clip_search=clip_search))
    row, column = data.draw(st.integers(0, x.shape[0] - 1)), data.draw(st.integers(0, x.shape[1] - 1))
    x[row, column] = bad
    hit = torch.zeros(x.shape, dtype=torch.bool)
    hit[row, column // 32 * 32 : column // 32 * 32 + 32] = True
    packed, scale = quantize_weight(x, group=32, clip_search=clip_search)
    restored = dequantize_weight(packed, scale)
    assert torch.equal(scale.isnan(), hit[:, ::32])
    assert torch.equal(restored.isnan(), hit)
    assert torch.equal(restored[~hit], clean[~hit])


@by_group
@given(data=st.data())
def test_the_search_never_makes_the_error_larger(group: int, data: st.DataObject) -> None:
    x = torch.from_numpy(data.draw(strategies.blocked_values(block=(1, group), whole=True)))
    plain, searched = (quantize_weight(x, group=group, clip_search=clip_search) for clip_search in (False, True))
    assert torch.equal(searched[1].bfloat16().float(), searched[1])
    before, after = (error_of(x, group, dequantize_weight(*made)) for made in (plain, searched))
    assert (after <= before * (1 + 1e-5)).all()


def test_the_search_finds_the_scale_at_which_nothing_is_lost() -> None:
    """A group that reaches -8: the symmetric rule cannot hold it, the search does; and one outlier among small values is cut."""
    values = torch.arange(128).remainder(16).sub(8).float() * 0.25
    assert torch.equal(dequantize_weight(*quantize_weight(values[None], clip_search=True))[0], values)
    assert not torch.equal(dequantize_weight(*quantize_weight(values[None]))[0], values)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    plain, searched = (error_of(x, 128, dequantize_weight(*quantize_weight(x, clip_search=clip))).sum() for clip in (False, True))
    assert searched < 0.95 * plain, "normal values"


# dequantised


def test_every_byte_times_scales_of_both_signs() -> None:
    """Also the smallest and the largest that float32 holds, and NaN and infinity, which stay what they are."""
    scales = torch.tensor([1.0, -1.0, 0.3, -2.5e-3, 0.0, 2.0**-126, -(2.0**-149), 3e38, torch.nan, torch.inf])
    packed = BYTES.repeat(len(scales), 1)
    per_group = scales[:, None].repeat(1, 4)  # 512 columns
    restored = dequantize_weight(packed, per_group)
    want = torch.from_numpy(VALUES.flatten()).float() * scales[:, None]
    torch.testing.assert_close(restored, want, rtol=0, atol=0, equal_nan=True)
    assert restored[1, 0] == 0
    assert restored[1, 15] == 1.0 * VALUES.flatten()[15] * -1
    assert bool(restored[8].isnan().all())


def test_scales_of_bf16_are_those_of_float32() -> None:
    packed, scale = quantize_weight(torch.randn(4, 256))
    assert torch.equal(dequantize_weight(packed, scale.bfloat16()), dequantize_weight(packed, scale))


# sizes


@pytest.mark.parametrize(("columns", "group"), [(127, 128), (192, 128), (96, 64), (33, 32), (256, 16), (256, 256), (256, 0)])
def test_groups_that_do_not_fit_are_refused_by_their_numbers(columns: int, group: int) -> None:
    with pytest.raises(UnsupportedShape, match=f"{columns} columns cannot be quantised in groups of {group}; take a group of 32, 64 or 128"):
        quantize_weight(torch.zeros(2, columns), group=group)


@pytest.mark.parametrize(("columns", "scales"), [(256, 3), (256, 1), (256, 16), (192, 2), (256, 0), (2, 1)])
def test_scales_that_fit_no_group_are_refused_by_their_numbers(columns: int, scales: int) -> None:
    with pytest.raises(UnsupportedShape, match=f"{scales} scales for {columns} columns make no group size"):
        dequantize_weight(torch.zeros(2, columns // 2, dtype=torch.int8), torch.ones(2, scales))


@by_group
def test_the_group_is_what_the_shapes_say(group: int) -> None:
    assert group_of(384 * group, 384) == group


def test_one_input_scale_is_the_largest() -> None:
    scale = one_input_scale(torch.tensor([[0.5, 2.0], [1.0, 0.25]]).bfloat16())
    assert (scale.dtype, scale.shape, float(scale)) == (torch.float32, (), 2.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 0.0, -1.0])
def test_input_scales_that_cannot_be_are_refused(bad: float) -> None:
    with pytest.raises(WeightsError, match="must be finite and positive"):
        one_input_scale(torch.tensor([1.0, bad]))
    with pytest.raises(WeightsError, match="must be finite and positive"):
        one_input_scale(torch.tensor([]))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**31))
def test_prepared_weights_have_the_same_values(rows: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(-128, 128, (2, rows, 64 * groups), generator=generator, dtype=torch.int8)
    scale = torch.randn(2, rows, groups, generator=generator).bfloat16()
    prepared, by_group = w4afp8.prepare(packed, scale)
    assert (prepared.dtype, by_group.shape) == (torch.uint8, (2, groups, rows))
    assert torch.equal(w4afp8.dequantize_prepared(prepared, by_group), dequantize_weight(packed, scale))


def test_a_prepared_byte_holds_what_masking_widens() -> None:
    """Column 0 is -8 and column 64 is 7: codes 0 and 15, which as e4m3 are 0 and 15 steps of 2^-9."""
    values = torch.zeros(1, 128, dtype=torch.int8)
    values[0, 0], values[0, 64] = -8, 7
    prepared, _ = w4afp8.prepare(pack(values), torch.ones(1, 1))
    assert prepared[0, 0] == 0xF0
    widened = [code.view(torch.float8_e4m3fn).float() * 512 - 8 for code in (prepared & 0xF, prepared >> 4)]
    assert torch.equal(torch.cat(widened, dim=1), values.float())


@pytest.mark.parametrize("group", [32, 64])
def test_other_groups_are_stored_and_not_run(group: int) -> None:
    packed, scale = quantize_weight(torch.randn(4, 128), group=group)
    with pytest.raises(UnsupportedShape, match=f"groups of {group} columns, kernels take 128"):
        w4afp8.prepare(packed, scale)


def test_formats_are_known_by_name() -> None:
    assert get_format("w4afp8").weight_bits == 4
    with pytest.raises(UnsupportedShape, match=f"unknown format 'int3'; known: {', '.join(FORMATS)}"):
        get_format("int3")
