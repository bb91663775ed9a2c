"""Packed UE8M0 scales: the Triton kernel and its torch twin, bit for bit what deep_gemm's own packing makes."""

from __future__ import annotations

import pytest
import torch

from graphmoe import kernels, reference
from graphmoe.formats import ue8m0


@pytest.mark.parametrize("columns", [1, 3, 4, 5, 56])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 63, 64, 130, 1000])
@pytest.mark.parametrize("groups", [1, 3])
def test_packing_equals_deep_gemms(groups: int, rows: int, columns: int) -> None:
    import deep_gemm

    scales = torch.exp2(torch.randint(-126, 128, (groups, rows, columns), device="cuda").float())
    theirs = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(scales if groups > 1 else scales[0])
    theirs = theirs if groups > 1 else theirs[None]
    mine = ue8m0.pack(scales)
    assert mine.shape == theirs.shape
    assert torch.equal(mine, theirs)
    assert mine.stride(1) == theirs.stride(1) == 1 or rows == 1
    assert mine.stride(2) == theirs.stride(2) or mine.shape[2] == 1
    for ops in (kernels, reference):
        out = torch.full((groups, -(-columns // 4), -(-rows // 4) * 4), 0x7E7E7E7E, dtype=torch.int32, device="cuda")
        ops.pack(scales, out=out)
        assert torch.equal(out.transpose(1, 2)[:, :rows], theirs)
        assert bool((out[:, :, rows:] == 0).all())
        ops.pack(scales.transpose(1, 2).contiguous().transpose(1, 2), out=out.fill_(-1))
        assert torch.equal(out.transpose(1, 2)[:, :rows], theirs)
    assert torch.equal(ue8m0.unpack(theirs, columns), scales)
