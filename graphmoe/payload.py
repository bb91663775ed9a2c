"""What a token travels as between expert-parallel ranks: e4m3 with its scales, or bf16. The one place that decides it."""

from __future__ import annotations

from graphmoe.environment import DISPATCH_PAYLOAD
from graphmoe.errors import BadSetting
from graphmoe.formats import Format, Rounding


def dispatch_payload(fmt: Format, rounding: Rounding, wish: str | None = None) -> str:
    """`"fp8"` or `"bf16"`: the wish, or else what `GRAPHMOE_DISPATCH_PAYLOAD` says, or else FP8 wherever the experts take it.

    BF16 is always possible: the receiving rank rounds as its path does. FP8 takes half the bytes, and needs experts whose first GEMM takes FP8.

    Args:
        fmt: the weights' format.
        rounding: where the path rounds activations.
        wish: `"fp8"`, `"bf16"` or None.

    Raises:
        BadSetting: FP8 for weights or a path that take bf16 tokens; another value; a wish that the environment contradicts.
    """
    if wish is not None and wish not in DISPATCH_PAYLOAD.legal:
        raise BadSetting(f"payload={wish!r}; legal are {' and '.join(map(repr, DISPATCH_PAYLOAD.legal))}")
    stated = DISPATCH_PAYLOAD.read()
    if wish is not None and stated is not None and wish != stated:
        raise BadSetting(f"payload={wish!r}, but the environment says {DISPATCH_PAYLOAD.name}={stated!r}; take one of them back")
    takes_fp8 = fmt.activation_dtype == "float8_e4m3fn" and rounding.quantise
    chosen = wish or stated
    if chosen == "fp8" and not takes_fp8:
        who = "the path" if fmt.activation_dtype == "float8_e4m3fn" else f"format {fmt.name!r}"
        raise BadSetting(f"payload='fp8', but {who} takes bf16 tokens; take payload='bf16'")
    return chosen or ("fp8" if takes_fp8 else "bf16")
