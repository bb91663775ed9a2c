"""Whether a model is still what its captured steps were captured from."""

from __future__ import annotations

from torch import Tensor, nn


class Snapshot:
    """Where a model's tensors lie, which modules it is made of, and what would run in Python beside them.

    A replay reads tensors where they were and runs no Python, prefill does run it: a model that has changed would be two models. Values may change
    in place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = [(name, module, module.training, _hooks(module)) for name, module in model.named_modules()]
        self._children = [
            (_under(name, key), module._modules, key, child) for name, module, *_ in self._modules for key, child in module._modules.items()
        ]
        self._tensors = [
            (_under(name, key), held, key, tensor, tensor.data_ptr())
            for name, module, *_ in self._modules
            for held in (module._parameters, module._buffers)
            for key, tensor in held.items()
            if isinstance(tensor, Tensor)
        ]
        self._experts = getattr(model.config, "_experts_implementation", None)

    def complaint(self) -> str | None:
        """What has changed since, or None."""
        moved = [name for name, held, key, tensor, place in self._tensors if held.get(key) is not tensor or tensor.data_ptr() != place]
        if moved:
            return f"{len(moved)} weights were replaced or moved ({moved[0]})"
        replaced = [name for name, held, key, child in self._children if held.get(key) is not child]
        if replaced or sum(len(module._modules) for _, module, *_ in self._modules) != len(self._children):
            return f"modules were replaced or added{f' ({replaced[0]})' if replaced else ''}"
        for name, module, training, hooks in self._modules:
            if module.training != training:
                return f"{name or 'the model'} is in {'training' if module.training else 'inference'} mode now"
            if _hooks(module) != hooks:
                return f"hooks of {name or 'the model'} were added or removed"
        experts = getattr(self._model.config, "_experts_implementation", None)
        return None if experts == self._experts else f"its experts run in {experts!r} now, not in {self._experts!r}"


def _under(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _hooks(module: nn.Module) -> int:
    """Forward hooks, but those that Transformers registers to hand out hidden states: they change nothing."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return sum(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)
