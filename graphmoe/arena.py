"""One allocation for every buffer of every bucket and layer; views of it, poison for tests, guard bands for verification."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from graphmoe.planner import BucketPlan, PlacedBuffer, Plan

GUARD_BYTE = 0xFF


class Arena:
    """The one `torch.empty` of a runtime.

    Views are handed out until `seal()`; from then on the layout is what graphs were captured with.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self._bytes = torch.empty(plan.arena_bytes, dtype=torch.uint8, device=device)
        assert self._bytes.data_ptr() % 16 == 0
        self._sealed = False

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    @property
    def base(self) -> int:
        """Device address of byte 0."""
        return self._bytes.data_ptr()

    def view(self, buffer: PlacedBuffer, tokens: int | None = None) -> Tensor:
        """The buffer as a tensor; with `tokens`, its first `tokens` rows (static buffers are sized for the largest bucket)."""
        if self._sealed:
            raise RuntimeError(f"the arena is sealed: no view of {buffer.name!r} after build")
        dtype = getattr(torch, buffer.dtype)
        whole = self._bytes[buffer.offset : buffer.offset + buffer.nbytes].view(dtype).view(buffer.shape)
        return whole if tokens is None else whole[:tokens]

    def seal(self) -> None:
        self._sealed = True

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory until what this stream has been given is done, should the arena be dropped before."""
        self._bytes.record_stream(stream)

    def poison(self, word: int) -> None:
        """Fill all scratch with a 32-bit word (0x7FC00000, -1, 0x7FFFFFFF, ...); static inputs, output and flag keep their values."""
        self._bytes[self.plan.static_bytes :].view(torch.int32).fill_(word)

    def fill_guards(self, bucket: BucketPlan) -> None:
        """Write the guard byte behind every buffer of this bucket."""
        for guard in self._guards((*self.plan.static, *bucket.buffers)):
            self._bytes[guard].fill_(GUARD_BYTE)

    def broken_guards(self, bucket: BucketPlan) -> list[str]:
        """Names of this bucket's buffers whose guard band was written since `fill_guards`. Synchronises."""
        buffers = (*self.plan.static, *bucket.buffers)
        return [
            buffer.name for buffer, guard in zip(buffers, self._guards(buffers), strict=True) if not bool((self._bytes[guard] == GUARD_BYTE).all())
        ]

    def _guards(self, buffers: Iterable[PlacedBuffer]) -> list[slice]:
        ends = [buffer.offset + buffer.nbytes for buffer in buffers]
        return [slice(end, end + self.plan.guard_bytes) for end in ends]
