"""GPTQ checkpoints."""
