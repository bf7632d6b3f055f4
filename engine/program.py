"""`StepProgram`: one step of a model as a typed list of operations over named buffers. Imports no torch.

The decoder describes a step once; each executor runs the same list. Buffers are named, operations name what they read
and write, weights are named as the checkpoint reader names them.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.engine.spec import Activation, ClampedSwiglu


@dataclass(frozen=True, slots=True)
class Embed:
    """out[row] = weight[token_id[row]] · scale."""

    weight: str
    out: str
    scale: float


@dataclass(frozen=True, slots=True)
class RmsNorm:
    x: str
    weight: str
    out: str
    eps: float


@dataclass(frozen=True, slots=True)
class QKRmsNorm:
    """Normalise the queries and the keys of a qkv buffer in place: each head, or all heads of a token together."""

    qkv: str
    q_weight: str
    k_weight: str
    eps: float
    whole: bool


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x · Wᵀ + bias, W being the named weights stacked along their rows."""

    x: str
    weights: tuple[str, ...]
    out: str


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotate the query and key heads of a qkv buffer in place, at each row's position, by the spec's rope `index`."""

    qkv: str
    index: int


@dataclass(frozen=True, slots=True)
class KvWrite:
    """Store the key and value heads of a qkv buffer in the KV pool."""

    qkv: str
    layer: int


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """out = attention of the query heads of a qkv buffer over each row's own context.

    Attributes:
        window: a token sees itself and window - 1 tokens before it; 0: all.
        softcap: c of c · tanh(score / c); 0 where there is none.
        sinks: weight with a score for attending to nothing, of each head; "" where there is none.
    """

    qkv: str
    layer: int
    out: str
    scale: float
    window: int
    softcap: float
    sinks: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """Choose each row's `top_k` experts, and how much of each, from the logits of all.

    Attributes:
        chosen: the experts, int64 [rows, top_k].
        weights: of them, float32; they sum to one where `normalised`, else they are the probabilities.
    """

    logits: str
    chosen: str
    weights: str
    top_k: int
    normalised: bool


@dataclass(frozen=True, slots=True)
class Experts:
    """out = the weighted sum of what each row's experts make of x: down(activation(gate) · up).

    Attributes:
        gate_ups, downs: of each expert, the weights whose rows are stacked, as in `Linear`.
    """

    x: str
    chosen: str
    weights: str
    gate_ups: tuple[tuple[str, ...], ...]
    downs: tuple[tuple[str, ...], ...]
    out: str
    activation: Activation | ClampedSwiglu


@dataclass(frozen=True, slots=True)
class GatedProduct:
    """out = activation(gate) · up, the gate being the first half of each row of gate_up."""

    gate_up: str
    out: str
    activation: Activation


@dataclass(frozen=True, slots=True)
class AddTo:
    """target += x · scale."""

    x: str
    target: str
    scale: float


@dataclass(frozen=True, slots=True)
class ScaleLogits:
    """In place, logits · scale, then c · tanh(logits / c) where softcap is c and not 0."""

    logits: str
    scale: float
    softcap: float


Op = (
    Embed
    | RmsNorm
    | QKRmsNorm
    | Linear
    | Rope
    | KvWrite
    | PagedAttention
    | Route
    | Experts
    | GatedProduct
    | AddTo
    | ScaleLogits
)


def matrices(op: Op) -> tuple[tuple[str, ...], ...]:
    """The matrices that an operation multiplies with, each the weights whose rows are stacked."""
    if isinstance(op, Linear):
        return (op.weights,)
    return (*op.gate_ups, *op.downs) if isinstance(op, Experts) else ()


def matrix_names(program: StepProgram) -> list[str]:
    """The weights that are matrices, each once: embeddings first, then in the order of their use."""
    embeddings = [op.weight for op in program.ops if isinstance(op, Embed)]
    stacked = [name for op in program.ops for names in matrices(op) for name in names]
    return list(dict.fromkeys([*embeddings, *stacked]))


def vectors(op: Op) -> tuple[str, ...]:
    """The weights that are no matrices: of norms, and sinks."""
    match op:
        case RmsNorm():
            return (op.weight,)
        case QKRmsNorm():
            return (op.q_weight, op.k_weight)
        case PagedAttention() if op.sinks:
            return (op.sinks,)
    return ()


@dataclass(frozen=True, slots=True)
class StepProgram:
    """The operations of a step in order.

    Attributes:
        body: for all tokens of the batch; leaves the hidden states [tokens, hidden] in the buffer `hidden`.
        head: turns rows of `hidden` into logits [rows, vocab] in the buffer `output`; run on as few rows at a time
            as memory asks for.
    """

    body: tuple[Op, ...]
    hidden: str
    head: tuple[Op, ...]
    output: str

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.body + self.head
