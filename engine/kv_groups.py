"""Which layers of a model share their kind of KV memory."""

from __future__ import annotations

import torch

from appliance.engine.spec import DecoderSpec
from appliance.kernels.kv_layout import KVGroup


def kv_groups(spec: DecoderSpec, dtype: torch.dtype) -> tuple[KVGroup, ...]:
    """Layers that see equally far share a group; those that see everything come first."""
    layers: dict[int, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        layers.setdefault(layer.window, []).append(index)
    return tuple(
        KVGroup(tuple(indices), spec.num_kv_heads, spec.head_dim, dtype, window)
        for window, indices in sorted(layers.items())
    )
