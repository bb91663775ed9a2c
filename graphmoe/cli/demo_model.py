"""The demo's model: a small random Qwen3-MoE over bytes, so that it needs no tokenizer, kept on disk as a block-FP8 checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from graphmoe.checkpoint import CheckpointReader, make_directory
from graphmoe.cli.quiet import quiet_transformers
from graphmoe.convert import convert_checkpoint
from graphmoe.errors import CheckpointError

LAYERS = 2
_SEED = 20
_SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True, "max_position_embeddings": 4096,
    "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_CONFIG = "config.json"


def write_checkpoint(folder: Path) -> bool:
    """Write the checkpoint unless it is there, and return whether it was written. It appears whole or not at all."""
    if (folder / _CONFIG).is_file():
        return False
    library = quiet_transformers()
    make_directory(folder.parent)
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        torch.manual_seed(_SEED)
        model = library.Qwen3MoeForCausalLM(library.Qwen3MoeConfig(**_SIZES)).to(torch.bfloat16)
        model.save_pretrained(Path(scratch) / "bf16")
        convert_checkpoint(Path(scratch) / "bf16", Path(scratch) / "fp8", "fp8_block")
        try:
            (Path(scratch) / "fp8").rename(folder)
        except OSError as error:
            if not (folder / _CONFIG).is_file():  # else another process was faster
                raise CheckpointError(f"{folder} cannot become the demo's checkpoint ({error.strerror}): delete it, or give another --dir") from error
    return True


def load_model(folder: Path, device: torch.device, experts: str) -> Any:
    """The checkpoint's model in inference mode: its experts FP8 in graphmoe, or dequantised to BF16 in Transformers' own `"eager"` code.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    library = quiet_transformers()
    with CheckpointReader(folder) as reader:
        for key in reader.keys():  # noqa: SIM118 - a method, not a dict's
            reader.read(key)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "experts_implementation": experts, "device_map": str(device)}
    if experts != "graphmoe":
        how["quantization_config"] = library.FineGrainedFP8Config(dequantize=True)
    model = library.AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    if experts == "graphmoe" and device.type == "cpu":
        from graphmoe.integrations.transformers import quantize_experts

        quantize_experts(model)  # without a GPU, Transformers dequantises what it loads; this finds the same payload again
    return model
