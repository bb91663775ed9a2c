"""The meaning of every kernel, in plain torch, under the same names and signatures (`graphmoe.ops.Ops`); runs on any device."""

from graphmoe.reference.act import act
from graphmoe.reference.combine import combine
from graphmoe.reference.judge import ROW_ERROR, row_errors
from graphmoe.reference.layer import moe_layer
from graphmoe.reference.pack import pack
from graphmoe.reference.route import route
from graphmoe.reference.scatter import scatter
from graphmoe.reference.stage import stage

__all__ = ["ROW_ERROR", "act", "combine", "moe_layer", "pack", "route", "row_errors", "scatter", "stage"]
