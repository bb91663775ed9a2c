"""The Triton kernels: one op a file, a private kernel and a public launcher that neither allocates nor synchronises (`graphmoe.ops.Ops`)."""

from graphmoe.kernels.act import act
from graphmoe.kernels.attend import attend
from graphmoe.kernels.combine import combine
from graphmoe.kernels.count import count
from graphmoe.kernels.gather_down import gather_down
from graphmoe.kernels.gather_down_w4 import gather_down_w4
from graphmoe.kernels.gather_up import gather_up
from graphmoe.kernels.gather_up_w4 import gather_up_w4
from graphmoe.kernels.gemv_down import gemv_down
from graphmoe.kernels.gemv_up import gemv_up
from graphmoe.kernels.pack import pack
from graphmoe.kernels.requantize_per_tensor import requantize_per_tensor
from graphmoe.kernels.route import route
from graphmoe.kernels.route_tiles import route_tiles
from graphmoe.kernels.scatter import scatter
from graphmoe.kernels.select_experts import select_experts
from graphmoe.kernels.stage import stage

__all__ = [
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
    "pack",
    "requantize_per_tensor",
    "route",
    "route_tiles",
    "scatter",
    "select_experts",
    "stage",
]
