"""The Triton kernels: one op a file, a private kernel and a public launcher that neither allocates nor synchronises (`graphmoe.ops.Ops`)."""

from graphmoe.kernels.act import act
from graphmoe.kernels.combine import combine
from graphmoe.kernels.pack import pack
from graphmoe.kernels.route import route
from graphmoe.kernels.scatter import scatter
from graphmoe.kernels.stage import stage

__all__ = ["act", "combine", "pack", "route", "scatter", "stage"]
