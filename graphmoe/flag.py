"""The sticky flag of broken promises: set on the device by `route`, watched from the host without a synchronisation."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from graphmoe.errors import BrokenPromise


class StickyFlag:
    """Watches one int32 on the device.

    `poll` enqueues a 4-byte copy to pinned memory whenever the previous copy has arrived, and warns once when a copy shows the flag raised.
    """

    def __init__(self, flag: Tensor) -> None:
        self._flag = flag
        self._host = torch.zeros(1, dtype=torch.int32, pin_memory=flag.is_cuda)
        self._arrived = torch.cuda.Event() if flag.is_cuda else None
        self._in_flight = False
        self._warned = False

    def poll(self, stream: torch.cuda.Stream | None = None) -> None:
        """Look at the last copy and start the next on `stream`, the current one; never waits."""
        if self._arrived is None:
            self._host.copy_(self._flag)
            self._warn()
            return
        if self._in_flight and not self._arrived.query():
            return
        if self._in_flight:
            self._warn()
        self._host.copy_(self._flag, non_blocking=True)
        self._arrived.record(stream)
        self._in_flight = True

    def read(self) -> bool:
        """The flag now. Waits for the device."""
        return bool(self._flag.item())

    def clear(self) -> None:
        """Lower the flag, so that the next broken promise warns again."""
        if self._arrived is not None and self._in_flight:
            self._arrived.synchronize()
        self._flag.zero_()
        self._host.zero_()
        self._in_flight = self._warned = False

    def _warn(self) -> None:
        if self._warned or not int(self._host[0]):
            return
        self._warned = True
        warnings.warn(
            BrokenPromise(
                "a token named one expert twice although the spec promises distinct_topk (NaN router logits do that); "
                "its output is NaN. Fix the router, or build with distinct_topk=False; rt.clear_flag() re-arms this warning"
            ),
            stacklevel=4,
        )
