"""Weight formats: how expert weights are stored, and what H and I each can take. Plain torch; no kernel lives here."""

from __future__ import annotations

from dataclasses import dataclass

from graphmoe.errors import UnsupportedShape
from graphmoe.spec import MoESpec

BLOCK = 128
"""Side of a weight block and length of an activation group of block FP8 (DeepSeek-V3's format)."""


@dataclass(frozen=True)
class Format:
    """What a plan needs to know of a weight format.

    Attributes:
        name: `"bf16"` or `"fp8_block"`.
        activation_dtype: dtype of activation rows between the stages, a torch dtype's name.
        activation_scales: whether those rows carry one float32 scale per 128 columns.
        divisor: H and I must be multiples of it.
        weight_bytes: bytes of one weight element, scales not counted.
    """

    name: str
    activation_dtype: str
    activation_scales: bool
    divisor: int
    weight_bytes: int

    def check(self, spec: MoESpec) -> None:
        """Raise UnsupportedShape if this format cannot store `spec`."""
        for name, value in (("hidden_size", spec.hidden_size), ("intermediate_size", spec.intermediate_size)):
            if value % self.divisor:
                below, above = value // self.divisor * self.divisor, -(-value // self.divisor) * self.divisor
                nearest = f"{below} or {above}" if below else f"{above}"
                bf16_helps = self.name != "bf16" and not any(size % FORMATS["bf16"].divisor for size in (spec.hidden_size, spec.intermediate_size))
                raise UnsupportedShape(
                    f"{name}={value} is not a multiple of {self.divisor}, which format {self.name!r} needs; shard it so that it is "
                    f"(the nearest: {nearest})" + (" or take fmt='bf16'" if bf16_helps else "")
                )


FORMATS: dict[str, Format] = {
    "fp8_block": Format("fp8_block", "float8_e4m3fn", activation_scales=True, divisor=BLOCK, weight_bytes=1),
    # deep_gemm's BF16 grouped GEMM takes K in multiples of 64.
    "bf16": Format("bf16", "bfloat16", activation_scales=False, divisor=64, weight_bytes=2),
}


def get_format(name: str) -> Format:
    """The registered format, or UnsupportedShape naming the known ones."""
    if name not in FORMATS:
        raise UnsupportedShape(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]
