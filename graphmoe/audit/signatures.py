"""What the parameters of each kernel in a step mean. A kernel that is not declared here cannot be proven.

A declaration lists the parameters in order: `<name` is the address of something read, `>name` of something written, `=name` of both; `@<name` and
`@>name` is a TMA descriptor of something read or written; a bare name is a number of four bytes, `name:8` one of eight. `name/buffer/buffer` says
which buffers of a step an address is of, where they are called otherwise.

Sources: our own kernels (`tests/compile_kernels.py` holds these lines against their compiled code); for deep_gemm 0.1.5 the headers of its wheel,
`deep_gemm/include/deep_gemm/impls/sm90_*.cuh`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DESCRIPTOR_BYTES = 128
_SCRATCH = " scratch?:8 profile?:8"
"""Triton's launcher appends two addresses that are null unless a kernel asks for scratch; ours do not."""
_WEIGHTS = "@<w/w13/w2 w_rows w_columns w_row_stride:8 w_column_stride:8"

_SCALES = "/w13_scale_inv/w2_scale_inv"
_ONE_X, _ONE_ACT = "/w13_input_scale", "/w2_input_scale"
_ROWS, _RESULTS = "x_rows/act_rows", "gate_up/down_rows"

_TRITON = {
    "_count_kernel": "<topk_ids >block_counts =flags tokens block_tokens",
    "_route_kernel": "<topk_ids >row_of >groups <block_counts tokens blocks block_tokens segment_rows",
    "_scatter_kernel": "<x <row_of >rows/x_rows >scales/x_scales",
    "_act_kernel": "<gate_up <row_of >rows/act_rows >scales/act_scales",
    "_combine_kernel": "<rows/down_rows <row_of <topk_weights scale >out/y",
    "_route_tiles_kernel": "<topk_ids <x >row_of >members >tiles >x_rows >x_scales =flags tokens tile_count",
    "_gather_up_kernel": f"<x/x_rows <x_scales <tiles <members {_WEIGHTS} <w_scales{_SCALES} >act/act_rows >act_scales",
    "_gather_down_kernel": f"<act/act_rows <act_scales <tiles {_WEIGHTS} <w_scales{_SCALES} >rows/down_rows",
    "_gather_up_w4_kernel": f"<x/x_rows <x_scales{_ONE_X} <tiles <members {_WEIGHTS} <w_scales{_SCALES} >act/act_rows =act_scales{_ONE_ACT}",
    "_gather_down_w4_kernel": f"<act/act_rows <act_scales{_ONE_ACT} <tiles {_WEIGHTS} <w_scales{_SCALES} >rows/down_rows",
    "_requantize_per_tensor_kernel": f"<x/x_rows <scales/x_scales <out_scale{_ONE_X} <live/x_scales >out/x_rows rows",
    "_gemv_up_kernel": f"<x <topk_ids <w/w13/w2 <w_scales{_SCALES} >act/act_rows",
    "_gemv_down_kernel": f"<act/act_rows <topk_ids <topk_weights <w/w13/w2 <w_scales{_SCALES} scale >out/y =flags",
}
_DEEP_GEMM = {
    "sm90_fp8_gemm_1d2d_impl": f"<b_scales{_SCALES} <groups shape_m shape_n shape_k @<a/{_ROWS} @<b/w13/w2 @>d/{_RESULTS} "
    "@<a_scales/x_scales/act_scales",
    "sm90_bf16_gemm_impl": f"<groups shape_m shape_n shape_k @<a/{_ROWS} @<b/w13/w2 @>d/{_RESULTS}",
}


@dataclass(frozen=True)
class Parameter:
    """A declared parameter: its name, size, whether it is an address or a descriptor (else a number), and what the kernel does there."""

    name: str
    nbytes: int
    address: bool = False
    null: bool = False
    reads: bool = False
    writes: bool = False
    buffers: tuple[str, ...] = ()
    """Names of the buffers that it may be; its own and those declared behind it."""


def parse(declaration: str) -> tuple[Parameter, ...]:
    """The parameters of one line of this file's language."""
    parameters = []
    for word in declaration.split():
        match = re.fullmatch(r"(@?)([<>=]?)(\w+)((?:/\w+)*)(\??)(?::(\d))?", word)
        assert match is not None, word
        descriptor, does, name, buffers, null, nbytes = match.groups()
        size = DESCRIPTOR_BYTES if descriptor else 8 if does else int(nbytes or 4)
        parameters.append(Parameter(name, size, bool(does), bool(null), does in ("<", "="), does in (">", "="), (name, *buffers.split("/")[1:])))
    return tuple(parameters)


SIGNATURES = {name: parse(line + _SCRATCH) for name, line in _TRITON.items()} | {name: parse(line) for name, line in _DEEP_GEMM.items()}
"""By a kernel's short name."""
