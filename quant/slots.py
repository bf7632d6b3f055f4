"""The weights of a decoder: canonical names and the shapes that its metadata asks for. No torch.

`embed`, `final_norm`, `head` (absent where it is tied to `embed`), and for each layer `layers.{i}.` + what
`architectures` lists; biases add `.bias`.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.quant.architectures import Architecture, QKNorm
from appliance.quant.errors import CheckpointError

MAX_LAYERS = 1024
MAX_EXPERTS = 1024


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The experts that a token's MLP is chosen from.

    Attributes:
        count: in a layer.
        width: rows of an expert's gate.
        layers: which have experts; the others have one MLP.

    Raises:
        CheckpointError: an impossible number of experts.
    """

    count: int
    width: int
    layers: frozenset[int]

    def __post_init__(self) -> None:
        if self.count > MAX_EXPERTS:
            raise CheckpointError(f"{self.count} experts, expected at most {MAX_EXPERTS}")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the shapes of a decoder's weights are made of.

    Raises:
        CheckpointError: impossible numbers of layers or heads, or an impossible size of these.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    vocab: int
    experts: ExpertSizes | None = None

    def __post_init__(self) -> None:
        if self.layers > MAX_LAYERS:
            raise CheckpointError(f"{self.layers} layers, expected at most {MAX_LAYERS}")
        if self.key_dim % 2:
            raise CheckpointError(f"attention heads of {self.key_dim}, expected an even size for RoPE")
        if self.heads % self.kv_heads:
            raise CheckpointError(
                f"{self.heads} attention heads over {self.kv_heads} key-value heads, expected a multiple"
            )


@dataclass(frozen=True, slots=True)
class Slot:
    """A weight that a model has.

    Attributes:
        shape: (N, K) of a linear layer or the embedding, (N,) of a norm or a bias.
        rope_heads: of queries and keys, the number of heads that RoPE turns; else 0.
    """

    shape: tuple[int, ...]
    optional: bool = False
    rope_heads: int = 0


def decoder_slots(sizes: Sizes, architecture: Architecture) -> dict[str, Slot]:
    """Every weight of a decoder, by canonical name."""
    hidden = sizes.hidden
    slots = {
        "embed": Slot((sizes.vocab, hidden)),
        "final_norm": Slot((hidden,)),
        "head": Slot((sizes.vocab, hidden), optional=True),
    }
    vectors, attention = _vectors(sizes, architecture), _attention(sizes, architecture)
    mlp, experts = _mlp(sizes, architecture), _experts(sizes)
    for layer in range(sizes.layers):
        p = f"layers.{layer}."
        slots |= {p + name: Slot((width,)) for name, width in vectors.items()}
        sparse = sizes.experts is not None and layer in sizes.experts.layers
        for name, (rows, columns, heads) in (attention | (experts if sparse else mlp)).items():
            slots[p + name] = Slot((rows, columns), rope_heads=heads)
            needed = name in experts and architecture.experts is not None and architecture.experts.biases
            slots[p + name + ".bias"] = Slot((rows,), optional=not needed, rope_heads=heads)
    return slots


def _vectors(sizes: Sizes, architecture: Architecture) -> dict[str, int]:
    """A layer's norms and their widths."""
    vectors: dict[str, int] = {}
    for present, names in (
        (architecture.pre_norms, ("attn_norm", "mlp_norm")),
        (architecture.post_norms, ("attn_post_norm", "mlp_post_norm")),
    ):
        if present:
            vectors |= dict.fromkeys(names, sizes.hidden)
    if architecture.qk_norm is QKNorm.HEAD:
        vectors |= {"q_norm": sizes.key_dim, "k_norm": sizes.key_dim}
    if architecture.qk_norm is QKNorm.WHOLE:
        vectors |= {"q_norm": sizes.heads * sizes.key_dim, "k_norm": sizes.kv_heads * sizes.key_dim}
    if architecture.sinks:
        vectors["sinks"] = sizes.heads
    return vectors


def _attention(sizes: Sizes, architecture: Architecture) -> dict[str, tuple[int, int, int]]:
    """The matrices of a layer's attention: rows, columns, and the heads that RoPE turns."""
    hidden = sizes.hidden
    q, k = sizes.heads * sizes.key_dim, sizes.kv_heads * sizes.key_dim
    v = sizes.kv_heads * sizes.value_dim
    o = {"o": (hidden, sizes.heads * sizes.value_dim, 0)}
    if architecture.fused:
        return {"qkv": (q + k + v, hidden, 0)} | o
    return {"q": (q, hidden, sizes.heads), "k": (k, hidden, sizes.kv_heads), "v": (v, hidden, 0)} | o


def _mlp(sizes: Sizes, architecture: Architecture) -> dict[str, tuple[int, int, int]]:
    """As `_attention`, of a layer's one MLP."""
    hidden, wide = sizes.hidden, sizes.intermediate
    if architecture.fused:
        return {"gate_up": (2 * wide, hidden, 0), "down": (hidden, wide, 0)}
    return {"gate": (wide, hidden, 0), "up": (wide, hidden, 0), "down": (hidden, wide, 0)}


def _experts(sizes: Sizes) -> dict[str, tuple[int, int, int]]:
    """As `_attention`, of a layer's router and experts."""
    if sizes.experts is None:
        return {}
    hidden, wide = sizes.hidden, sizes.experts.width
    matrices = {"router": (sizes.experts.count, hidden, 0)}
    for expert in range(sizes.experts.count):
        p = f"experts.{expert}."
        matrices |= {
            p + "gate": (wide, hidden, 0),
            p + "up": (wide, hidden, 0),
            p + "down": (hidden, wide, 0),
        }
    return matrices
