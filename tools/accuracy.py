"""What weight formats cost a model: a small MoE is trained on real text here, and its perplexity is measured in every format.

    python -m tools.accuracy --minutes 5 --json tools/bench/accuracy.json

No published model is within reach of every machine, and random weights have no perplexity. So this trains a byte-level Qwen3-MoE (dense attention,
16 experts) on the documentation strings and comments of Python's own library, keeps every tenth file for the test, and runs the test through
graphmoe's experts in each format: the same router, attention and head. On a CPU the kernels' torch twins run.

`w4afp8` is measured with a scale per token and 128 columns, and with one scale a GEMM, as its checkpoints have it, calibrated as the largest value
that 16 pieces of the training text bring.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import graphmoe
from graphmoe.cli.console import make_console
from graphmoe.cli.quiet import quiet_transformers
from graphmoe.formats.fp8_block import E4M3_MAX
from graphmoe.integrations.transformers import experts, quantize_experts
from graphmoe.provenance import provenance, version_of

LENGTH, BATCH, EVERY = 256, 12, 25
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True, "max_position_embeddings": 2 * LENGTH,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": True,
}  # fmt: skip
CONFIGURATIONS = (
    ("BF16", "bf16", "auto"),
    ("FP8, 128x128 blocks", "fp8_block", "psum"),
    ("UE8M0", "ue8m0", "psum"),
    ("W4AFP8, a scale per token and group", "w4afp8", "gathered_w4"),
    ("W4AFP8, one scale a GEMM", "w4afp8", "gathered_w4:per_tensor=1"),
)
"""Name, format, path."""


def corpus() -> tuple[Tensor, Tensor]:
    """Bytes of the prose in Python's library, int64: (train, test). A file is in one of them."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, file in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        parts[number % 10 == 0].append("\n".join(_prose(file)).encode())
    train, test = (torch.frombuffer(bytearray(b"\n\n".join(part)), dtype=torch.uint8).long() for part in parts)
    return train, test


def _prose(file: Path) -> Iterator[str]:
    """Comments, and strings of several lines, of a source file."""
    with file.open("rb") as source:
        try:
            for token in tokenize.tokenize(source.readline):
                if token.type == tokenize.COMMENT:
                    yield token.string.lstrip("# ")
                elif token.type == tokenize.STRING and "\n" in token.string:
                    yield token.string.strip("'\"rRbBuU")
        except (tokenize.TokenError, SyntaxError, UnicodeDecodeError):
            return


def pieces(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """int64 `[count, LENGTH + 1]`, from anywhere in the text."""
    first = torch.randint(0, len(text) - LENGTH - 1, (count, 1), generator=generator)
    return text[first + torch.arange(LENGTH + 1)]


def train(model: Any, text: Tensor, minutes: float, device: torch.device) -> list[tuple[float, float]]:
    """Train for so long (a second a step on two cores); returns (minutes, loss) along the way."""
    generator, started, seen, losses = torch.Generator().manual_seed(1), time.monotonic(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    while (part := (time.monotonic() - started) / 60 / minutes) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, part / 0.02) * (0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * part)))
        batch = pieces(text, BATCH, generator).to(device)
        loss = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % EVERY == 0:
            seen.append((part * minutes, sum(losses[-EVERY:]) / EVERY))
            print(f"{seen[-1][0]:6.2f} min, step {len(losses)}: loss {seen[-1][1]:.3f}", flush=True)
    return seen


def loss_of(model: Any, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch[:, :-1]).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def perplexity(model: Any, batches: list[Tensor]) -> float:
    """Per byte, over the test pieces."""
    with torch.no_grad():
        return math.exp(sum(float(loss_of(model, batch)) for batch in batches) / len(batches))


@contextmanager
def calibrated(model: Any) -> Iterator[dict[Any, list[float]]]:
    """Within it, Transformers' own experts record the largest token value and SwiGLU result of each layer."""
    largest: dict[Any, list[float]] = {}
    layers = [module for module in model.modules() if experts.is_experts(module)]
    undo = []
    for layer in layers:
        seen = largest[layer] = [0.0, 0.0]

        def before(module: Any, given: Any, seen: list[float] = seen) -> None:
            seen[0] = max(seen[0], float(given[0].abs().max()))

        def gated(gate_up: Tensor, gate: Any = layer._apply_gate, seen: list[float] = seen) -> Tensor:
            out = gate(gate_up)
            seen[1] = max(seen[1], float(out.abs().max()) if out.numel() else 0.0)
            return out

        undo.append(layer.register_forward_pre_hook(before))
        layer._apply_gate = gated
    try:
        yield largest
    finally:
        for layer, hook in zip(layers, undo, strict=True):
            hook.remove()
            del layer._apply_gate


def measured(trained: Any, fmt: str, path: str, calibration: list[Tensor], test: list[Tensor]) -> float:
    """Perplexity of a copy of the model whose experts run in a format."""
    quiet = quiet_transformers()
    model = quiet.Qwen3MoeForCausalLM(quiet.Qwen3MoeConfig(**SIZES)).to(test[0].device, torch.bfloat16).eval()
    model.load_state_dict(trained.state_dict())
    graphmoe.register_transformers([LENGTH * len(test[0])], path=path)
    if fmt != "bf16":
        model.set_experts_implementation("grouped_mm")  # which calls `_apply_gate`
        with calibrated(model) as largest, torch.no_grad():
            for batch in calibration:
                model(input_ids=batch[:, :-1])
        model.set_experts_implementation("graphmoe")
        quantize_experts(model, fmt)
        for layer, (token, result) in largest.items():
            if fmt == "w4afp8":
                layer.gate_up_proj_input_scale, layer.down_proj_input_scale = (
                    torch.tensor(value / E4M3_MAX, device=test[0].device) for value in (token, result)
                )
    model.set_experts_implementation("graphmoe")
    return perplexity(model, test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of training")
    parser.add_argument("--pieces", type=int, default=96, help="of test text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, library = torch.device(options.device), quiet_transformers()
    text, held_out = corpus()
    torch.manual_seed(0)
    model = library.Qwen3MoeForCausalLM(library.Qwen3MoeConfig(**SIZES)).to(device)
    model.set_experts_implementation("grouped_mm" if device.type == "cuda" else "eager")
    curve = train(model, text, options.minutes, device)
    generator = torch.Generator().manual_seed(2)
    test = list(pieces(held_out, options.pieces, generator).to(device).split(8))
    calibration = list(pieces(text, 16, generator).to(device).split(8))
    model.eval()
    rows = [("float32, as trained", perplexity(model, test))]
    rows += [(name, measured(model, fmt, path, calibration, test)) for name, fmt, path in CONFIGURATIONS]
    table = Table(
        title=f"{len(text)} bytes of text, loss {curve[-1][1]:.3f} at the end; test: {options.pieces} pieces of {LENGTH} bytes of other files"
    )
    for column in ("experts", "perplexity per byte", "against BF16"):
        table.add_column(column, justify="left" if column == "experts" else "right")
    base = dict(rows)["BF16"]
    for name, value in rows:
        table.add_row(name, f"{value:.4f}", f"{value / base - 1:+.2%}")
    make_console().print(table)
    if options.json:
        facts = provenance(device) | {
            "transformers": version_of("transformers"),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        }
        kept = {"provenance": facts, "minutes": options.minutes, "bytes": len(text), "curve": curve, "perplexity": dict(rows)}
        options.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
