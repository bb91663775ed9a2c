"""Decode attention: one query token a row against that row's own length of keys and values.

q       [B, Hq, Dk]           keys [B, Hkv, L, Dk]      values [B, Hkv, L, Dv]     positions int64 [B]: the query's own
partial f32 [B, Hq, S, Dv]    lse  f32 [B, Hq, S]       out    [B, Hq, Dv]         S = splits(L)

A row's positions are cut into pieces of fixed length, whatever the batch, one program each (flash decoding; Dao et al. 2023), and a second launch
weighs the pieces. So a row's bits depend on nothing but the row. Pieces beyond a row's length read nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

SPLIT = 256
_LOG2_E = 1.4426950408889634


def splits(length: int) -> int:
    """How many pieces a cache of `length` positions is cut into."""
    return -(-length // SPLIT)


@triton.jit
def _attend_kernel(
    q, keys, values, positions, partial, lse, scale,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr, K_POSITION: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, V_POSITION: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_COLUMNS: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)  # offsets of heads and positions pass 2^31 in caches of long sequences
    piece = tl.program_id(2)
    own = tl.arange(0, ROWS)
    head = kv_head * GROUP + own
    key_column = tl.arange(0, KEY_COLUMNS)
    value_column = tl.arange(0, VALUE_COLUMNS)
    first = piece * SPLIT
    end = tl.minimum(first + SPLIT, tl.load(positions + row).to(tl.int32) + 1)
    q_inside = (own < GROUP)[:, None] & (key_column < KEY_DIM)[None, :]
    query = tl.load(q + row * Q_ROW + head[:, None] * Q_HEAD + key_column[None, :], mask=q_inside, other=0.0)
    largest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    result = tl.zeros([ROWS, VALUE_COLUMNS], dtype=tl.float32)
    for start in range(first, end, BLOCK):
        position = tl.arange(0, BLOCK).to(tl.int64) + start
        inside = position < end
        k_where = position[None, :] * K_POSITION + key_column[:, None]
        key = tl.load(keys + row * K_ROW + kv_head * K_HEAD + k_where, mask=inside[None, :] & (key_column < KEY_DIM)[:, None], other=0.0)
        v_where = position[:, None] * V_POSITION + value_column[None, :]
        value = tl.load(values + row * V_ROW + kv_head * V_HEAD + v_where, mask=inside[:, None] & (value_column < VALUE_DIM)[None, :], other=0.0)
        score = tl.where(inside[None, :], tl.dot(query, key) * scale, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, axis=1))
        keep = tl.exp2(largest - larger)
        weight = tl.exp2(score - larger[:, None])
        total = total * keep + tl.sum(weight, axis=1)
        result = result * keep[:, None] + tl.dot(weight.to(value.dtype), value)
        largest = larger
    some = total > 0
    result = tl.where(some[:, None], result / tl.where(some, total, 1.0)[:, None], 0.0)
    # a NaN among the scores must not pass for an empty piece
    log = tl.where(total == 0, float("-inf"), largest + tl.log2(tl.where(total == 0, 1.0, total)))
    result = tl.where((total == total)[:, None], result, float("nan"))
    where = (row * tl.num_programs(1) * GROUP + head) * tl.num_programs(2) + piece
    tl.store(lse + where, log, mask=own < GROUP)
    tl.store(partial + where[:, None] * VALUE_DIM + value_column[None, :], result, mask=(own < GROUP)[:, None] & (value_column < VALUE_DIM)[None, :])


@triton.jit
def _weigh_kernel(partial, lse, out, SPLITS: tl.constexpr, PIECES: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)  # of all rows
    piece = tl.arange(0, PIECES)
    column = tl.arange(0, VALUE_COLUMNS)
    log = tl.load(lse + head * SPLITS + piece, mask=piece < SPLITS, other=float("-inf"))
    weight = tl.exp2(log - tl.max(log, axis=0))
    inside = (piece < SPLITS)[:, None] & (column < VALUE_DIM)[None, :]
    part = tl.load(partial + (head * SPLITS + piece[:, None]) * VALUE_DIM + column[None, :], mask=inside, other=0.0)
    result = tl.sum(part * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out + head * VALUE_DIM + column, result.to(out.dtype.element_ty), mask=column < VALUE_DIM)


def attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *, scale: float, partial: Tensor, lse: Tensor, out: Tensor) -> None:
    """Softmax attention of each row's query over its positions `0..positions[b]`. Two launches, no allocation; the last dimensions are dense."""
    batch, Q_HEADs, key_dim = q.shape
    kv_heads, value_dim = keys.shape[1], values.shape[3]
    group, pieces = Q_HEADs // kv_heads, lse.shape[2]
    key_columns, columns = max(16, triton.next_power_of_2(key_dim)), max(16, triton.next_power_of_2(value_dim))
    _attend_kernel[(batch, kv_heads, pieces)](
        q, keys, values, positions, partial, lse, scale * _LOG2_E,
        *q.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), KEY_DIM=key_dim, KEY_COLUMNS=key_columns,
        VALUE_DIM=value_dim, VALUE_COLUMNS=columns, SPLIT=SPLIT, BLOCK=64 if key_columns <= 128 else 32, num_warps=4, num_stages=2,
    )  # fmt: skip
    _weigh_kernel[(batch * Q_HEADs,)](
        partial, lse, out, SPLITS=pieces, PIECES=triton.next_power_of_2(pieces), VALUE_DIM=value_dim, VALUE_COLUMNS=columns, num_warps=4
    )
