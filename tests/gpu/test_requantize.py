"""Requantising to one scale: the compiled kernel against its twin, bit for bit, and against its meaning."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmoe import kernels, reference
from tests import strategies
from tests.requantized import LAYOUTS, exact_bytes, requantized
from tests.test_formats import E4M3
from tests.test_requantize import check

LAUNCHES = ({"block_rows": 1, "block_groups": 2, "warps": 4}, {"block_rows": 4, "block_groups": 8, "warps": 4})
# Each width, kind of live rows and layout is compiled anew.
fewer = settings(max_examples=max(40, settings().max_examples // 6))
any_layouts = st.tuples(*[st.sampled_from(LAYOUTS)] * 3)


@pytest.mark.parametrize("exact", [False, True])
@fewer
@given(data=st.data(), packed=st.booleans(), layouts=any_layouts, launch=st.sampled_from(LAUNCHES))
def test_requantising_equals_its_twin_exactly(
    exact: bool, data: st.DataObject, packed: bool, layouts: tuple[str, str, str], launch: dict[str, int]
) -> None:
    """Rows that are not live, their scales and the memory around all of it are poison; NaN is NaN, whatever its bits."""
    rows = data.draw(strategies.scaled_rows(exact=exact, powers=packed))
    mine, twin = (requantized(ops, rows, packed=packed, layouts=layouts, device="cuda", **launch)[0].cpu() for ops in (kernels, reference))
    nan = twin & 0x7F == 0x7F
    assert torch.equal(mine & 0x7F == 0x7F, nan)
    assert torch.equal(mine[~nan], twin[~nan])
    check(rows, mine.numpy())
    if exact:
        assert (mine.numpy()[rows.alive] == exact_bytes(rows, E4M3)).all()


FAR = 2**24
"""In 128 columns it starts at element 2^31."""


@pytest.mark.parametrize("turned", [False, True])
def test_elements_beyond_31_bits_are_found(turned: bool) -> None:
    """The last of very many rows, or of very long columns; all others are dead, and stay as they were."""
    live = torch.full((FAR + 1,), -1, dtype=torch.int32, device="cuda")
    live[-1] = 0
    x, out = (torch.zeros((128, FAR + 1) if turned else (FAR + 1, 128), dtype=torch.uint8, device="cuda") for _ in range(2))
    x, out = (tensor.T if turned else tensor for tensor in (x, out))
    x[-1] = torch.arange(128, device="cuda").to(torch.uint8)
    scales, one = torch.ones(FAR + 1, 1, device="cuda"), torch.ones((), device="cuda")
    payloads = (x.view(torch.float8_e4m3fn), scales, one)
    launch = {"block_rows": 8, "block_groups": 1, "warps": 4}
    kernels.requantize_per_tensor(*payloads, masked_m=None, row_map=live, out=out.view(torch.float8_e4m3fn), **launch)
    assert torch.equal(out[-1, :127], x[-1, :127])
    assert not out[:-1].any()
