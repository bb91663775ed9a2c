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
from graphmoe.kernels.gather_down import _gather_down_kernel
from graphmoe.kernels.gather_up import _gather_up_kernel
from graphmoe.kernels.gemv_down import _gemv_down_kernel
from graphmoe.kernels.gemv_up import _gemv_up_kernel
from graphmoe.kernels.pack import _pack_kernel
from graphmoe.kernels.route import _route_kernel
from graphmoe.kernels.route_tiles import _route_tiles_kernel
from graphmoe.kernels.scatter import _scatter_kernel
from graphmoe.kernels.stage import _stage_kernel

TARGET = GPUTarget("cuda", 90, 32)
_LOAD_EARLY = ("_gather_down_kernel", "_gemv_down_kernel")
"""They ask for tiles, ids and weights before they wait: all older than the kernel that they wait for."""


def compile_kernel(kernel: Any, pointers: dict[str, str], **constexprs: Any) -> None:
    """Compile one variant; arguments that are not named are int32 scalars. With programmatic launch, its code is held to the rule."""
    signature = {name: pointers.get(name, "constexpr" if name in constexprs else "i32") for name in kernel.arg_names}
    ptx = triton.compile(ASTSource(kernel, signature, constexprs), target=TARGET).asm["ptx"]
    if constexprs.get("PDL"):
        judge_waiting(kernel.fn.__name__, ptx)


def judge_waiting(name: str, ptx: str) -> None:
    """Raise unless the kernel waits before it signals and before it stores, and before it loads unless it may ask earlier for what is older."""
    wait, signal = ptx.find("griddepcontrol.wait"), ptx.find("griddepcontrol.launch_dependents")
    assert 0 <= wait < signal, f"{name} does not wait and then signal"
    for access in ("st.global", "red.global", "atom.global", *(() if name in _LOAD_EARLY else ("ld.global",))):
        first = ptx.find(access)
        assert first < 0 or wait < first, f"{name} has {access} before it waits"
    if name in _LOAD_EARLY:
        assert "ld.global" in ptx[wait:], f"{name} loads everything before it waits"


def main() -> None:
    for element, ids in (("*i64", "*i32"), ("*i16", "*i64")):
        pointers = {"x": element, "x_out": element, "topk_ids": ids, "ids_out": "*i32", "topk_weights": "*fp32", "weights_out": "*fp32"}
        compile_kernel(_stage_kernel, pointers, WIDTH=512, TOP_K=9, TOP_K_PADDED=16, COLUMNS=512)
    for kind, distinct in itertools.product(("masked", "compact", "psum"), (True, False)):
        pointers = dict.fromkeys(("topk_ids", "row_of", "groups", "flags"), "*i32")
        sizes = {"TOP_K": 8, "SLOTS": 8, "EXPERTS": 130, "BINS": 256, "ALIGN": 64, "BLOCK": 1024}
        compile_kernel(_route_kernel, pointers, KIND=kind, DISTINCT=distinct, PDL=True, **sizes)
    for scales, power_of_two in (("*bf16", False), ("*fp32", False), ("*fp32", True), ("*u8", True)):
        quantise = scales != "*bf16"
        rows = {"rows": "*fp8e4nv" if quantise else "*bf16", "row_of": "*i32", "scales": scales}
        sizes = {"SEGMENT_ROWS": 8192, "QUANTISE": quantise, "POWER_OF_TWO": power_of_two, "PACKED": scales == "*u8", "GROUP": 128, "PDL": True}
        compile_kernel(_scatter_kernel, {"x": "*bf16", **rows}, COLUMNS=7168, TOP_K=8, GROUPS=8, **sizes)
        compile_kernel(_act_kernel, {"gate_up": "*bf16", **rows}, ASSIGNMENTS=4096, COLUMNS=768, GROUPS=8, PAIRS=16, **sizes)
    pointers = {"rows": "*bf16", "row_of": "*i32", "topk_weights": "*fp32", "scale": "fp32", "out": "*bf16"}
    compile_kernel(_combine_kernel, pointers, COLUMNS=7168, TOP_K=8, BLOCK=1024, PDL=True)
    compile_kernel(_pack_kernel, {"scales": "*fp32", "out": "*i32"}, COLUMNS=5, WORDS=2, BLOCK=256)
    for quantise, power_of_two in ((False, False), (True, False), (True, True)):
        values = "*fp8e4nv" if quantise else "*bf16"
        pointers = dict.fromkeys(("topk_ids", "row_of", "members", "tiles", "flags"), "*i32") | dict.fromkeys(
            ("x_scales", "act_scales", "w_scales"), "*fp32"
        )
        pointers |= {"w": values, "act": values, "rows": "*bf16", "x": values}
        sizes = {"TOP_K": 8, "SLOTS": 8, "EXPERTS": 130, "BINS": 256, "TILE": 16, "DISTINCT": True, "BLOCK": 1024}
        columns = {"COLUMNS": 7168, "POWER_OF_TWO": power_of_two, "CHUNKS": 4, "GROUPS": 16, "GROUP": 128, "PDL": True}
        compile_kernel(_route_tiles_kernel, pointers | {"x": "*bf16", "x_rows": "*fp8e4nv"}, **sizes, **columns)
        step = 128 if quantise else 64
        gemm = {"COLUMNS": 7168, "WIDTH": 768, "TILE": 16, "ROWS": 128, "STEP": step, "GROUP": 128, "STAGES": 3, "QUANTISE": quantise, "PDL": True}
        weights = pointers | {"w": f"tensordesc<{values[1:]}[128, {step}]>"}
        compile_kernel(_gather_up_kernel, weights, POWER_OF_TWO=power_of_two, **gemm)
        compile_kernel(_gather_down_kernel, weights, **gemm)
        gemv = {"COLUMNS": 7168, "WIDTH": 768, "EXPERTS": 128, "TOP_K": 8, "ROWS": 4, "GROUPS": 8, "GROUP": 128, "QUANTISED": quantise, "PDL": True}
        direct = pointers | {"x": "*bf16", "act": "*bf16", "topk_weights": "*fp32", "scale": "fp32", "out": "*bf16"}
        compile_kernel(_gemv_up_kernel, direct, STAGES=1, **gemv)
        for slots in (1, 8):
            compile_kernel(_gemv_down_kernel, direct, ALL_SLOTS=8, SLOTS=slots, DISTINCT=True, **gemv)
    print("all kernels compile for sm90")


if __name__ == "__main__":
    main()
