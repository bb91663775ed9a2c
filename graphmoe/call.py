"""What a call's tensors must be, checked before anything is launched; errors name the numbers and the way out."""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.arena import Arena
from graphmoe.build import Bucket
from graphmoe.errors import InvalidInput
from graphmoe.spec import MoESpec


def check_call(spec: MoESpec, device: torch.device, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None) -> int:
    """The number of tokens of a call, or InvalidInput. See `MoERuntime.__call__` for what each tensor must be."""
    h, k = spec.hidden_size, spec.top_k
    for name, given in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights), ("out", x if out is None else out)):
        if not isinstance(given, Tensor):
            raise InvalidInput(f"{name} is a {type(given).__name__}, expected a torch.Tensor")
    if x.dim() != 2 or x.shape[1] != h:
        raise InvalidInput(f"x is {tuple(x.shape)}, expected [t, {h}] (hidden_size)")
    tokens = x.shape[0]
    _check_tensor("x", x, (tokens, h), (torch.bfloat16,), device)
    _check_tensor("topk_ids", topk_ids, (tokens, k), (torch.int32, torch.int64), device)
    _check_tensor("topk_weights", topk_weights, (tokens, k), (torch.float32,), device)
    if x.stride(1) != 1 and h > 1 and tokens > 0:
        raise InvalidInput(f"x has column stride {x.stride(1)}; pass x.contiguous()")
    if out is not None:
        _check_tensor("out", out, (tokens, h), (torch.bfloat16,), device)
        if tokens > 0 and ((out.stride(1) != 1 and h > 1) or (out.stride(0) < h and tokens > 1)):
            raise InvalidInput(f"out has strides {out.stride()}, expected rows apart from each other with a unit column stride")
        if out.is_inference() and not torch.is_inference_mode_enabled():
            raise InvalidInput("out was made in inference mode and cannot be written outside of it; call inside torch.inference_mode(), or clone it")
    return tokens


def refuse_shifted_overlap(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor) -> None:
    """Chunks are written while later ones are still to be read: `out` may be `x` itself or apart from every input, not another view of its memory."""
    for name, given in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        same = name == "x" and x.data_ptr() == out.data_ptr() and x.stride() == out.stride()
        if not same and _meet(given, out):
            raise InvalidInput(
                f"out overlaps {name} without being it: a chunked call would overwrite tokens that it has not read yet; pass a separate out"
            )


def refuse_lent_memory(
    arena: Arena, largest: Bucket, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None, *, chunked: bool
) -> None:
    """A call copies its inputs to the static buffers while it reads them: an input may be the static buffer itself or lie apart from it, not be
    another view of its memory. The same holds for `out` and `y`. Any rows of `y` may be passed as an input, unless later chunks would read them after
    earlier ones overwrote them.
    """
    static = largest.inputs
    written = (static.x, static.topk_ids, static.topk_weights)
    for name, given, buffer in (
        ("x", x, static.x),
        ("topk_ids", topk_ids, static.topk_ids),
        ("topk_weights", topk_weights, static.topk_weights),
        ("out", out, largest.y),
    ):
        if given is None or not arena.base <= given.data_ptr() < arena.base + arena.nbytes:
            continue
        itself = not chunked and given.data_ptr() == buffer.data_ptr() and given.dtype == buffer.dtype and given.stride() == buffer.stride()
        others = (*written, largest.y) if chunked else (largest.y,) if name == "out" else written
        if not itself and any(_meet(given, other) for other in others):
            raise InvalidInput(f"{name} is a view of the runtime's own buffers that the call writes while it reads it; pass {name}.clone()")


def _meet(one: Tensor, other: Tensor) -> bool:
    first, last = _extent(one)
    other_first, other_last = _extent(other)
    return first < other_last and other_first < last


def _extent(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, int], dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if tuple(tensor.shape) != shape:
        what = "[t, hidden_size]" if name in ("x", "out") else "[t, top_k]"
        raise InvalidInput(f"{name} is {tuple(tensor.shape)}, expected {shape}: {what}, and t is the number of x's rows")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        remedy = "pass a tensor of it" if name == "out" else f"pass {name}.to({dtypes[-1]})"
        raise InvalidInput(f"{name} is {tensor.dtype}, expected {wanted}; {remedy}")
    if tensor.device != device:
        raise InvalidInput(f"{name} is on {tensor.device}, the runtime on {device}; move it with .to({str(device)!r})")
