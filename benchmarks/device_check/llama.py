"""The shape of the model that is run, and what a step of it takes at least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from appliance.engine.families import read_spec
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.spec import DecoderSpec
from appliance.engine.types import PlanRow
from benchmarks.device_check.sizes import Sizes

# Of its weights.
DEVIATION = 0.02


def config_of(sizes: Sizes) -> dict[str, Any]:
    """As in config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.kv_heads * sizes.group,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    }


def spec_of(sizes: Sizes) -> DecoderSpec:
    return read_spec("LlamaForCausalLM", config_of(sizes), frozenset({"head"}))


def shapes(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """Rows and columns of each kind of matrix."""
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shape = {"q": (heads, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, heads)}
    shape |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return shape | {"embed": (spec.vocab_size, hidden), "head": (spec.vocab_size, hidden)}


def plan_row(place: int, start: int, count: int, per_sequence: int, spec: DecoderSpec) -> PlanRow:
    ids = tuple((place + 7 * token) % spec.vocab_size for token in range(count))
    table = tuple(range(place * per_sequence, (place + 1) * per_sequence))
    return PlanRow(str(place), ids, start, (table,), True, SamplingParams(temperature=0.0), (0,))


def needs(spec: DecoderSpec, streamed: int, rows: Sequence[PlanRow]) -> tuple[float, float]:
    """Bytes and floating-point operations of a step, logits being wanted of each row's last token."""
    token = 2 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    matrices = sum(r * c for name, (r, c) in shapes(spec).items() if name not in ("embed", "head"))
    head = spec.vocab_size * spec.hidden_size
    seen = sum(sum(range(row.start + 1, row.start + row.n_tokens + 1)) for row in rows)
    tokens = sum(row.n_tokens for row in rows)
    attention = 4 * seen * spec.num_heads * spec.head_dim * spec.num_layers
    flops = 2 * (tokens * matrices * spec.num_layers + len(rows) * head) + attention
    return streamed + token * sum(row.start + row.n_tokens for row in rows), flops
