"""The weights of a decoder: canonical names and the shapes that its metadata asks for. No torch.

Canonical names: `embed`, `final_norm`, `head` (absent where it is tied to `embed`), and for each layer `layers.{i}.` +
`attn_norm`, `q`, `k`, `v`, `o`, `mlp_norm`, `gate`, `up`, `down`; biases add `.bias`.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def decoder_slots(sizes: Sizes) -> dict[str, Slot]:
    """Every weight of a dense Llama, by canonical name."""
    hidden = sizes.hidden
    slots = {
        "embed": Slot((sizes.vocab, hidden)),
        "final_norm": Slot((hidden,)),
        "head": Slot((sizes.vocab, hidden), optional=True),
    }
    linears = {
        "q": (sizes.heads * sizes.key_dim, hidden, sizes.heads),
        "k": (sizes.kv_heads * sizes.key_dim, hidden, sizes.kv_heads),
        "v": (sizes.kv_heads * sizes.value_dim, hidden, 0),
        "o": (hidden, sizes.heads * sizes.value_dim, 0),
        "gate": (sizes.intermediate, hidden, 0),
        "up": (sizes.intermediate, hidden, 0),
        "down": (hidden, sizes.intermediate, 0),
    }
    for layer in range(sizes.layers):
        p = f"layers.{layer}."
        slots[p + "attn_norm"] = slots[p + "mlp_norm"] = Slot((hidden,))
        for name, (rows, columns, heads) in linears.items():
            slots[p + name] = Slot((rows, columns), rope_heads=heads)
            slots[p + name + ".bias"] = Slot((rows,), optional=True, rope_heads=heads)
    return slots
