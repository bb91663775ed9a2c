"""graphmoe inside other libraries. Each is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from graphmoe.buckets import BucketLadder
from graphmoe.recipe import Recipe


def register_transformers(buckets: BucketLadder | str | Iterable[int] = "vllm", *, path: Recipe | str | Mapping[int, Recipe | str] = "auto") -> None:
    """Make `experts_implementation="graphmoe"` known to Hugging Face Transformers (5.17 or newer), for BF16 and for block-FP8 models, and let
    `GraphedDecoder` take its models.

    The experts of every layer run on one arena a model; shared experts and routers stay the model's own. Weights are used where they are. Experts
    that graphmoe does not compute (biases, transposed or interleaved weights, a gate function of the model's own, another dtype) run in
    Transformers' own eager code, and a warning says so once. Calling it again changes the settings of models that have not run yet.

    Args:
        buckets: batch sizes (tokens of a forward pass) that are planned; larger ones run in pieces of the largest.
        path: see `MoERuntime`.

    Raises:
        MissingBackend: Transformers is absent or older.
    """
    from graphmoe.integrations.transformers import register

    register(BucketLadder.of(buckets, "chunk"), path)
