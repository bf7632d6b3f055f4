"""The frequencies of rotary embeddings, as transformers computes them (modeling_rope_utils.py), in float32."""

from __future__ import annotations

import math
from collections.abc import Callable

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
    return _KINDS[rope.kind](rope, max_model_len), rope.attention_factor


def _powers(rope: RopeSpec, theta: float) -> torch.Tensor:
    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    return torch.pow(theta, exponent)


def _default(rope: RopeSpec, _max_model_len: int) -> torch.Tensor:
    return 1.0 / _powers(rope, rope.theta)


def _linear(rope: RopeSpec, _max_model_len: int) -> torch.Tensor:
    return 1.0 / _powers(rope, rope.theta) / rope.factor


def _dynamic(rope: RopeSpec, max_model_len: int) -> torch.Tensor:
    """A larger base, so that the lowest frequency is stretched to the context (NTK-aware scaling)."""
    stretch = rope.factor * max(max_model_len, rope.original_context) / rope.original_context - (rope.factor - 1)
    theta = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return 1.0 / _powers(rope, theta)


def _llama3(rope: RopeSpec, _max_model_len: int) -> torch.Tensor:
    """Long waves divided by the factor, short ones as they were, between the two by a smooth mean."""
    given = dict(rope.parameters)
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    frequencies = 1.0 / _powers(rope, rope.theta)
    wavelength = 2 * math.pi / frequencies
    is_long = wavelength > rope.original_context / low
    is_short = wavelength < rope.original_context / high
    smooth = (rope.original_context / wavelength - low) / (high - low)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return torch.where(is_long, frequencies / rope.factor, torch.where(is_short, frequencies, between))


def _yarn(rope: RopeSpec, _max_model_len: int) -> torch.Tensor:
    """Frequencies that turn often in the original context stay, others are divided (arXiv:2309.00071, section 3.2)."""
    given, dim = dict(rope.parameters), rope.rotary_dim

    def place(rotations: float) -> float:
        turns = math.log(rope.original_context / (rotations * 2 * math.pi))
        return (dim * turns) / (2 * math.log(rope.theta))

    first, last = place(given["beta_fast"]), place(given["beta_slow"])
    if given["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    powers = _powers(rope, rope.theta)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _longrope(rope: RopeSpec, max_model_len: int) -> torch.Tensor:
    short, long = rope.factors
    factors = torch.tensor(long if max_model_len > rope.original_context else short, dtype=torch.float32)
    return 1.0 / (factors * _powers(rope, rope.theta))


_KINDS: dict[str, Callable[[RopeSpec, int], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
