"""The meaning of every kernel, in plain torch, under the same names and signatures (`graphmoe.ops.Ops`); runs on any device."""

from graphmoe.reference.act import act
from graphmoe.reference.attend import attend
from graphmoe.reference.combine import combine
from graphmoe.reference.count import count
from graphmoe.reference.gather_down import gather_down
from graphmoe.reference.gather_down_w4 import gather_down_w4
from graphmoe.reference.gather_up import gather_up
from graphmoe.reference.gather_up_w4 import gather_up_w4
from graphmoe.reference.gemv_down import gemv_down
from graphmoe.reference.gemv_up import gemv_up
from graphmoe.reference.judge import ROW_ERROR, row_errors, row_limit
from graphmoe.reference.layer import moe_layer
from graphmoe.reference.pack import pack
from graphmoe.reference.requantize_per_tensor import requantize_per_tensor
from graphmoe.reference.route import route
from graphmoe.reference.route_tiles import route_tiles
from graphmoe.reference.scatter import scatter
from graphmoe.reference.select_experts import select_experts
from graphmoe.reference.stage import stage

__all__ = [
    "ROW_ERROR",
    "act",
    "attend",
    "combine",
    "count",
    "gather_down",
    "gather_down_w4",
    "gather_up",
    "gather_up_w4",
    "gemv_down",
    "gemv_up",
    "moe_layer",
    "pack",
    "requantize_per_tensor",
    "route",
    "route_tiles",
    "row_errors",
    "row_limit",
    "scatter",
    "select_experts",
    "stage",
]
