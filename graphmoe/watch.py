"""Weights that move: a graph knows the addresses it was captured with, so what lies there must still be what the user means."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from graphmoe.errors import WeightsMismatch
from graphmoe.weights import ExpertWeights


@dataclass
class _Watched:
    name: str
    tensor: Callable[[], Tensor | None]
    pointer: int
    version: int | None
    """Of a tensor that the runtime holds a copy of; what it uses itself may change in place."""


class WeightWatch:
    """Watches one layer's weights; `check` is a few comparisons of integers. Sources of copies are not kept alive.

    Args:
        layer: its index, for messages.
        given: the weights that the runtime was given.
        used: what its kernels read: the same memory, or copies on another device or in another layout.
    """

    def __init__(self, layer: int, given: ExpertWeights, used: ExpertWeights) -> None:
        self._layer = layer
        self._given = weakref.ref(given)
        self._used = used
        copies = used.tensors()
        self._copied = {name for name, tensor in given.tensors().items() if copies[name].data_ptr() != tensor.data_ptr()}
        self._watched = [self._watch(name, tensor) for source in (given.tensors(), given.origins) for name, tensor in source.items()]

    def check(self) -> None:
        """Raise unless every weight lies where it lay, and every copy is of what its source still holds.

        Raises:
            WeightsMismatch: a storage that was replaced or freed, or a source that changed; the message names the layer and the way out.
        """
        self._check_places()
        for one in self._watched:
            tensor = None if one.version is None else one.tensor()
            if tensor is not None and tensor._version != one.version:
                raise WeightsMismatch(
                    f"layer {self._layer}: {one.name} was changed in place, but this runtime holds a copy of it; call rt.refresh({self._layer})"
                )

    def refresh(self, arch: str) -> None:
        """Bring the copies up to what their sources hold now, in place.

        Raises:
            WeightsMismatch: a storage that was replaced or freed, or a source that is gone.
        """
        self._check_places()
        if not self._copied:
            return
        given = self._given()
        if given is None:
            raise WeightsMismatch(f"layer {self._layer}: the weights that this runtime copied are gone; call rt.rebind(...) with new ones")
        renewed, copies = given.prepared(arch).tensors(), self._used.tensors()
        for name in self._copied:
            copies[name].copy_(renewed[name])
        for one in self._watched:
            tensor = one.tensor()
            one.version = None if tensor is None else self._version(one.name, tensor)

    def _check_places(self) -> None:
        for one in self._watched:
            tensor = one.tensor()
            if tensor is not None and tensor.data_ptr() != one.pointer:
                raise WeightsMismatch(
                    f"layer {self._layer}: {one.name} has moved from {one.pointer:#x} to {tensor.data_ptr():#x} since it was captured (replaced, "
                    "reloaded or freed); call rt.rebind(...) with the new weights, or update them in place"
                )

    def _watch(self, name: str, tensor: Tensor) -> _Watched:
        reference = weakref.ref(tensor) if name in self._copied else lambda: tensor
        return _Watched(name, reference, tensor.data_ptr(), self._version(name, tensor))

    def _version(self, name: str, tensor: Tensor) -> int | None:
        # Inference tensors count no versions.
        return tensor._version if name in self._copied and not tensor.is_inference() else None
