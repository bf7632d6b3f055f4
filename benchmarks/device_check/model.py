"""A model of Llama 3.1 8B's shape with random 4-bit weights, through the executor; and torch's bf16 beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from appliance.engine import program as ops
from appliance.engine.decoder import build_program
from appliance.engine.executors.gpu_batch import build_gpu_batch
from appliance.engine.executors.gpu_executor import GpuExecutor
from appliance.engine.families import read_spec
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.spec import DecoderSpec
from appliance.engine.types import PlanRow
from appliance.engine.weights import ModelWeights
from appliance.kernels.kv_layout import KVGroup, KVLayout
from appliance.quant.scheme import Mode, QuantScheme
from appliance.quant.tensor import DenseTensor, QuantizedLinear, QuantTensor
from benchmarks.device_check.bandwidth import Peaks
from benchmarks.device_check.parity import short
from benchmarks.device_check.report import Row
from benchmarks.device_check.sizes import Sizes
from benchmarks.device_check.timing import Call, seconds

_SCHEME = QuantScheme(4, 128, Mode.ZP)
_BLOCK = 16
# What a weight's standard deviation is, and of codes of which each is as likely as another.
_DEVIATION, _SPREAD = 0.02, 4.6
_STEPS = 20
_KERNELS = 12


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


class RandomWeights(ModelWeights):
    """Weights of a spec, made where they are used: 4 bit, embedding and head dense, all norms ones."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._width, self._shapes, self._dtype, self._device = spec.hidden_size, shapes(spec), dtype, device

    def elements(self, names: tuple[str, ...]) -> int:
        rows, columns = self._shape(names)
        return rows * columns

    def vector(self, name: str) -> torch.Tensor:  # noqa: ARG002
        return torch.ones(self._width)

    def linear(self, names: tuple[str, ...]) -> QuantizedLinear:
        shape, device = self._shape(names), self._device
        if names[0] in ("embed", "head"):
            data = torch.randn(shape, dtype=self._dtype, device=device) * _DEVIATION
            return QuantizedLinear((DenseTensor(data),))
        groups = (shape[0], -(-shape[1] // _SCHEME.group_size))
        codes = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8, device=device)
        scales = torch.full(groups, _DEVIATION / _SPREAD, dtype=torch.float16, device=device)
        zeros = torch.randint(7, 9, groups, dtype=torch.uint8, device=device)
        return QuantizedLinear((QuantTensor(codes, scales, shape, _SCHEME, zeros=zeros),))

    def bias(self, names: tuple[str, ...]) -> None:  # noqa: ARG002
        return None

    def _shape(self, names: tuple[str, ...]) -> tuple[int, int]:
        found = [self._shapes[name.rsplit(".", 1)[-1]] for name in names]
        return sum(rows for rows, _ in found), found[0][1]


def model(device: torch.device, sizes: Sizes, peaks: Peaks) -> Iterator[Row]:
    """Steps as the engine runs them, and the same launches recorded in a graph."""
    spec, dtype, context = spec_of(sizes), sizes.dtypes[0], sizes.decode_contexts[0]
    program = build_program(spec)
    group = KVGroup(tuple(range(spec.num_layers)), spec.num_kv_heads, spec.head_dim, dtype)
    layout = KVLayout((group,), _BLOCK)
    start = time.perf_counter()
    weights = RandomWeights(spec, dtype, device)
    executor = GpuExecutor(
        program, spec, weights, layout, device=device, dtype=dtype, progress=lambda _done, _all: None
    )
    _wait(device)
    yield Row("made and packed", time.perf_counter() - start, "s")
    embedding = spec.vocab_size * spec.hidden_size
    streamed = executor.weight_bytes - embedding * dtype.itemsize
    yield Row("weights that a step reads", streamed / 1e9, "GB")
    longest = max(context, sizes.prefill)
    per_sequence = -(-longest // _BLOCK)
    executor.attach_pools([max(sizes.batches) * per_sequence], longest)
    for batch in sizes.batches:
        rows = [_plan_row(place, context - 1, 1, per_sequence, spec) for place in range(batch)]
        floor = peaks.floor(*_needs(spec, streamed, rows))
        yield from _steps(f"decode, batch {batch}", executor, program, rows, floor, device, sizes)
    prompt = [_plan_row(0, 0, sizes.prefill, per_sequence, spec)]
    floor = peaks.floor(*_needs(spec, streamed, prompt))
    yield from _steps(f"prefill, {sizes.prefill:,} tokens", executor, program, prompt, floor, device, sizes)
    if device.type == "cuda":
        rows = [_plan_row(place, context - 1, 1, per_sequence, spec) for place in range(sizes.batches[0])]
        yield from _by_kernel(executor, rows)


def _plan_row(place: int, start: int, count: int, per_sequence: int, spec: DecoderSpec) -> PlanRow:
    ids = tuple((place + 7 * token) % spec.vocab_size for token in range(count))
    table = tuple(range(place * per_sequence, (place + 1) * per_sequence))
    return PlanRow(str(place), ids, start, (table,), True, SamplingParams(temperature=0.0), (0,))


def _needs(spec: DecoderSpec, streamed: int, rows: Sequence[PlanRow]) -> tuple[float, float]:
    """Bytes and floating-point operations of a step, logits being wanted of each row's last token."""
    token = 2 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    matrices = sum(r * c for name, (r, c) in shapes(spec).items() if name not in ("embed", "head"))
    head = spec.vocab_size * spec.hidden_size
    seen = sum(sum(range(row.start + 1, row.start + row.n_tokens + 1)) for row in rows)
    tokens = sum(row.n_tokens for row in rows)
    attention = 4 * seen * spec.num_heads * spec.head_dim * spec.num_layers
    flops = 2 * (tokens * matrices * spec.num_layers + len(rows) * head) + attention
    return streamed + token * sum(row.start + row.n_tokens for row in rows), flops


def _steps(
    label: str,
    executor: GpuExecutor,
    program: ops.StepProgram,
    rows: Sequence[PlanRow],
    floor: float | None,
    device: torch.device,
    sizes: Sizes,
) -> Iterator[Row]:
    bound = None if floor is None else floor * 1e3
    last, stop = [], 0
    for row in rows:
        stop += row.n_tokens
        last.append(stop - 1)

    def step() -> None:
        output = executor.run(rows, last)
        assert bool(output.finite.all())
        assert min(output.largest.tolist()) >= 0

    step()
    steps = _STEPS if device.type == "cuda" else 1
    start = time.perf_counter()
    for _ in range(steps):
        step()
    taken = (time.perf_counter() - start) / steps
    yield Row(f"{label}, as the engine steps", taken * 1e3, "ms", bound)
    yield Row(f"{label}, as the engine steps", sum(row.n_tokens for row in rows) / taken, "tok/s")
    batch = build_gpu_batch(rows, _BLOCK, device)
    wanted = torch.tensor(last, device=device)
    taken = seconds([lambda: launch(executor, program, batch, wanted)], device, sizes.repeats)
    yield Row(f"{label}, recorded", taken * 1e3, "ms", bound)
    yield Row(f"{label}, recorded", sum(row.n_tokens for row in rows) / taken, "tok/s")


@torch.inference_mode()
def launch(
    executor: GpuExecutor, program: ops.StepProgram, batch: object, wanted: torch.Tensor
) -> torch.Tensor:
    """What `GpuExecutor.run` does once its batch is on the device; logits of the wanted tokens."""
    executor._buffers.clear()
    for op in executor._body:
        executor._HANDLERS[type(op)](executor, op, batch)
    executor._buffers[program.hidden] = executor._buffers[program.hidden][wanted]
    for op in program.head:
        executor._HANDLERS[type(op)](executor, op, batch)
    return executor._buffers[program.output]


def _by_kernel(executor: GpuExecutor, rows: Sequence[PlanRow]) -> Iterator[Row]:
    """Where a step's time goes on the device."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(_STEPS):
            executor.run(rows, range(len(rows)))
        torch.cuda.synchronize()
    kernels = sorted(profiled.key_averages(), key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in kernels)
    count = sum(each.count for each in kernels)
    yield Row(f"kernels of a step, batch {len(rows)}", count / _STEPS, "launches")
    yield Row(f"kernels of a step, batch {len(rows)}", total / _STEPS, "µs")
    for each in kernels[:_KERNELS]:
        yield Row(f"of it {each.key[:60]}", each.self_device_time_total / _STEPS, "µs")


def torch_model(device: torch.device, sizes: Sizes, peaks: Peaks) -> Iterator[Row]:
    """The same shape in bf16 by torch's products and attention, keys and values in one tensor, as recorded graphs."""
    spec, dtype, context = spec_of(sizes), sizes.dtypes[-1], sizes.decode_contexts[0]
    peer = _TorchModel(spec, dtype, device)
    for batch, queries in [*((batch, 1) for batch in sizes.batches), (1, sizes.prefill)]:
        stop = context if queries == 1 else queries
        rows = [_plan_row(place, stop - queries, queries, 0, spec) for place in range(batch)]
        floor = peaks.floor(*_needs(spec, peer.streamed, rows))
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
        return torch.randn(rows, columns, dtype=self._dtype, device=self._device) * _DEVIATION

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


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
