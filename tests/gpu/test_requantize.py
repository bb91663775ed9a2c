"""Requantising to one scale: the compiled kernel against its twin, bit for bit, and against its meaning; then 16384 rows, timed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmoe import kernels, reference
from graphmoe.formats import ue8m0
from graphmoe.measure import graph_timing, read_bandwidth
from tests import strategies
from tests.gpu.conftest import Table
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


@pytest.mark.alone
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("columns", [2048, 7168])
def test_many_rows_equal_the_twin_and_are_timed(columns: int, packed: bool, table: Table) -> None:
    """Experts of 0 to 1024 rows; 16384 in all are timed against the bandwidth of a plain reduction in the same run."""
    experts, slots = 32, 1024
    x = torch.randn(experts, slots, columns, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-6, 3, (experts, columns // 128, slots), device="cuda").float()).transpose(1, 2)
    scales = ue8m0.pack(scales) if packed else scales
    one = torch.tensor(0.05, device="cuda")
    counts = torch.linspace(0, slots, experts, device="cuda").round().int()
    assert int(counts.sum()) == 16384
    outs = [torch.full_like(x.view(torch.uint8), 0xFF).view(torch.float8_e4m3fn) for _ in range(2)]
    arguments = {"masked_m": counts, "row_map": None}
    reference.requantize_per_tensor(x, scales, one, out=outs[1], block_rows=1, block_groups=1, warps=1, **arguments)
    bandwidth, lines = read_bandwidth(torch.device("cuda")), []
    for block_rows, block_groups, warps in ((1, 8, 4), (1, 16, 4), (2, 8, 4), (4, 8, 4), (4, 8, 8), (8, 8, 8)):
        launch = {"block_rows": block_rows, "block_groups": block_groups, "warps": warps}
        run = partial(kernels.requantize_per_tensor, x, scales, one, out=outs[0], **launch, **arguments)
        outs[0].view(torch.uint8).fill_(0xFF)
        run()
        assert torch.equal(outs[0].view(torch.uint8), outs[1].view(torch.uint8)), launch
        timing = graph_timing([run] * 4)
        moved = 16384 * columns * 2 + 16384 * (columns // 128) * (1 if packed else 4)
        lines.append((moved / (timing.median_us * 1e-6) / bandwidth, f"{launch} {timing} us"))
    best, launch_text = max(lines)
    table.append(f"requantise 16384 x {columns}, {'packed' if packed else 'float32'} scales: {best:.2f} of the read bandwidth, {launch_text}")
