"""The same model in bf16 by torch's products and attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from appliance.engine.spec import DecoderSpec
from benchmarks.device_check.bandwidth import Peaks
from benchmarks.device_check.llama import DEVIATION, needs, plan_row, shapes, spec_of
from benchmarks.device_check.report import Row, short
from benchmarks.device_check.sizes import Sizes
from benchmarks.device_check.timing import Call, seconds


def torch_model(device: torch.device, sizes: Sizes, peaks: Peaks) -> Iterator[Row]:
    """The same shape in bf16 by torch's products and attention, keys and values in one tensor, as recorded graphs."""
    spec, dtype, context = spec_of(sizes), sizes.dtypes[-1], sizes.decode_contexts[0]
    peer = _TorchModel(spec, dtype, device)
    for batch, queries in [*((batch, 1) for batch in sizes.batches), (1, sizes.prefill)]:
        stop = context if queries == 1 else queries
        rows = [plan_row(place, stop - queries, queries, 0, spec) for place in range(batch)]
        floor = peaks.floor(*needs(spec, peer.streamed, rows))
        bound = None if floor is None else floor * 1e3
        run = peer.step(batch, queries, stop)
        taken = seconds([run], device, sizes.repeats)
        label = f"decode, batch {batch}" if queries == 1 else f"prefill, {queries:,} tokens"
        yield Row(f"{label}, torch, {short(dtype)}", taken * 1e3, "ms", bound)
        yield Row(f"{label}, torch, {short(dtype)}", batch * queries / taken, "tok/s")


class _TorchModel:
    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._dtype, self._device = spec, dtype, device
        shape, self._layers = shapes(spec), []
        stacks = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
        for _ in range(spec.num_layers):
            self._layers.append([self._random(sum(shape[n][0] for n in s), shape[s[0]][1]) for s in stacks])
        self._head = self._random(*shape["head"])
        self._norm = torch.ones(spec.hidden_size, dtype=dtype, device=device)

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=self._dtype, device=self._device) * DEVIATION

    @property
    def streamed(self) -> int:
        return self._head.nbytes + sum(each.nbytes for layer in self._layers for each in layer)

    def step(self, batch: int, queries: int, stop: int) -> Call:
        """A step of so many new tokens of each sequence, whose contexts end at `stop`."""
        spec = self._spec
        x = self._random(batch * queries, spec.hidden_size)
        shape = (spec.num_layers, 2, batch, spec.num_kv_heads, stop, spec.head_dim)
        cache = torch.zeros(shape, dtype=self._dtype, device=self._device)
        angle = torch.arange(stop - queries, stop, device=self._device)[:, None] * torch.linspace(
            0.1, 1.0, spec.head_dim // 2, device=self._device
        )
        cos, sin = (each.to(self._dtype).repeat(1, 2) for each in (angle.cos(), angle.sin()))

        def rotated(heads: torch.Tensor) -> torch.Tensor:
            first, second = heads.chunk(2, dim=-1)
            return heads * cos + torch.cat([-second, first], dim=-1) * sin

        @torch.inference_mode()
        def run() -> torch.Tensor:
            functional, hidden = torch.nn.functional, x
            for (qkv, o, gate_up, down), (keys, values) in zip(self._layers, cache, strict=True):
                normed = functional.rms_norm(hidden, (spec.hidden_size,), self._norm, spec.norm_eps)
                heads = functional.linear(normed, qkv).view(batch, queries, -1, spec.head_dim).transpose(1, 2)
                q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
                keys[:, :, stop - queries :] = rotated(k)
                values[:, :, stop - queries :] = v
                attended = functional.scaled_dot_product_attention(
                    rotated(q), keys, values, is_causal=queries > 1, enable_gqa=True
                )
                hidden = hidden + functional.linear(attended.transpose(1, 2).reshape(len(x), -1), o)
                normed = functional.rms_norm(hidden, (spec.hidden_size,), self._norm, spec.norm_eps)
                gate, up = functional.linear(normed, gate_up).chunk(2, dim=-1)
                hidden = hidden + functional.linear(functional.silu(gate) * up, down)
            last = hidden.view(batch, queries, -1)[:, -1]
            normed = functional.rms_norm(last, (spec.hidden_size,), self._norm, spec.norm_eps)
            return functional.linear(normed, self._head)

        return run
