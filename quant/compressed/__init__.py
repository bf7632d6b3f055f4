"""Weights that compressed-tensors (llm-compressor, AutoRound) stores."""
