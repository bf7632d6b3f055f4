"""What the operations of a step have to move and compute, and how soon a GPU could have done it; nothing measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from appliance.engine import program as ops
from appliance.engine.decoder import build_program
from appliance.engine.families import read_spec
from appliance.engine.spec import DecoderSpec

_KEPT = Path(__file__).parents[1] / "gpu_report" / "kept.json"
_TRITON = "3.7.1"
# Of kernels/linear: how a product's columns are split (gpu_split.py), and rows up to which splits are programs.
_TILE_ROWS, _ENOUGH_PROGRAMS, _ENOUGH_BLOCKS, _ROWS_APART = 64, 192, 8, 32


@dataclass(frozen=True)
class Device:
    """A GPU by its data sheet.

    Attributes:
        bandwidth: of its memory, bytes a second.
        flops: of tensor cores on 16-bit floats, added up in float32, a second, without sparsity.
        cache: bytes of L2.
        issue: instructions of a lane that its schedulers can issue in a second: four warps of 32 lanes in each
            multiprocessor and cycle, at the boost clock.
    """

    name: str
    architecture: str
    bandwidth: float
    flops: float
    cache: int
    issue: float


DEVICES = (
    # NVIDIA Ampere GA102 GPU Architecture whitepaper, table of the RTX 3090: 82 SMs, 1695 MHz, 936 GB/s, 6144 KB of L2,
    # "peak FP16 tensor TFLOPS with FP32 accumulate" 71.
    Device("RTX 3090", "sm_86", 936e9, 71e12, 6144 << 10, 82 * 128 * 1.695e9),
    # NVIDIA Ada GPU Architecture whitepaper, appendix A, RTX 4090: 128 SMs, 2520 MHz, 1008 GB/s, 73728 KB of L2, 165.2.
    Device("RTX 4090", "sm_89", 1008e9, 165.2e12, 73728 << 10, 128 * 128 * 2.52e9),
)


@dataclass(frozen=True)
class Scheme:
    """How matrices are held.

    Attributes:
        bits: of a weight, with its share of scales and zero points.
        block: columns that a product's loop takes in one turn.
        compiled: of quantised ones, the product's row in the compile table.
    """

    name: str
    bits: float
    block: int
    compiled: str = ""


DENSE = Scheme("bf16", 16, 64)
GROUPS_OF_128 = Scheme(
    "4 bit, groups of 128, zero points", 4 + (16 + 8) / 128, 128, "linear zp4 g128 fp16 8x64 2w 4s"
)
GROUPS_OF_32 = Scheme("4 bit, groups of 32", 4 + 16 / 32, 128, "linear sym4 g32 fp16 8x64 2w 4s")
INT8 = Scheme("int8", 8 + 16 / 32, 64, "linear sym8 g32 fp16 8x64 2w 4s")


@dataclass(frozen=True)
class Model:
    """A decoder's shape; its config.json has what a shape needs."""

    name: str
    config: Mapping[str, Any]

    @cached_property
    def spec(self) -> DecoderSpec:
        (architecture,) = self.config["architectures"]
        return read_spec(architecture, self.config, frozenset({"head"}))

    def shape(self, name: str) -> tuple[int, int]:
        """Rows and columns of a matrix."""
        spec, part = self.spec, name.rsplit(".", 1)[-1]
        inner = self.config["moe_intermediate_size"] if ".experts." in name else spec.intermediate_size
        attention, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        rows = {"q": attention, "k": kv, "v": kv, "o": spec.hidden_size, "gate": inner, "up": inner}
        rows |= {
            "down": spec.hidden_size,
            "head": spec.vocab_size,
            "router": self.config.get("num_experts", 0),
        }
        return rows[part], {"o": attention, "down": inner}.get(part, spec.hidden_size)


@dataclass(frozen=True)
class Setting:
    """What a model is run with.

    Attributes:
        kv_bytes: of an element of a key or value; int8 ones have a float32 scale for each head.
    """

    layers: Scheme = GROUPS_OF_128
    head: Scheme = DENSE
    kv_bytes: int = 2


@dataclass(frozen=True)
class Load:
    """A step's tokens: so many sequences with so many new ones each, at whose end a context has so many."""

    sequences: int
    context: int
    queries: int = 1

    @property
    def rows(self) -> int:
        return self.sequences * self.queries

    @property
    def seen(self) -> int:
        """Keys that all queries look at together."""
        return self.sequences * (self.queries * self.context - self.queries * (self.queries - 1) // 2)


@dataclass(frozen=True)
class Cost:
    """Of one operation.

    Attributes:
        memory: bytes of weights, keys and values.
        passing: bytes that the operation before has left, or that the next one will read.
        flops: of tensor cores.
        codes: quantised weights that are turned into numbers, once for each tile of rows.
        launches: of kernels.
    """

    name: str
    memory: float = 0
    passing: float = 0
    flops: float = 0
    codes: Mapping[str, float] | None = None
    launches: int = 1

    def seconds(self, device: Device) -> float:
        """As soon as it could be done: memory, tensor cores and schedulers each at their peak, all at the same time."""
        return max(self.moving(device), self.flops / device.flops, self.issuing(device))

    def moving(self, device: Device) -> float:
        """What passes is in the cache where it fits."""
        passing = self.passing if self.passing > device.cache else 0
        return (self.memory + passing) / device.bandwidth

    def issuing(self, device: Device) -> float:
        lanes = sum(count * _instructions(name, device) for name, count in (self.codes or {}).items())
        return lanes / device.issue


@cache
def _instructions(compiled: str, device: Device) -> float:
    """Of a lane for a weight, by the compile table."""
    kept = json.loads(_KEPT.read_text())
    return float(kept[_TRITON][device.architecture][compiled]["instructions"])


def step(model: Model, setting: Setting, load: Load) -> list[Cost]:
    """The cost of each operation of a step; logits are wanted of each sequence's last token."""
    spec = model.spec
    program = build_program(spec)
    of_head = Load(load.sequences, load.context)
    return [_cost(op, model, spec, setting, load) for op in program.body] + [
        _cost(op, model, spec, setting, of_head) for op in program.head
    ]


def _cost(op: ops.Op, model: Model, spec: DecoderSpec, setting: Setting, load: Load) -> Cost:
    hidden, rows = 2 * spec.hidden_size * load.rows, load.rows
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads
    # Of a token: keys and values of all heads of a layer.
    token = 2 * kv_heads * (spec.head_dim * setting.kv_bytes + 4 * (setting.kv_bytes == 1))
    match op:
        case ops.Embed():
            # Taken, and scaled.
            return Cost("embedding", hidden, hidden)
        case ops.RmsNorm() | ops.AddTo():
            return Cost("norms and additions", 0, 2 * hidden)
        case ops.QKRmsNorm() | ops.Rope():
            return Cost("qkv norms, rope, kv write", launches=0)
        case ops.KvWrite():
            return Cost("qkv norms, rope, kv write", rows * token, 2 * rows * (2 * heads + token))
        case ops.PagedAttention():
            launches = 2 if load.queries == 1 else 3
            memory, flops = load.sequences * load.context * token, 4 * load.seen * heads
            return Cost("attention", memory, 4 * rows * heads, flops, launches=launches)
        case ops.Linear():
            return _product(op, model, setting, rows)
        case ops.GatedProduct():
            return Cost("gated product", 0, 3 * 2 * rows * spec.intermediate_size)
        case ops.Route():
            return Cost("routing", 0, 4 * rows * model.config["num_experts"])
        case ops.Experts():
            return _experts(op, model, setting, rows)
    raise AssertionError(op)


def _product(op: ops.Linear, model: Model, setting: Setting, rows: int) -> Cost:
    shapes = [model.shape(name) for name in op.weights]
    outputs, inputs = sum(shape[0] for shape in shapes), shapes[0][1]
    kind = op.weights[0].rsplit(".", 1)[-1]
    name = {"q": "qkv", "gate": "gate and up"}.get(kind, kind)
    scheme = {"head": setting.head, "router": DENSE}.get(kind, setting.layers)
    weights = outputs * inputs
    merges = rows <= _ROWS_APART and splits(outputs, inputs, scheme.block) > 1
    codes = {scheme.compiled: weights * -(-rows // _TILE_ROWS)} if scheme.compiled else None
    passing = 2 * rows * (inputs + outputs)
    return Cost(name, weights * scheme.bits / 8, passing, 2 * rows * weights, codes, 2 if merges else 1)


def _experts(op: ops.Experts, model: Model, setting: Setting, rows: int) -> Cost:
    """Routers are taken to choose every expert equally often."""
    shapes = [model.shape(name) for name in (*op.gate_ups[0], *op.downs[0])]
    weights, experts = sum(outputs * inputs for outputs, inputs in shapes), len(op.downs)
    top_k = model.config["num_experts_per_tok"]
    chosen = experts * (1 - (1 - top_k / experts) ** rows)
    tiles = chosen * max(1, rows * top_k / chosen / _TILE_ROWS)
    passing = 2 * rows * top_k * sum(outputs + inputs for outputs, inputs in shapes)
    return Cost(
        "experts",
        chosen * weights * setting.layers.bits / 8,
        passing,
        2 * rows * top_k * weights,
        {setting.layers.compiled: tiles * weights},
        len(EXPERT_LAUNCHES),
    )


# What becomes of experts: choices are sorted and the experts' places found, then computed, then added up.
EXPERT_LAUNCHES = ("sort", "bounds", "search", "gate and up", "gated product", "down", "combine")


def splits(rows: int, columns: int, block: int) -> int:
    """As `num_splits` of kernels/linear/gpu_split.py, which imports Triton."""
    tiles, blocks = -(-rows // _TILE_ROWS), -(-columns // block)
    count = 1
    while tiles * count < _ENOUGH_PROGRAMS and blocks >= 2 * count * _ENOUGH_BLOCKS:
        count *= 2
    return count


def by_name(costs: list[Cost]) -> Iterator[tuple[str, Cost, int]]:
    """Of each kind of operation: its name, the first of them, and how many there are."""
    for name in dict.fromkeys(cost.name for cost in costs):
        same = [cost for cost in costs if cost.name == name and cost.launches]
        yield name, same[0], len(same)
