"""Checkpoint metadata → `DecoderSpec`, one module per family."""

from appliance.engine.families.registry import read_spec, supported_architectures

__all__ = ["read_spec", "supported_architectures"]
