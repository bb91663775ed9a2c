"""Enter graphmoe in the registries of Transformers."""

from __future__ import annotations

from collections.abc import Mapping

from graphmoe.buckets import BucketLadder
from graphmoe.decode.model import adapters
from graphmoe.errors import MissingBackend
from graphmoe.integrations.transformers import decoding, experts
from graphmoe.recipe import Recipe

NAME = "graphmoe"


def register(buckets: BucketLadder, path: Recipe | str | Mapping[int, Recipe | str]) -> None:
    """See `graphmoe.register_transformers`."""
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise MissingBackend(f"Transformers has no registry of experts implementations ({error}); pip install 'transformers>=5.17'") from error
    experts.settings = experts.Settings(buckets, path)
    for registry in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
        registry.register(NAME, experts.forward)
    ALL_ATTENTION_FUNCTIONS.register(decoding.ATTENTION, decoding.attention)
    if decoding.adapt not in adapters:
        adapters.append(decoding.adapt)
