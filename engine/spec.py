"""`DecoderSpec`: everything that differs between decoder families, as data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape and constants of a decoder-only transformer.

    Attributes:
        context_len: longest sequence the model was made for, in tokens.
        rotary_dim: leading elements of each head that are rotated.
        tied_head: the output head is the embedding matrix.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context_len: int
    norm_eps: float
    rope_theta: float
    rotary_dim: int
    tied_head: bool

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)
