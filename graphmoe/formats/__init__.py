"""Weight formats: how expert weights are stored, and what H and I each can take. Plain torch; no kernel lives here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from graphmoe.errors import UnsupportedShape
from graphmoe.spec import MoESpec

if TYPE_CHECKING:
    from graphmoe.formats.per_tensor import requantize_per_tensor as requantize_per_tensor
    from graphmoe.formats.ue8m0 import requantize_ue8m0 as requantize_ue8m0

BLOCK = 128
"""Side of a weight block and length of an activation group of block FP8 (DeepSeek-V3's format)."""


class ScaleFormat(Enum):
    """How scales of e4m3 payloads are held; `value = payload * scale` in each.

    - `FLOAT32`: any float32.
    - `UE8M0`: float32 whose every value is a power of two; what deep_gemm consumes on SM90.
    - `UE8M0_PACKED`: four exponent bytes in an int32, rows contiguous; what deep_gemm consumes on SM100.
    """

    FLOAT32 = "float32"
    UE8M0 = "ue8m0"
    UE8M0_PACKED = "ue8m0_packed"


SCALES_PER_WORD = 4
"""Exponents in one int32 of `UE8M0_PACKED`."""


@dataclass(frozen=True)
class Rounding:
    """Where a path rounds activations inside the layer.

    Attributes:
        quantise: tokens and SwiGLU results take the format's activation type (where it is FP8); else they stay bf16.
        gate_up: gate and up pass through bf16; else float32 goes straight into SwiGLU.
        group: columns of a SwiGLU result that share a scale.
        per_tensor: tokens, quantised in groups, and SwiGLU results are rounded with the weights' input scales, one a GEMM.
    """

    quantise: bool = True
    gate_up: bool = True
    group: int = BLOCK
    per_tensor: bool = False


@dataclass(frozen=True)
class Format:
    """What a plan needs to know of a weight format.

    Attributes:
        name: `"bf16"`, `"fp8_block"`, `"ue8m0"` (block FP8 whose scales are powers of two) or `"w4afp8"` (int4 weights, FP8 activations).
        activation_dtype: dtype of activation rows between the stages, a torch dtype's name.
        scales: how scales of e4m3 are held, one per 1x128 activation group (and per weight block); None without scales.
        divisor: H and I must be multiples of it.
        weight_bits: bits of one weight, scales not counted.
        weight_dtype: dtype of weights as they are stored and held, a torch dtype's name.
        per_element: weights of a row in one element of it.
        scale_dtype: dtype of their scales at run time, a torch dtype's name.
        block: rows and columns of a weight that share a scale.
        layout: the form of prepared weights that its paths read, see `Path.weight_layout`.
    """

    name: str
    activation_dtype: str
    scales: ScaleFormat | None
    divisor: int
    weight_bits: int
    weight_dtype: str = "float8_e4m3fn"
    per_element: int = 1
    scale_dtype: str = "float32"
    block: tuple[int, int] = (BLOCK, BLOCK)
    layout: str = "plain"

    def on(self, arch: str) -> Format:
        """This format as an arch's GEMM consumes it: deep_gemm on SM100 takes power-of-two scales, packed.

        Raises:
            UnsupportedShape: float32 scales on SM100.
        """
        if arch != "sm100" or self.scales is None:
            return self
        if self.layout != "plain":
            raise UnsupportedShape(f"format {self.name!r} runs on sm90 only; take fmt='ue8m0'")
        if self.scales is ScaleFormat.FLOAT32:
            raise UnsupportedShape(f"format {self.name!r} has float32 scales, sm100 takes powers of two: use weights.requantize('ue8m0')")
        return replace(self, scales=ScaleFormat.UE8M0_PACKED)

    def stored_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of a stored weight matrix."""
        return rows, columns // self.per_element

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of a weight matrix's scales; blocks at its edges may be ragged."""
        return -(-rows // self.block[0]), -(-columns // self.block[1])

    def check(self, spec: MoESpec) -> None:
        """Raise UnsupportedShape if this format cannot store `spec`."""
        shard = f"if it is a tensor-parallel shard, take spec.shard(tp=..., block={self.divisor}) of the whole layer: ranks store whole blocks"
        for name, value, remedy in (
            ("hidden_size", spec.hidden_size, "no shard changes it"),
            ("intermediate_size", spec.intermediate_size, shard),
        ):
            if value % self.divisor:
                bf16_helps = self.name != "bf16" and not any(size % FORMATS["bf16"].divisor for size in (spec.hidden_size, spec.intermediate_size))
                raise UnsupportedShape(
                    f"{name}={value} is not a multiple of {self.divisor}, which format {self.name!r} needs; {remedy}"
                    + ("; or take fmt='bf16'" if bf16_helps else "")
                )


FORMATS: dict[str, Format] = {
    "fp8_block": Format("fp8_block", "float8_e4m3fn", ScaleFormat.FLOAT32, divisor=BLOCK, weight_bits=8),
    "ue8m0": Format("ue8m0", "float8_e4m3fn", ScaleFormat.UE8M0, divisor=BLOCK, weight_bits=8),
    # A layer may also have groups of 64 or 32 columns: stored and converted, but no path runs those.
    "w4afp8": Format(
        "w4afp8",
        "float8_e4m3fn",
        ScaleFormat.FLOAT32,
        divisor=BLOCK,
        weight_bits=4,
        weight_dtype="int8",
        per_element=2,
        scale_dtype="bfloat16",
        block=(1, BLOCK),
        layout="w4",
    ),
    # deep_gemm's BF16 grouped GEMM takes K in multiples of 64.
    "bf16": Format("bf16", "bfloat16", None, divisor=64, weight_bits=16, weight_dtype="bfloat16"),
}


def get_format(name: str) -> Format:
    """The registered format, or UnsupportedShape naming the known ones."""
    if name not in FORMATS:
        raise UnsupportedShape(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def __getattr__(name: str) -> Any:
    """`requantize_ue8m0` and `requantize_per_tensor`, on first use: they need torch, which planning does without."""
    if name == "requantize_per_tensor":
        from graphmoe.formats.per_tensor import requantize_per_tensor

        return requantize_per_tensor
    if name == "requantize_ue8m0":
        from graphmoe.formats.ue8m0 import requantize_ue8m0

        return requantize_ue8m0
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
