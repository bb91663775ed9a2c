"""Compile every Triton kernel for SM90 down to machine code, with no GPU: `TRITON_INTERPRET=0 python -m tests.compile_kernels`.

The interpreter runs Python, so it accepts what the compiler refuses (a name that changes its type, say).
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphmoe.audit.signatures import SIGNATURES
from graphmoe.kernels.act import _act_kernel
from graphmoe.kernels.attend import _attend_kernel, _weigh_kernel
from graphmoe.kernels.combine import _combine_kernel
from graphmoe.kernels.count import _count_kernel
from graphmoe.kernels.gather_down import _gather_down_kernel
from graphmoe.kernels.gather_down_w4 import _gather_down_w4_kernel
from graphmoe.kernels.gather_up import _gather_up_kernel
from graphmoe.kernels.gather_up_w4 import _gather_up_w4_kernel
from graphmoe.kernels.gemv_down import _REGISTERS, _UNROLLED, _gemv_down_kernel
from graphmoe.kernels.gemv_up import _gemv_up_kernel
from graphmoe.kernels.pack import _pack_kernel
from graphmoe.kernels.requantize_per_tensor import _requantize_per_tensor_kernel
from graphmoe.kernels.route import _route_kernel
from graphmoe.kernels.route_tiles import _route_tiles_kernel
from graphmoe.kernels.scatter import _scatter_kernel
from graphmoe.kernels.select_experts import _select_experts_kernel
from graphmoe.kernels.stage import _stage_kernel

TARGET = GPUTarget("cuda", 90, 32)
_CUOBJDUMP = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
NOTHING_EARLY = (0, 0)


def compile_kernel(kernel: Any, pointers: dict[str, str], *, early: tuple[int, int] = NOTHING_EARLY, **constexprs: Any) -> bytes:
    """Machine code of one variant; arguments that are not named are int32 scalars. With programmatic launch, its code is held to the rule.

    `early`: loads that it may issue before it waits, of what is older than the kernel that it waits for; and how many of them go past the L1 cache,
    which may hold what an earlier replay wrote there (weights need not: they do not change).
    """
    signature = {name: pointers.get(name, "constexpr" if name in constexprs else "i32") for name in kernel.arg_names}
    aligned = {(number,): [["tt.divisibility", 16]] for number, kind in enumerate(signature.values()) if kind.startswith("*")}
    compiled = triton.compile(ASTSource(kernel, signature, constexprs, aligned), target=TARGET).asm
    if kernel.fn.__name__ in SIGNATURES:
        judge_signature(kernel.fn.__name__, compiled["ptx"])
    if constexprs.get("PDL"):
        judge_waiting(kernel.fn.__name__, compiled["ptx"], early)
    return compiled["cubin"]


def resources(cubin: bytes) -> str:
    """Registers, stack and shared memory, as the tool that comes with Triton prints them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout


def judge_signature(name: str, ptx: str) -> None:
    """Raise unless the compiled kernel takes parameters of the sizes that the audit has declared for it."""
    entry = ptx[ptx.index(".entry") :]
    sizes = [
        int(array or 0) or int(bits) // 8
        for bits, array in re.findall(r"\.param (?:\.align \d+ )?\.[ubfs](\d+)[^\[,)]*?_param_\d+(?:\[(\d+)\])?", entry[: entry.index(")")])
    ]
    declared = [parameter.nbytes for parameter in SIGNATURES[name]]
    assert sizes == declared, f"{name} takes parameters of {sizes} bytes, declared are {declared}"


def judge_waiting(name: str, ptx: str, early: tuple[int, int]) -> None:
    """Raise unless every block waits once, on its only way, before it signals, stores, or loads anything but what it may ask for early."""
    assert ptx.count("griddepcontrol.wait") == 1, f"{name} waits {ptx.count('griddepcontrol.wait')} times"
    before, _, behind = ptx[ptx.index(".entry") :].partition("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in behind, f"{name} signals before it waits, or never"
    for way in (r"\bret\b", r"\bbra\b", r"\bexit\b"):
        assert not re.search(way, before), f"{name} can leave or branch before it waits"
    for access in ("st.global", "red.global", "atom.global", "cp.async"):
        assert access not in before, f"{name} has {access} before it waits"
    loads = re.findall(r"ld\.global[\w.]*", before)
    found = (len(loads), sum(".cg" in load for load in loads))
    assert found == early, f"{name} issues {found[0]} loads before it waits, {found[1]} of them past L1; expected {early}"


def main() -> None:
    for element, ids in (("*i64", "*i32"), ("*i16", "*i64")):
        pointers = {"x": element, "x_out": element, "topk_ids": ids, "ids_out": "*i32", "topk_weights": "*fp32", "weights_out": "*fp32"}
        compile_kernel(_stage_kernel, pointers, WIDTH=512, TOP_K=9, TOP_K_PADDED=16, COLUMNS=512)
    for kind, distinct in itertools.product(("masked", "compact", "psum"), (True, False)):
        pointers = dict.fromkeys(("topk_ids", "row_of", "groups", "block_counts", "flags"), "*i32")
        sizes = {"TOP_K": 8, "SLOTS": 8, "EXPERTS": 130, "BINS": 256, "BLOCK": 1024, "DISTINCT": distinct, "PDL": True}
        compile_kernel(_route_kernel, pointers, KIND=kind, ALIGN=64, COUNTED=16, FILLED=1024, **sizes | {"BLOCK": 128})
        if kind == "psum":
            compile_kernel(_count_kernel, pointers, **sizes)
    for scales, power_of_two in (("*bf16", False), ("*fp32", False), ("*fp32", True), ("*u8", True)):
        quantise = scales != "*bf16"
        rows = {"rows": "*fp8e4nv" if quantise else "*bf16", "row_of": "*i32", "scales": scales}
        sizes = {"SEGMENT_ROWS": 8192, "QUANTISE": quantise, "POWER_OF_TWO": power_of_two, "PACKED": scales == "*u8", "GROUP": 128, "PDL": True}
        compile_kernel(_scatter_kernel, {"x": "*bf16", **rows}, COLUMNS=7168, TOP_K=8, SLOTS=8, GROUPS=8, **sizes)
        compile_kernel(_act_kernel, {"gate_up": "*bf16", **rows}, ASSIGNMENTS=4096, COLUMNS=768, GROUPS=8, PAIRS=16, **sizes)
    for groups, size, top_groups in ((1, 512, 1), (1, 128, 1), (8, 32, 4)):
        pointers = {"logits": "*fp32" if groups > 1 else "*bf16", "bias": "*fp32", "topk_ids": "*i32", "topk_weights": "*fp32"}
        sizes = {"GROUPS": groups, "TOP_GROUPS": top_groups, "SIZE": size, "PADDED_GROUPS": groups, "PADDED_SIZE": size, "TOP_K": 8, "SLOTS": 8}
        flags = {"SOFTMAX": groups == 1, "BIASED": groups > 1, "RENORMALIZE": True}
        compile_kernel(_select_experts_kernel, pointers, OFFSET=0, EXPERTS=groups * size, **sizes, **flags)
    pointers = {"rows": "*bf16", "row_of": "*i32", "topk_weights": "*fp32", "scale": "fp32", "out": "*bf16"}
    compile_kernel(_combine_kernel, pointers, early=(2, 2), COLUMNS=7168, TOP_K=8, SLOTS=8, UNROLLED=16, BLOCK=1024, PDL=True)
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
        compile_kernel(_gather_down_kernel, weights, early=(3, 3), **gemm)
        if power_of_two:  # once
            for tile, rows in ((16, 128), (32, 128), (64, 64)):
                w4 = pointers | {"w": f"tensordesc<u8[{rows}, 64]>", "w_scales": "*bf16"}
                sizes = {"COLUMNS": 7168, "WIDTH": 768, "TILE": tile, "ROWS": rows, "GROUP": 128, "STAGES": 3, "PDL": True, "PER_TENSOR": False}
                up = compile_kernel(_gather_up_w4_kernel, w4, **sizes)
                compile_kernel(_gather_up_w4_kernel, w4, **sizes | {"PER_TENSOR": True})
                downs = [compile_kernel(_gather_down_w4_kernel, w4, early=(3, 3), HALVES=halves, **sizes) for halves in (1, 2)]
                for cubin in (up, *downs):
                    assert "STACK:0 " in resources(cubin), f"int4 GEMMs spill with tile {tile}, {rows} rows: {resources(cubin)}"
        gemv = {"COLUMNS": 7168, "EXPERTS": 128, "TOP_K": 8, "ROWS": 8, "GROUP": 128, "QUANTISED": quantise, "PDL": True}
        direct = pointers | {"x": "*bf16", "act": "*bf16", "topk_weights": "*fp32", "scale": "fp32", "out": "*bf16"}
        compile_kernel(_gemv_up_kernel, direct, WIDTH=768, GROUPS=4, STAGES=1, **gemv)
        eight, sixteen = ((13, 4), (14, 5)) if quantise else ((20, 4), (24, 8))
        for slots, groups, width, early in ((1, 8, 768, NOTHING_EARLY), (8, 2, 768, eight), (8, 2, 2048, eight), (16, 1, 768, sixteen)):
            all_slots = max(8, slots)
            held = {"WIDTH": width, "GROUPS": groups, "STEPS": -(-width // (groups * 128)), "UNROLLED": _UNROLLED}
            assert slots * groups * gemv["ROWS"] * 128 <= 4 * _REGISTERS
            cubin = compile_kernel(_gemv_down_kernel, direct, early=early, ALL_SLOTS=all_slots, SLOTS=slots, DISTINCT=True, **held, **gemv)
            assert "STACK:0 " in resources(cubin), f"direct's sums spill with {slots} slots, {held}: {resources(cubin)}"
    requantised = {"x": "*fp8e4nv", "out_scale": "*fp32", "live": "*i32", "out": "*fp8e4nv"}
    for scales, masked, mapped in (("*fp32", True, False), ("*i32", True, False), ("*fp32", False, True), ("*i32", False, False)):
        live = {"MASKED": masked, "MAPPED": mapped, "PACKED": scales == "*i32"}
        tile = {"COLUMNS": 7168, "ROWS": 4, "GROUPS": 8, "GROUP": 128, "PDL": True}
        tile |= dict.fromkeys(("LIVE_STRIDE", "X_COLUMN", "OUT_COLUMN", "SCALE_COLUMN"), 1) | {"SCALE_ROW": 56, "SCALE_SEGMENT": 56 << 12}
        tile |= dict.fromkeys(("X_ROW", "OUT_ROW"), 7168) | dict.fromkeys(("X_SEGMENT", "OUT_SEGMENT"), 7168 << 12)
        cubin = compile_kernel(_requantize_per_tensor_kernel, {**requantised, "scales": scales}, **live, **tile)
        assert "STACK:0 " in resources(cubin), f"requantising spills with {live}: {resources(cubin)}"
    attended = dict.fromkeys(("q", "keys", "values", "out"), "*bf16") | {"positions": "*i64", "partial": "*fp32", "lse": "*fp32", "scale": "fp32"}
    for group, block, key_dim, value_dim in ((8, 64, 128, 128), (1, 32, 192, 128)):
        dims = {"KEY_DIM": key_dim, "KEY_COLUMNS": triton.next_power_of_2(key_dim), "VALUE_DIM": value_dim, "VALUE_COLUMNS": value_dim}
        dims |= {"Q_ROW": 32 * key_dim, "Q_HEAD": key_dim, "K_ROW": 4 * 4096 * key_dim, "K_HEAD": 4096 * key_dim, "K_POSITION": key_dim}
        dims |= {"V_ROW": 4 * 4096 * value_dim, "V_HEAD": 4096 * value_dim, "V_POSITION": value_dim}
        cubin = compile_kernel(_attend_kernel, attended, GROUP=group, ROWS=16, SPLIT=256, BLOCK=block, **dims)
        assert "STACK:0 " in resources(cubin), f"attention spills with {dims}: {resources(cubin)}"
    compile_kernel(_weigh_kernel, attended, SPLITS=16, PIECES=16, VALUE_DIM=128, VALUE_COLUMNS=128)
    print("all kernels compile for sm90")


if __name__ == "__main__":
    main()
