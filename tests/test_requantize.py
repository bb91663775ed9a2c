"""One scale for all rows, against its meaning in float64; in plain torch. The kernel is compared in `test_kernels_interpreted.py` and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphmoe import reference
from graphmoe.errors import InvalidInput
from graphmoe.formats import requantize_per_tensor, ue8m0
from tests import strategies
from tests.requantized import LAYOUTS, exact_bytes, requantized
from tests.test_formats import E4M3, half_step

LAUNCH = {"block_rows": 4, "block_groups": 4, "warps": 4}
any_layouts = st.tuples(*[st.sampled_from(LAYOUTS)] * 3)


def check(rows: strategies.ScaledRows, got: np.ndarray) -> None:
    """Every live value is within half an e4m3 step of its quotient, cut at +-448; NaN is NaN, and nothing else is."""
    scales = np.repeat(rows.scales, 128, axis=-1)[..., : rows.codes.shape[-1]].astype(np.float64)
    with np.errstate(over="ignore"):
        wanted = np.clip(E4M3[rows.codes] * scales / rows.out_scale, -448, 448)[rows.alive]
    codes = E4M3[got[rows.alive]]
    assert (np.isnan(codes) == np.isnan(wanted)).all()
    room = half_step(np.nan_to_num(wanted)) * (1 + 4e-6) + np.abs(wanted) * 2.0**-22
    off = np.abs(codes - wanted)
    assert (np.isnan(wanted) | (off <= room)).all(), f"off by {np.nanmax(off / room):.3f} half steps"


@given(data=st.data(), packed=st.booleans(), layouts=any_layouts)
def test_live_values_are_within_half_a_step_and_dead_rows_untouched(data: st.DataObject, packed: bool, layouts: tuple[str, str, str]) -> None:
    rows = data.draw(strategies.scaled_rows(powers=packed))
    got, _ = requantized(reference, rows, packed=packed, layouts=layouts, **LAUNCH)
    check(rows, got.numpy())


@given(data=st.data(), packed=st.booleans(), layouts=any_layouts)
def test_what_is_exact_is_met_exactly(data: st.DataObject, packed: bool, layouts: tuple[str, str, str]) -> None:
    rows = data.draw(strategies.scaled_rows(exact=True))
    got, _ = requantized(reference, rows, packed=packed, layouts=layouts, **LAUNCH)
    assert (got.numpy()[rows.alive] == exact_bytes(rows, E4M3)).all()


def all_bytes() -> Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(1, 256).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("base", [2.0**-126, 1.0, 2.0**126])
def test_every_byte_keeps_its_value_at_its_own_scale(base: float) -> None:
    """Where `payload * scale` alone would overflow, or vanish."""
    out = requantize_per_tensor(all_bytes(), torch.full((1, 2), base), torch.tensor(base))
    assert torch.equal(out.float().nan_to_num(-1000), all_bytes().float().nan_to_num(-1000))


@pytest.mark.parametrize(("scale", "want"), [(3e38, 448.0), (torch.inf, 448.0), (0.0, 0.0), (torch.nan, torch.nan)])
def test_scales_at_the_ends_saturate_or_vanish_and_only_nan_is_nan(scale: float, want: float) -> None:
    values = requantize_per_tensor(all_bytes(), torch.full((1, 2), scale), torch.tensor([1e-6])).float()[0]
    expected = torch.from_numpy(np.sign(E4M3)).float() * want
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.inf, torch.nan])
def test_one_scale_that_cannot_be_makes_everything_nan(bad: float) -> None:
    assert bool(requantize_per_tensor(all_bytes(), torch.ones(1, 2), torch.tensor(bad)).float().isnan().all())


def test_a_result_may_take_the_place_of_its_rows() -> None:
    x = torch.randn(3, 4, 256).to(torch.float8_e4m3fn)
    scales, one = torch.rand(3, 4, 2), torch.tensor(0.7)
    counts = torch.tensor([0, 4, 2], dtype=torch.int32)
    want = requantize_per_tensor(x, scales, one, masked_m=counts)
    assert not want.float()[0].any(), "rows that are not live are 0 in a new tensor"
    before = x.clone()
    assert requantize_per_tensor(x, scales, one, masked_m=counts, out=x) is x
    alive = torch.arange(4) < counts[:, None]
    assert torch.equal(x.view(torch.uint8)[alive], want.view(torch.uint8)[alive])
    assert torch.equal(x.view(torch.uint8)[~alive], before.view(torch.uint8)[~alive])


def test_rows_of_the_arena_are_taken_as_they_lie() -> None:
    """Scales `[E, K/128, slots]` with columns first, as `scatter` writes them; and packed words as deep_gemm takes them."""
    x = torch.randn(2, 5, 640).to(torch.float8_e4m3fn)
    scales, one = torch.exp2(torch.randint(-9, 9, (2, 5, 5)).float()), torch.tensor([3.0])
    want = requantize_per_tensor(x, scales, one).view(torch.uint8)
    assert torch.equal(requantize_per_tensor(x, scales.mT.contiguous().mT, one).view(torch.uint8), want)
    words = ue8m0.pack(scales)
    assert words.stride(1) == 1
    assert torch.equal(requantize_per_tensor(x, words, one).view(torch.uint8), want)


def test_no_rows_are_no_rows() -> None:
    assert requantize_per_tensor(all_bytes()[:0], torch.ones(0, 2), torch.tensor(1.0)).shape == (0, 256)


GOOD = {"x": torch.zeros(2, 3, 256).to(torch.float8_e4m3fn), "scales": torch.ones(2, 3, 2), "out_scale": torch.ones(())}


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"x": torch.zeros(2, 3, 256)}, r"x is torch.float32 \(2, 3, 256\)"),
        ({"x": torch.zeros(256).to(torch.float8_e4m3fn)}, r"x is .* \(256,\)"),
        ({"scales": torch.ones(2, 3, 2).double()}, "scales are torch.float64"),
        ({"scales": torch.ones(2, 3, 3)}, r"scales is .*\(2, 3, 3\), expected .*\(2, 3, 2\)"),
        ({"scales": torch.ones(2, 3, 2).int()}, r"expected torch.int32 \(2, 3, 1\)"),
        ({"out_scale": torch.ones(2)}, r"out_scale is torch.float32 \(2,\)"),
        ({"out_scale": torch.ones(()).double()}, "out_scale is torch.float64"),
        ({"masked_m": torch.ones(3).int()}, r"masked_m is .*\(3,\), expected torch.int32 \(2,\)"),
        ({"masked_m": torch.ones(2).long()}, "masked_m is torch.int64"),
        ({"row_map": torch.ones(2).int()}, r"row_map with \[R, K\]"),
        ({"x": GOOD["x"][0], "scales": GOOD["scales"][0], "masked_m": torch.ones(3).int()}, r"masked_m goes with \[E, slots, K\]"),
        ({"out": torch.zeros(2, 3, 256)}, "out is torch.float32"),
        ({"out_scale": torch.ones((), device="meta")}, "x is on cpu, another tensor on meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Tensor], part: str) -> None:
    with pytest.raises(InvalidInput, match=part):
        requantize_per_tensor(**{**GOOD, **wrong})


def test_the_judge_sees_a_scale_of_another_group_and_a_lost_saturation() -> None:
    rows = strategies.ScaledRows(
        np.full((1, 256), 0x38, dtype=np.uint8), np.array([[1.0, 600.0]], dtype=np.float32), 1.0, np.zeros(1, dtype=np.int32)
    )
    good, _ = requantized(reference, rows, packed=False, layouts=("plain",) * 3, **LAUNCH)
    check(rows, good.numpy())
    for mutant in (np.roll(good.numpy(), 128, axis=1), np.where(good.numpy() == 0x7E, 0x7F, good.numpy()), good.numpy() + 1):
        with pytest.raises(AssertionError):
            check(rows, mutant)
    with pytest.raises(AssertionError, match="not live were written"):
        requantized(_Careless, replace(rows, live=-np.ones(1, dtype=np.int32)), packed=False, layouts=("plain",) * 3)
    with pytest.raises(AssertionError, match="beside the rows"):
        requantized(_Overrunning, rows, packed=False, layouts=("plain",) * 3)


class _Careless:
    @staticmethod
    def requantize_per_tensor(*_: Tensor, out: Tensor, **__: object) -> None:
        out.view(torch.uint8).fill_(3)


class _Overrunning:
    @staticmethod
    def requantize_per_tensor(*_: Tensor, out: Tensor, **__: object) -> None:
        out.view(torch.uint8).as_strided((257,), (1,)).fill_(3)
