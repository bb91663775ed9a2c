"""What the subcommands share of their options: names of formats and paths, and errors in the words of the command line."""

from __future__ import annotations

import math
import re
from typing import Annotated

import typer

from graphmoe.errors import SpecError
from graphmoe.formats import FORMATS, get_format
from graphmoe.paths import PATHS
from graphmoe.recipe import Recipe
from graphmoe.spec import MoESpec, model_names, named_spec

FORMAT_HELP = f"one of: {', '.join(FORMATS)} (fp8 is short for fp8_block)"
MODEL_HELP = f"one of: {', '.join(model_names())}; or a layer's sizes: E=160,K=8,H=5120,I=1536"
PATH_HELP = f"auto, or one of: {', '.join(PATHS)}; with options: psum:block_e=128"

Model = Annotated[str, typer.Option(help=MODEL_HELP)]
Tp = Annotated[int, typer.Option(help="tensor-parallel ranks that split the intermediate size")]
Ep = Annotated[int, typer.Option(help="expert-parallel ranks that split the experts")]
Buckets = Annotated[str, typer.Option(help="a preset (vllm, sglang) or sizes like 1,2,4")]
WeightFormat = Annotated[str, typer.Option("--format", help=FORMAT_HELP)]
PathWish = Annotated[str, typer.Option("--path", help=PATH_HELP)]
"""Options that several subcommands share."""

_SHORT = {"fp8": "fp8_block"}
_KEYWORDS = {"path": "--path", "fmt": "--format", "device": "--device", "tp": "--tp", "ep": "--ep"}


def format_name(text: str) -> str:
    """The registered name of a format given on the command line.

    Raises:
        UnsupportedShape: an unknown format.
    """
    return get_format(_SHORT.get(text, text)).name


def model_spec(model: str) -> MoESpec:
    """A named model's layer, or the one whose sizes are given: `E=160,K=8,H=5120,I=1536`.

    Raises:
        SpecError: an unknown name, or sizes that are not these four.
    """
    if "=" not in model:
        return named_spec(model)
    whole = re.fullmatch(r"[EKHI]=[0-9]{1,9}(,[EKHI]=[0-9]{1,9}){3}", model)
    sizes = dict(part.split("=") for part in model.split(",")) if whole else {}
    if len(sizes) != 4:
        raise SpecError(f"a layer's sizes are given as E=160,K=8,H=5120,I=1536 (experts, experts a token, hidden, intermediate), not {model!r}")
    experts, top_k, hidden, intermediate = (int(sizes[name]) for name in "EKHI")
    return MoESpec(experts, top_k, hidden, intermediate)


def sharded(model: str, tp: int, ep: int, fmt: str) -> MoESpec:
    """A model's layer as one rank stores it: whole scale blocks of the format."""
    return model_spec(model).shard(tp=tp, ep=ep, block=get_format(fmt).divisor)


def short(recipe: Recipe) -> str:
    """A recipe in a table's cell: with its option if it has one, without them if it has many."""
    return str(recipe) if len(recipe.options) == 1 else recipe.path


def in_options(message: str) -> str:
    """An error's message with the keywords of the library as the options that set them: `path='psum'` -> `--path psum`."""
    message = re.sub(r"\b(path|fmt|device)='([\w:]+)'", lambda found: f"{_KEYWORDS[found[1]]} {found[2]}", message)
    message = re.sub(r"\bweights\.requantize\('(\w+)'\)", r"--format \1", message)
    message = re.sub(r"\b(tp|ep)=(-?\d+)", lambda found: f"{_KEYWORDS[found[1]]} {found[2]}", message)
    message = re.sub(r"max_arena_bytes must be at least (\d+)", lambda found: f"--max-arena-gib must be at least {_gib(int(found[1]))}", message)
    return message.replace("max_arena_bytes", "--max-arena-gib").replace("clip_search", "--clip-search")


def _gib(nbytes: int) -> str:
    """Rounded up, so that it is enough."""
    return f"{math.ceil(nbytes / 2**30 * 1000) / 1000:g}"
