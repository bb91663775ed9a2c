"""The sticky flag of broken promises: set on the device by `route`, watched from the host without a synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor


class StickyFlag:
    """Watches one int32 on the device.

    `poll` enqueues a 4-byte copy to pinned memory whenever the previous copy has arrived, and says once when a copy shows the flag raised.
    """

    def __init__(self, flag: Tensor) -> None:
        self._flag = flag
        self._host = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=flag.is_cuda)
        self._arrived = torch.cuda.Event() if flag.is_cuda else None
        self._in_flight = False
        self._seen = False

    def poll(self, stream: torch.cuda.Stream | None = None) -> bool:
        """Look at the last copy and start the next on `stream`; never waits. Returns whether the flag is newly seen raised."""
        if self._arrived is None:
            self._host.copy_(self._flag)
            return self._newly_raised()
        if self._in_flight and not self._arrived.query():
            return False
        raised = self._in_flight and self._newly_raised()
        self._host.copy_(self._flag, non_blocking=True)
        self._arrived.record(stream)
        self._in_flight = True
        return raised

    def read(self) -> bool:
        """The flag now. Waits for the device."""
        return bool(self._flag.item())

    def clear(self) -> None:
        """Lower the flag, so that the next broken promise is seen again."""
        if self._arrived is not None and self._in_flight:
            self._arrived.synchronize()
        self._flag.zero_()
        self._host.zero_()
        self._in_flight = self._seen = False

    def _newly_raised(self) -> bool:
        raised = not self._seen and bool(self._host[0])
        self._seen = self._seen or raised
        return raised
