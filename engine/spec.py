"""`DecoderSpec`: everything that differs between decoder families, as data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.quant.errors import CheckpointError

# Beyond these a configuration is broken: no model comes near.
_MAX_CONTEXT_LEN = 1 << 28
_MAX_NORM_EPS = 0.1


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape and constants of a decoder-only transformer.

    Attributes:
        context_len: longest sequence the model was made for, in tokens.
        rotary_dim: leading elements of each head that are rotated.
        tied_head: the output head is the embedding matrix.

    Raises:
        CheckpointError: a constant is absurd.
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

    def __post_init__(self) -> None:
        if self.context_len > _MAX_CONTEXT_LEN:
            raise CheckpointError(
                f"a context of {self.context_len} tokens, expected at most {_MAX_CONTEXT_LEN}; "
                "the model's configuration is broken"
            )
        if self.norm_eps > _MAX_NORM_EPS:
            raise CheckpointError(
                f"an epsilon of {self.norm_eps:g} in the norms, expected at most {_MAX_NORM_EPS}; "
                "the model's configuration is broken"
            )

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)
