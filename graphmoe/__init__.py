"""graphmoe: a CUDA-graph-first, static-shape execution layer for Mixture-of-Experts inference."""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from graphmoe import bounds, errors
from graphmoe.block import MoEBlock, SharedExperts
from graphmoe.buckets import BucketLadder
from graphmoe.decode import GraphedDecoder, Request
from graphmoe.integrations import register_transformers
from graphmoe.planner import Plan, plan
from graphmoe.recipe import Recipe
from graphmoe.report import RuntimeReport
from graphmoe.router import Router
from graphmoe.runtime import MoELayer, MoERuntime, StaticInputs
from graphmoe.spec import MoESpec, model_names, named_spec
from graphmoe.weights import ExpertWeights

try:
    __version__ = _version("graphmoe")
except _PackageNotFoundError:  # running from a source tree that was not installed
    __version__ = "0+unknown"

__all__ = [
    "BucketLadder",
    "ExpertWeights",
    "GraphedDecoder",
    "MoEBlock",
    "MoELayer",
    "MoERuntime",
    "MoESpec",
    "Plan",
    "Recipe",
    "Request",
    "Router",
    "RuntimeReport",
    "SharedExperts",
    "StaticInputs",
    "__version__",
    "bounds",
    "errors",
    "model_names",
    "named_spec",
    "plan",
    "register_transformers",
]
