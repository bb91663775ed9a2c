"""Pack: float32 power-of-two scales into deep_gemm's exponent words.

scales f32 [G, R, S]  any strides     out int32 [G, ceil(S/4), round_up(R, 4)]  contiguous; every word is written, unused bytes and rows are 0
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _pack_kernel(
    scales, group_stride, row_stride, column_stride, out, rows, stored_rows,
    COLUMNS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    packed = tl.zeros([BLOCK], dtype=tl.int32)
    for byte in tl.static_range(4):
        column = word * 4 + byte
        at = scales + group * group_stride + row * row_stride + column * column_stride
        scale = tl.load(at, mask=(row < rows) & (column < COLUMNS), other=0.0)
        packed = packed | (((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF) << (8 * byte))
    tl.store(out + (group * WORDS + word) * stored_rows + row, packed, mask=row < stored_rows)


def pack(scales: Tensor, *, out: Tensor) -> None:
    """Write the biased exponents of `scales` `[G, R, S]`, four columns a word, lowest column in the lowest byte. One launch, no allocation.

    `out.transpose(1, 2)[:, :R]` is what deep_gemm takes on SM100.
    """
    groups, rows, columns = scales.shape
    words, stored_rows = out.shape[1:]
    block = 256
    _pack_kernel[(groups, words, triton.cdiv(stored_rows, block))](
        scales, *scales.stride(), out, rows, stored_rows, COLUMNS=columns, WORDS=words, BLOCK=block
    )  # fmt: skip
