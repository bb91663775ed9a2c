"""Select experts: a router's logits into each token's experts and weights, one launch.

logits f32 or bf16 [T, E_global]    bias f32 [E_global] or none    topk_ids int32 [T, K]    topk_weights f32 [T, K]

One program a token, its experts as a block [groups, experts of a group]. The best is taken and struck out, K times. A token whose scores hold NaN
(logits that are not finite) names expert 0 in every slot, with weights of NaN: whatever reads that, no plausible number comes out.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.router import Router

_TINY = tl.constexpr(1e-20)
_NONE = tl.constexpr(2147483647)


@triton.jit
def _max_of(values):
    return tl.max(tl.max(values, axis=1), axis=0)


@triton.jit
def _first_of(found, number):
    """The lowest number among those found."""
    return tl.min(tl.min(tl.where(found, number, _NONE), axis=1), axis=0)


@triton.jit
def _keep_groups(choice, number, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr):
    """The choice without the groups whose two best are not among the largest."""
    group = tl.arange(0, PADDED_GROUPS)
    best = tl.max(choice, axis=1)
    at = tl.min(tl.where(choice == best[:, None], number, _NONE), axis=1)
    second = tl.max(tl.where(number == at[:, None], float("-inf"), choice), axis=1)
    left = tl.where(group < GROUPS, best + second, float("-inf"))
    kept = group < 0
    for _ in range(TOP_GROUPS):
        first = tl.min(tl.where((left == tl.max(left, axis=0)) & (group < GROUPS) & ~kept, group, _NONE), axis=0)
        kept = kept | (group == first)
        left = tl.where(group == first, float("-inf"), left)
    return tl.where(kept[:, None], choice, float("-inf"))


@triton.jit
def _select_experts_kernel(
    logits, row_stride, bias, topk_ids, topk_weights,
    OFFSET: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr, SOFTMAX: tl.constexpr, BIASED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, PADDED_GROUPS)[:, None]
    member = tl.arange(0, PADDED_SIZE)[None, :]
    number = group * SIZE + member
    inside = (group < GROUPS) & (member < SIZE)
    value = tl.load(logits + token * row_stride + number, mask=inside, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        score = tl.exp(value - _max_of(tl.where(value == value, value, float("-inf"))))
        score = score / tl.sum(tl.sum(tl.where(inside, score, 0.0), axis=1), axis=0)
    else:
        score = 1.0 / (1.0 + tl.exp(-value))
    choice = score
    if BIASED:
        choice = score + tl.load(bias + number, mask=inside, other=0.0)
    bad = tl.max(tl.max((inside & (choice != choice)).to(tl.int32), axis=1), axis=0) > 0
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        choice = _keep_groups(choice, number, GROUPS, TOP_GROUPS, PADDED_GROUPS)
    slot = tl.arange(0, SLOTS)
    ids = tl.full([SLOTS], -1, dtype=tl.int32)
    weights = tl.zeros([SLOTS], dtype=tl.float32)
    for k in range(TOP_K):
        best = _max_of(choice)
        chosen = _first_of((choice == best) & (choice > float("-inf")), number)  # _NONE where none is left
        weight = tl.sum(tl.sum(tl.where(number == chosen, score, 0.0), axis=1), axis=0)
        weights = tl.where(slot == k, weight, weights)
        local = chosen - OFFSET
        ids = tl.where((slot == k) & (local >= 0) & (local < EXPERTS), local, ids)
        choice = tl.where(number == chosen, float("-inf"), choice)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + _TINY)
    ids = tl.where(bad, 0 if OFFSET == 0 else -1, ids)
    weights = tl.where(bad, float("nan"), weights)
    tl.store(topk_ids + token * TOP_K + slot, ids, mask=slot < TOP_K)
    tl.store(topk_weights + token * TOP_K + slot, weights, mask=slot < TOP_K)


def select_experts(
    logits: Tensor, correction_bias: Tensor | None, router: Router, *, offset: int, experts: int, topk_ids: Tensor, topk_weights: Tensor
) -> None:
    """Each token's experts as local ids (-1: of another rank) and weights, see `graphmoe.router.Router`. One launch, no allocation.

    Args:
        logits: float32 or bf16 `[T, num_experts]` with a unit column stride.
        correction_bias: float32 `[num_experts]` or None.
        router: the choice.
        offset: first expert of this rank.
        experts: experts of this rank.
        topk_ids: int32 `[T, K]`, dense.
        topk_weights: float32 `[T, K]`, dense.
    """
    if logits.shape[0] == 0:
        return
    padded_groups, padded_size = triton.next_power_of_2(router.groups), triton.next_power_of_2(router.group_size)
    _select_experts_kernel[(logits.shape[0],)](
        logits, logits.stride(0), topk_weights if correction_bias is None else correction_bias, topk_ids, topk_weights,
        OFFSET=offset, EXPERTS=experts, TOP_K=router.top_k, SLOTS=triton.next_power_of_2(router.top_k), GROUPS=router.groups,
        TOP_GROUPS=router.top_groups, SIZE=router.group_size, PADDED_GROUPS=padded_groups, PADDED_SIZE=padded_size,
        SOFTMAX=router.scoring == "softmax", BIASED=correction_bias is not None, RENORMALIZE=router.renormalize,
        num_warps=1 if padded_groups * padded_size <= 256 else 4,
    )  # fmt: skip
