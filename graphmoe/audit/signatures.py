"""What the parameters of each kernel in a step mean. A kernel that is not declared here cannot be proven.

A declaration lists the parameters in order: `<name` is the address of something read, `>name` of something written, `=name` of both; `@<name` and
`@>name` is a TMA descriptor of something read or written; a bare name is a number of four bytes, `name:8` one of eight.

Sources: our own kernels (`tests/compile_kernels.py` holds these lines against their compiled code); for deep_gemm 0.1.5 the headers of its wheel,
`deep_gemm/include/deep_gemm/impls/sm90_*.cuh`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DESCRIPTOR_BYTES = 128
_SCRATCH = " scratch?:8 profile?:8"
"""Triton's launcher appends two addresses that are null unless a kernel asks for scratch; ours do not."""
_WEIGHTS = "@<w w_rows w_columns w_row_stride:8 w_column_stride:8"

_TRITON = {
    "_count_kernel": "<topk_ids >block_counts =flags tokens block_tokens",
    "_route_kernel": "<topk_ids >row_of >groups <block_counts tokens blocks block_tokens segment_rows",
    "_scatter_kernel": "<x <row_of >rows >scales",
    "_act_kernel": "<gate_up <row_of >rows >scales",
    "_combine_kernel": "<rows <row_of <topk_weights scale >out",
    "_route_tiles_kernel": "<topk_ids <x >row_of >members >tiles >x_rows >x_scales =flags tokens tile_count",
    "_gather_up_kernel": f"<x <x_scales <tiles <members {_WEIGHTS} <w_scales >act >act_scales",
    "_gather_down_kernel": f"<act <act_scales <tiles {_WEIGHTS} <w_scales >rows",
    "_gemv_up_kernel": "<x <topk_ids <w <w_scales >act",
    "_gemv_down_kernel": "<act <topk_ids <topk_weights <w <w_scales scale >out =flags",
}
_DEEP_GEMM = {
    "sm90_fp8_gemm_1d2d_impl": "<b_scales <groups shape_m shape_n shape_k @<a @<b @>d @<a_scales",
    "sm90_bf16_gemm_impl": "<groups shape_m shape_n shape_k @<a @<b @>d",
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


def parse(declaration: str) -> tuple[Parameter, ...]:
    """The parameters of one line of this file's language."""
    parameters = []
    for word in declaration.split():
        match = re.fullmatch(r"(@?)([<>=]?)(\w+)(\??)(?::(\d))?", word)
        assert match is not None, word
        descriptor, does, name, null, nbytes = match.groups()
        size = DESCRIPTOR_BYTES if descriptor else 8 if does else int(nbytes or 4)
        parameters.append(Parameter(name, size, bool(does), bool(null), does in ("<", "="), does in (">", "=")))
    return tuple(parameters)


SIGNATURES = {name: parse(line + _SCRATCH) for name, line in _TRITON.items()} | {name: parse(line) for name, line in _DEEP_GEMM.items()}
"""By a kernel's short name."""
