"""A CUDA graph's stand-in on a CPU: what a function did to tensors is recorded once, and that is what runs again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphmoe.errors import CaptureError

_EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")


@dataclass(frozen=True)
class _Op:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Any, ...]


class Recording(TorchDispatchMode):
    """Runs a function once and records its ATen ops with the tensors they read and wrote; `replay` runs those ops on those tensors.

    As in a CUDA graph, tensors keep their addresses and Python does not run again: numbers and branches are what they were.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        """Raises CaptureError: the function reads a value back to the host, which no graph can."""
        super().__init__()
        self._ops: list[_Op] = []
        with self:
            self._returned = run()

    def __len__(self) -> int:
        return len(self._ops)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _reads_back(func, args):
            raise CaptureError(f"the step reads a tensor's value on the host ({func}); a graph replays without the host and cannot")
        result = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        results = tuple(tree_leaves(result))
        storages = {leaf.untyped_storage()._cdata for leaf in inputs}
        only_views = not func._schema.is_mutable and all(isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in storages for leaf in results)
        if not only_views and func._schema.name not in _EMPTY:
            self._ops.append(_Op(func, args, kwargs, results))
        else:
            self._ops.append(_Op(None, (), {}, results))  # keeps the storage
        return result

    def replay(self) -> Any:
        """Run the recorded ops again, results going where they went; returns what the function returned."""
        with torch.no_grad():
            for op in self._ops:
                if op.func is None:
                    continue
                again = tree_leaves(op.func(*op.args, **op.kwargs))
                for old, new in zip(op.results, again, strict=True):
                    if isinstance(old, Tensor) and new is not old and new.data_ptr() != old.data_ptr():
                        old.copy_(new)
        return self._returned


def _reads_back(func: Any, args: tuple[Any, ...]) -> bool:
    if func._schema.name == "aten::index":  # its shape depends on data only under a mask
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
