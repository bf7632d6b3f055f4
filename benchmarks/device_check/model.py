"""A model of Llama 3.1 8B's shape with random 4-bit weights, through the executor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from appliance.engine.decoder import build_program
from appliance.engine.executors.gpu_batch import build_gpu_batch
from appliance.engine.executors.gpu_executor import GpuExecutor
from appliance.engine.spec import DecoderSpec
from appliance.engine.types import PlanRow
from appliance.engine.weights import ModelWeights
from appliance.kernels.kv_layout import KVGroup, KVLayout
from appliance.quant.scheme import Mode, QuantScheme
from appliance.quant.tensor import DenseTensor, QuantizedLinear, QuantTensor
from benchmarks.device_check.bandwidth import Peaks
from benchmarks.device_check.llama import DEVIATION, needs, plan_row, shapes, spec_of
from benchmarks.device_check.report import Row
from benchmarks.device_check.sizes import Sizes
from benchmarks.device_check.timing import seconds

_SCHEME = QuantScheme(4, 128, Mode.ZP)
_BLOCK = 16
# The standard deviation of codes of which each is as likely as another.
_SPREAD = 4.6
_STEPS = 20
_KERNELS = 12


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
            data = torch.randn(shape, dtype=self._dtype, device=device) * DEVIATION
            return QuantizedLinear((DenseTensor(data),))
        groups = (shape[0], -(-shape[1] // _SCHEME.group_size))
        codes = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8, device=device)
        scales = torch.full(groups, DEVIATION / _SPREAD, dtype=torch.float16, device=device)
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
        rows = [plan_row(place, context - 1, 1, per_sequence, spec) for place in range(batch)]
        floor = peaks.floor(*needs(spec, streamed, rows))
        yield from _steps(f"decode, batch {batch}", executor, rows, floor, device, sizes)
    prompt = [plan_row(0, 0, sizes.prefill, per_sequence, spec)]
    floor = peaks.floor(*needs(spec, streamed, prompt))
    yield from _steps(f"prefill, {sizes.prefill:,} tokens", executor, prompt, floor, device, sizes)
    if device.type == "cuda":
        rows = [plan_row(place, context - 1, 1, per_sequence, spec) for place in range(sizes.batches[0])]
        yield from _by_kernel(executor, rows)


def _steps(
    label: str,
    executor: GpuExecutor,
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
    with torch.inference_mode():
        launch = [lambda: executor.head(executor.launch(batch)[wanted])]
        taken = seconds(launch, device, sizes.repeats)
    yield Row(f"{label}, recorded", taken * 1e3, "ms", bound)
    yield Row(f"{label}, recorded", sum(row.n_tokens for row in rows) / taken, "tok/s")


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


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
