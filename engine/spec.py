"""`DecoderSpec`: everything that differs between decoder families, as data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from appliance.quant.architectures import QKNorm
from appliance.quant.errors import CheckpointError

# Beyond these a configuration is broken: no model comes near.
_MAX_CONTEXT_LEN = 1 << 28
_MAX_NORM_EPS = 0.1


class Activation(Enum):
    """What a gate goes through before it multiplies."""

    SILU = "silu"
    GELU = "gelu"
    """With the error function."""
    GELU_TANH = "gelu_tanh"
    """Its approximation by tanh."""


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """What gpt-oss does instead: g · sigmoid(alpha · g) · (u + 1), gate and up being bounded by `limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """The experts that a token's MLP is chosen from.

    Attributes:
        top_k: how many a token has.
        normalised: whether a token's weights sum to one.
        layers: which have experts; the others have one MLP.

    Raises:
        CheckpointError: a token has more experts than there are.
    """

    count: int
    top_k: int
    normalised: bool
    layers: frozenset[int]
    activation: Activation | ClampedSwiglu = Activation.SILU

    def __post_init__(self) -> None:
        if self.top_k > self.count:
            raise CheckpointError(f"{self.top_k} experts to a token, expected at most all {self.count}")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How positions turn into angles.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: leading elements of each head that are turned.
        kind: what rescales the frequencies: "default", "linear", "dynamic", "llama3", "yarn" or "longrope".
        factor: by how much longer a context than `original_context` they are stretched.
        original_context: tokens that the model was trained on before.
        attention_factor: multiplies cosines and sines.
        parameters: what else the kind has, by its key in config.json.
        factors: each frequency is divided by its own, in kind "longrope"; for contexts up to the original one, and
            beyond. GGUF files hold llama3's that way too, the same for both.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float = 1.0
    parameters: tuple[tuple[str, float], ...] = ()
    factors: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs between the layers of one model.

    Attributes:
        window: a token sees itself and window - 1 tokens before it; 0: all.
        rope: index into `DecoderSpec.ropes`, None where positions are not turned.
    """

    window: int = 0
    rope: int | None = 0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape and constants of a decoder-only transformer.

    Attributes:
        context_len: longest sequence the model was made for, in tokens.
        stretched_context_len: longest sequence with the frequencies for long contexts, where there are two sets (kinds
            "dynamic" and "longrope"), else 0. Served when asked for: those frequencies then hold for short ones too.
        layers: one for each layer.
        attention_scale: multiplies the scores.
        attention_softcap, logits_softcap: c of c · tanh(x / c); 0 where there is none.
        pre_norms, post_norms: norms before and after attention and MLP.
        fused: queries, keys and values are one matrix, gates and ups another.
        sinks: each head has one more score, for attending to nothing.
        experts: None where every layer has one MLP.
        embed_scale, residual_scale, logits_scale: multiply the embeddings, what a block adds, the logits.
        tied_head: the output head is the embedding matrix.

    Raises:
        CheckpointError: a constant is absurd.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context_len: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    tied_head: bool
    attention_scale: float
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    activation: Activation = Activation.SILU
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    fused: bool = False
    sinks: bool = False
    experts: ExpertSpec | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    stretched_context_len: int = 0

    def __post_init__(self) -> None:
        longest = max(self.context_len, self.stretched_context_len)
        if longest > _MAX_CONTEXT_LEN:
            raise CheckpointError(
                f"a context of {longest} tokens, expected at most {_MAX_CONTEXT_LEN}; "
                "the model's configuration is broken"
            )
        widest = max((layer.window for layer in self.layers), default=0)
        if widest > _MAX_CONTEXT_LEN:
            raise CheckpointError(
                f"a window of {widest} tokens, expected at most {_MAX_CONTEXT_LEN}; "
                "the model's configuration is broken"
            )
        if self.norm_eps > _MAX_NORM_EPS:
            raise CheckpointError(
                f"an epsilon of {self.norm_eps:g} in the norms, expected at most {_MAX_NORM_EPS}; "
                "the model's configuration is broken"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def longest_context(self, asked: int | None) -> int:
        """The longest sequence that can be served, in tokens; `asked` is what the user wants, None for the default."""
        if asked is None or asked <= self.context_len:
            return self.context_len
        return max(self.context_len, self.stretched_context_len)
