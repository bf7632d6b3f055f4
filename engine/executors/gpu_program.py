"""A step program as the GPU runs it: what happens between a qkv product and attention is one operation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from appliance.engine import program as ops


@dataclass(frozen=True, slots=True)
class FinishQkv:
    """Norm and rotate, store keys and values; the buffer then holds the queries alone.

    Attributes:
        norm: None where queries and keys have none.
        rope: index of the spec's ropes; None where positions are not turned.
    """

    qkv: str
    layer: int
    norm: ops.QKRmsNorm | None
    rope: int | None


def finish_qkv_at_once(body: Iterable[ops.Op]) -> tuple[ops.Op | FinishQkv, ...]:
    """The body with each run of `QKRmsNorm`, `Rope` and `KvWrite` as one `FinishQkv`."""
    fused: list[ops.Op | FinishQkv] = []
    norm, rope = None, None
    for op in body:
        match op:
            case ops.QKRmsNorm():
                norm = op
            case ops.Rope():
                rope = op.index
            case ops.KvWrite():
                fused.append(FinishQkv(op.qkv, op.layer, norm, rope))
                norm, rope = None, None
            case _:
                fused.append(op)
    return tuple(fused)
