"""`StepProgram`: one step of a model as a typed list of operations over named buffers. Imports no torch.

The decoder describes a step once; each executor runs the same list. Buffers are named, operations name what they read
and write, weights are named as the checkpoint reader names them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Embed:
    """out[row] = weight[token_id[row]]."""

    weight: str
    out: str


@dataclass(frozen=True, slots=True)
class RmsNorm:
    x: str
    weight: str
    out: str
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x · Wᵀ + bias, W being the named weights stacked along their rows."""

    x: str
    weights: tuple[str, ...]
    out: str


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotate the query and key heads of a qkv buffer in place, at each row's position."""

    qkv: str


@dataclass(frozen=True, slots=True)
class KvWrite:
    """Store the key and value heads of a qkv buffer in the KV pool."""

    qkv: str
    layer: int


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """out = attention of the query heads of a qkv buffer over each row's own context."""

    qkv: str
    layer: int
    out: str
    scale: float


@dataclass(frozen=True, slots=True)
class SiluMul:
    gate_up: str
    out: str


@dataclass(frozen=True, slots=True)
class AddTo:
    """target += x."""

    x: str
    target: str


Op = Embed | RmsNorm | Linear | Rope | KvWrite | PagedAttention | SiluMul | AddTo


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
