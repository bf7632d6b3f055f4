"""The frequencies of rotary embeddings, as transformers computes them (modeling_rope_utils.py)."""

from __future__ import annotations

import torch

from appliance.engine.spec import RopeSpec


def rope_frequencies(rope: RopeSpec, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair of elements, and what cosines and sines are multiplied by.

    Args:
        max_model_len: the context that is served; kinds that change beyond the original context do so by it, and not
            by the length of each sequence, so that a key never has to be turned again.

    Returns:
        float32 [rotary_dim / 2], and the factor.
    """
    del max_model_len
    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / rope.theta**exponent
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    return frequencies, 1.0
