"""Compile every Triton kernel for SM90 down to machine code, with no GPU: `TRITON_INTERPRET=0 python -m tests.compile_kernels`.

The interpreter runs Python, so it accepts what the compiler refuses (a name that changes its type, say).
"""

from __future__ import annotations

import itertools
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphmoe.kernels.act import _act_kernel
from graphmoe.kernels.combine import _combine_kernel
from graphmoe.kernels.pack import _pack_kernel
from graphmoe.kernels.route import _route_kernel
from graphmoe.kernels.scatter import _scatter_kernel
from graphmoe.kernels.stage import _stage_kernel

TARGET = GPUTarget("cuda", 90, 32)


def compile_kernel(kernel: Any, pointers: dict[str, str], **constexprs: Any) -> None:
    """Compile one variant; arguments that are not named are int32 scalars."""
    signature = {name: pointers.get(name, "constexpr" if name in constexprs else "i32") for name in kernel.arg_names}
    triton.compile(ASTSource(kernel, signature, constexprs), target=TARGET)


def main() -> None:
    for element, ids in (("*i64", "*i32"), ("*i16", "*i64")):
        pointers = {"x": element, "x_out": element, "topk_ids": ids, "ids_out": "*i32", "topk_weights": "*fp32", "weights_out": "*fp32"}
        compile_kernel(_stage_kernel, pointers, WIDTH=512, TOP_K=9, TOP_K_PADDED=16, COLUMNS=512)
    for kind, distinct in itertools.product(("masked", "compact", "psum"), (True, False)):
        pointers = dict.fromkeys(("topk_ids", "row_of", "groups", "flags"), "*i32")
        sizes = {"ASSIGNMENTS": 4096, "TOP_K": 8, "EXPERTS": 130, "BINS": 256, "ALIGN": 64, "SEGMENT_ROWS": 8192, "BLOCK": 1024}
        compile_kernel(_route_kernel, pointers, KIND=kind, DISTINCT=distinct, **sizes)
    for scales, power_of_two in (("*bf16", False), ("*fp32", False), ("*fp32", True), ("*u8", True)):
        quantise = scales != "*bf16"
        rows = {"rows": "*fp8e4nv" if quantise else "*bf16", "row_of": "*i32", "scales": scales}
        sizes = {"SEGMENT_ROWS": 8192, "QUANTISE": quantise, "POWER_OF_TWO": power_of_two, "PACKED": scales == "*u8", "GROUP": 128}
        compile_kernel(_scatter_kernel, {"x": "*bf16", **rows}, COLUMNS=7168, TOP_K=8, GROUPS=8, **sizes)
        compile_kernel(_act_kernel, {"gate_up": "*bf16", **rows}, COLUMNS=768, GROUPS=4, **sizes)
    pointers = {"rows": "*bf16", "row_of": "*i32", "topk_weights": "*fp32", "scale": "fp32", "out": "*bf16"}
    compile_kernel(_combine_kernel, pointers, COLUMNS=7168, TOP_K=8, BLOCK=1024)
    compile_kernel(_pack_kernel, {"scales": "*fp32", "out": "*i32"}, COLUMNS=5, WORDS=2, BLOCK=256)
    print("all kernels compile for sm90")


if __name__ == "__main__":
    main()
