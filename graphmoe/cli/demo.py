"""`graphmoe demo`: a small Qwen3-MoE decoded with a graph per batch size, held against the same model without graphs and without graphmoe."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import graphmoe
from graphmoe import bounds
from graphmoe.buckets import BucketLadder
from graphmoe.cli.console import make_console
from graphmoe.cli.demo_model import LAYERS, load_model, write_checkpoint
from graphmoe.cli.options import Buckets, PathWish
from graphmoe.cli.quiet import quiet_transformers
from graphmoe.decode import GraphedDecoder, Request
from graphmoe.device import resolve_device
from graphmoe.errors import InvalidInput
from graphmoe.report import count

_DEFAULT_TEXT = Path(bounds.__file__)
_LONGEST = 64
_LIMIT = 0.04
"""Of `_Distance.mean`: quantised activations gave 0.0004 to 0.0066, the least of a token's four experts left out 0.07, the first one 0.9."""


@dataclass(frozen=True)
class _Distance:
    """How far chosen tokens are from another model's first choice: by how much of its logits' standard deviation that one's logit is larger."""

    tokens: int
    same: int
    mean: float
    largest: float


def demo(
    text: Annotated[Path, typer.Option(help="a text file; its bytes are cut into prompts of growing length")] = _DEFAULT_TEXT,
    directory: Annotated[Path, typer.Option("--dir", help="where the small checkpoint is kept")] = Path("~/.cache/graphmoe/demo"),
    buckets: Buckets = "1,2,4,8,16,32",
    path: PathWish = "auto",
    device: Annotated[str, typer.Option(help="cuda or cpu; the GPU if there is one")] = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Decode pieces of a text with a small random FP8 Qwen3-MoE, each with as many new bytes as its prompt has, and check every byte."""
    console = make_console()
    where, ladder = resolve_device(device), BucketLadder.of(buckets)
    if where.type == "cpu":
        torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    prompts = _prompts(text, ladder.largest)
    quiet_transformers()
    graphmoe.register_transformers(path=path)
    folder = directory.expanduser() / f"qwen3-moe-{LAYERS}-layers"
    console.print(f"checkpoint {'written to' if write_checkpoint(folder) else 'found in'} {folder}")
    console.print(
        f"{count(len(prompts), 'prompt')} of {min(map(len, prompts))} to {max(map(len, prompts))} bytes from {text}, as many new bytes each"
    )
    if where.type == "cpu":
        console.print("no GPU in use: a step's recorded tensor operations stand in for its graph, torch twins for the kernels")
    model = load_model(folder, where, "graphmoe")
    decoder = GraphedDecoder(model, ladder, 2 * _LONGEST)
    answers = _answers(decoder, prompts)
    console.print(str(decoder.report()), end="")
    decoder.close()
    distance = _distance(load_model(folder, where, "eager"), prompts, answers)
    console.print(
        f"{distance.same} of {distance.tokens} new bytes are also the first choice of Transformers' own eager code in BF16, on the same weights; "
        "its logits prefer its\n"
        f"own choice by {distance.mean:.4f} of their standard deviation on average (limit {_LIMIT}), at most by {distance.largest:.2f}"
    )
    if answers != _answers(GraphedDecoder(model, ladder, 2 * _LONGEST, capture=False), prompts):
        console.print("MISMATCH: the same steps run without graphs gave other bytes", style="bold red")
        raise typer.Exit(1)
    if not distance.mean <= _LIMIT:
        console.print("MISMATCH: graphmoe and Transformers' own code disagree", style="bold red")
        raise typer.Exit(1)
    console.print("the same steps run without graphs gave the same bytes; every check has passed")


def _prompts(text: Path, most: int) -> list[bytes]:
    """Consecutive pieces of the text, each longer than the last, so that they finish at different steps."""
    try:
        rest = text.expanduser().read_bytes()
    except OSError as error:
        raise InvalidInput(f"--text {text} cannot be read: {error}") from error
    for longest in range(_LONGEST, 0, -1):
        ends = [0, *accumulate(max(1, longest * (index + 1) // most) for index in range(most))]
        if ends[-1] <= len(rest):
            return [rest[first:last] for first, last in pairwise(ends)]
    raise InvalidInput(f"--text {text} has {len(rest)} bytes, {most} prompts need at least one each; give a longer text or smaller buckets")


def _answers(decoder: GraphedDecoder, prompts: list[bytes]) -> list[list[int]]:
    """As many new bytes as each prompt has; short ones leave first, so that the batch shrinks through the buckets."""
    answers: list[list[int]] = [[] for _ in prompts]
    for done in decoder.serve([Request(prompt, len(prompt)) for prompt in prompts]):
        if done.error is not None:
            raise done.error
        answers[done.index] = done.tokens
    return answers


def _distance(model: Any, prompts: list[bytes], answers: list[list[int]]) -> _Distance:
    """Of all answers, each judged at once: the model reads prompt and answer, and its logits at every place say what it would have chosen there."""
    gaps = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([[*prompt, *answer]], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        gaps.append((logits.amax(1) - chosen) / logits.std(1))
    gap = torch.cat(gaps)
    return _Distance(len(gap), int((gap == 0).sum()), float(gap.mean()), float(gap.max()))
