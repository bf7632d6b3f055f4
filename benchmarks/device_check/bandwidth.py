"""What the device can do at best: memory, tensor cores, launches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from benchmarks.device_check.report import Row, error
from benchmarks.device_check.sizes import Sizes
from benchmarks.device_check.timing import seconds

READ, PRODUCTS = "read", "product of matrices, bf16"
_TILE = 4096


@dataclass(frozen=True)
class Peaks:
    """Bytes and floating-point operations a second, as measured; None where they were not."""

    bandwidth: float | None = None
    flops: float | None = None

    @classmethod
    def of(cls, rows: Mapping[str, Row]) -> Peaks:
        read, products = rows.get(READ), rows.get(PRODUCTS)
        return cls(read and read.value * 1e9, products and products.value * 1e12)

    def floor(self, num_bytes: float, flops: float = 0) -> float | None:
        """Seconds, the least for so much."""
        if self.bandwidth is None or self.flops is None:
            return None
        return max(num_bytes / self.bandwidth, flops / self.flops)


@triton.jit
def _read_kernel(sums, data, turns, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * turns * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.int32)
    for turn in range(turns):
        total += tl.load(data + place + turn * TILE)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _empty_kernel(x):
    pass


def bandwidth(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    data = torch.ones(sizes.stream_bytes // 4, dtype=torch.int32, device=device)
    turns = 8
    sums = torch.zeros(data.numel() // (turns * _TILE), dtype=torch.int32, device=device)

    def read() -> None:
        _read_kernel[(len(sums),)](sums, data, turns, TILE=_TILE, num_warps=8)

    taken = seconds([read], device, sizes.repeats)
    yield Row(READ, len(sums) * turns * _TILE * 4 / taken / 1e9, "GB/s")
    yield error("read: what is missing", float(len(sums) * turns * _TILE - sums.sum()), "elements", 0.0)
    other = torch.empty_like(data)
    taken = seconds([lambda: other.copy_(data)], device, sizes.repeats)
    yield Row("copy, read and written", 2 * data.nbytes / taken / 1e9, "GB/s")
    left, right = (torch.randn(sizes.square, sizes.square, device=device).bfloat16() for _ in range(2))
    taken = seconds([lambda: left @ right], device, sizes.repeats)
    yield Row(PRODUCTS, 2 * sizes.square**3 / taken / 1e12, "TFLOP/s")
    yield from _launches(device, sizes)


def _launches(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    x = torch.zeros(1, device=device)

    def launch() -> None:
        _empty_kernel[(1,)](x)

    launch()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(sizes.launches):
        launch()
    taken = time.perf_counter() - start
    yield Row("launch of a Triton kernel, host", taken / sizes.launches * 1e6, "µs")
    taken = seconds([launch] * sizes.launches, device, sizes.repeats)
    yield Row("launch in a recorded graph", taken * 1e6, "µs")
    taken = seconds([lambda: x.add_(1)] * sizes.launches, device, sizes.repeats)
    yield Row("launch of torch's smallest operation in a recorded graph", taken * 1e6, "µs")
