"""Hugging Face Transformers: the experts implementation `graphmoe`, and models for `GraphedDecoder`."""

from graphmoe.integrations.transformers.experts import quantize_experts
from graphmoe.integrations.transformers.registration import register

__all__ = ["quantize_experts", "register"]
