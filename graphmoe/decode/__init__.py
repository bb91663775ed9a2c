"""Decode loops of whole models: one graph per batch-size bucket, a slot KV cache, and requests that come and go."""

from graphmoe.decode.decoder import GraphedDecoder
from graphmoe.decode.kv import LayerKV
from graphmoe.decode.model import DecodeModel
from graphmoe.decode.report import DecoderReport
from graphmoe.decode.requests import Finished, Request

__all__ = ["DecodeModel", "DecoderReport", "Finished", "GraphedDecoder", "LayerKV", "Request"]
