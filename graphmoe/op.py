"""One op for a layer's call, one for a block's: what `torch.compile` puts into its graph instead of looking inside.

    graphmoe::layer(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor(a!) out, SymInt runtime, SymInt layer) -> ()

    graphmoe::block(Tensor hidden, Tensor(a!) out, SymInt block) -> ()

It writes `out` and returns nothing, so that a compiler may reuse memory around it. A runtime is named by a number, given when it is built and of this
process alone: code that was saved by another finds nothing. Both numbers may be symbolic, so that one compiled function serves every layer.
(`Library.define` and `impl` cost about 2 microseconds a call, `torch.library.custom_op` ten times that.)
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from graphmoe.errors import RuntimeClosed

Call = Callable[[int, Tensor, Tensor, Tensor, Tensor], Any]

_LIBRARY = torch.library.Library("graphmoe", "DEF")
_LIBRARY.define("layer(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor(a!) out, SymInt runtime, SymInt layer) -> ()")
_LIBRARY.define("block(Tensor hidden, Tensor(a!) out, SymInt block) -> ()")
_numbers = itertools.count(secrets.randbits(60))
_callables: WeakValueDictionary[int, Any] = WeakValueDictionary()


def register(runtime: Any) -> int:
    """A number for a runtime's `call(layer, x, topk_ids, topk_weights, out)` or a block's `call(hidden, out)`; neither is kept alive."""
    number = next(_numbers)
    _callables[number] = runtime
    return number


def recorded(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None, runtime: int, layer: int) -> Tensor:
    """The call as the op, which a compiler records: into `out`, or into a tensor of its own."""
    result = x.new_empty(x.shape) if out is None else out
    torch.ops.graphmoe.layer(x, topk_ids, topk_weights, result, runtime, layer)
    return result


def recorded_block(hidden: Tensor, block: int) -> Tensor:
    """A block's call as the op, into a tensor of its own."""
    result = torch.empty_like(hidden)
    torch.ops.graphmoe.block(hidden, result, block)
    return result


def _layer(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor, runtime: int, layer: int) -> None:
    _found(runtime).call(layer, x, topk_ids, topk_weights, out)


def _block(hidden: Tensor, out: Tensor, block: int) -> None:
    _found(block).call(hidden, out)


def _found(number: int) -> Any:
    found = _callables.get(number)
    if found is None:
        raise RuntimeClosed("the runtime or block that this compiled code calls is gone; keep it for as long as the code, or compile anew")
    return found


def _fake(*arguments: Any) -> None:
    """Nothing to infer: it mutates `out`."""


for _name, _run in (("layer", _layer), ("block", _block)):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphmoe::{_name}", _fake, lib=_LIBRARY)
