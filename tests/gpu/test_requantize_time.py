"""Requantising 16384 rows to one scale: right, and timed against the memory bandwidth of the same run."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from graphmoe import kernels, reference
from graphmoe.formats import ue8m0
from graphmoe.measure import graph_timing, read_bandwidth
from tests.gpu.conftest import Table


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
