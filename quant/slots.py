"""The weights of a decoder: canonical names and the shapes that its metadata asks for. No torch.

`embed`, `final_norm`, `head` (absent where it is tied to `embed`), and for each layer `layers.{i}.` + what
`architectures` lists; biases add `.bias`.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.quant.architectures import Architecture, QKNorm
from appliance.quant.errors import CheckpointError

MAX_LAYERS = 1024


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
    vectors, matrices = _vectors(sizes, architecture), _matrices(sizes, architecture)
    for layer in range(sizes.layers):
        p = f"layers.{layer}."
        slots |= {p + name: Slot((width,)) for name, width in vectors.items()}
        for name, (rows, columns, heads) in matrices.items():
            slots[p + name] = Slot((rows, columns), rope_heads=heads)
            slots[p + name + ".bias"] = Slot((rows,), optional=True, rope_heads=heads)
    return slots


def _vectors(sizes: Sizes, architecture: Architecture) -> dict[str, int]:
    """A layer's norms and their widths."""
    vectors = {}
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
    return vectors


def _matrices(sizes: Sizes, architecture: Architecture) -> dict[str, tuple[int, int, int]]:
    """A layer's matrices: rows, columns, and the heads that RoPE turns."""
    hidden, wide = sizes.hidden, sizes.intermediate
    q, k = sizes.heads * sizes.key_dim, sizes.kv_heads * sizes.key_dim
    v = sizes.kv_heads * sizes.value_dim
    common = {"o": (hidden, sizes.heads * sizes.value_dim, 0), "down": (hidden, wide, 0)}
    if architecture.fused:
        return {"qkv": (q + k + v, hidden, 0), "gate_up": (2 * wide, hidden, 0)} | common
    return {
        "q": (q, hidden, sizes.heads),
        "k": (k, hidden, sizes.kv_heads),
        "v": (v, hidden, 0),
        "gate": (wide, hidden, 0),
        "up": (wide, hidden, 0),
    } | common
