"""Checkpoint formats read into one canonical `QuantTensor`."""
