"""KV blocks between the device's memory and pinned host memory: one by one, as they are swapped, and all at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from appliance.engine.tiers.copy_engine import CopyEngine
from appliance.engine.tiers.copy_thread import CopyThread
from appliance.engine.tiers.cuda import CudaMover, pinned
from appliance.engine.tiers.memory import HostPool, MemoryMover
from appliance.engine.types import BlockCopy, BlockRef
from appliance.kernels.kv_layout import KVGroup, KVLayout
from benchmarks.device_check.report import Row, error
from benchmarks.device_check.sizes import Sizes


def swap(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    group = KVGroup(tuple(range(sizes.layers)), sizes.kv_heads, sizes.head_dim, sizes.dtypes[0])
    block_bytes, count = KVLayout((group,), 16).block_bytes(0), sizes.swap_blocks
    there = torch.randint(0, 256, (2 * count, block_bytes), dtype=torch.uint8, device=device)
    before = there.clone()
    here = torch.zeros(count, block_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    # Anywhere in the pool.
    places = torch.randperm(2 * count).tolist()[:count]

    def out_one_by_one() -> None:
        for slot, place in enumerate(places):
            here[slot].copy_(there[place], non_blocking=True)

    def in_one_by_one() -> None:
        for slot, place in enumerate(places):
            there[place].copy_(here[slot], non_blocking=True)

    yield _timed("out, block by block", out_one_by_one, here.nbytes, device)
    there[places] = 0
    yield _timed("in, block by block", in_one_by_one, here.nbytes, device)
    yield error("bytes that came back otherwise", int((there != before).sum()), "bytes", 0.0)
    yield from _by_the_engine(there, places)
    yield error("bytes that the engine brought back otherwise", int((there != before).sum()), "bytes", 0.0)
    whole = there[:count]
    yield _timed("out, all at once", lambda: here.copy_(whole, non_blocking=True), here.nbytes, device)
    yield _timed("in, all at once", lambda: whole.copy_(here, non_blocking=True), here.nbytes, device)
    yield Row("a block", block_bytes / 2**20, "MiB")


def _by_the_engine(there: torch.Tensor, places: list[int]) -> Iterator[Row]:
    on_gpu, (_, block_bytes) = there.device.type == "cuda", there.shape
    host = HostPool(len(places), block_bytes, pinned if on_gpu else None)
    engine: CopyEngine = CopyThread((CudaMover if on_gpu else MemoryMover)([there], [host]))
    pairs = [(BlockRef(0, "device", place), BlockRef(0, "host", slot)) for slot, place in enumerate(places)]

    def move(copies: list[BlockCopy]) -> None:
        ticket = engine.submit(copies)
        ticket.wait()
        if ticket.error:
            raise ticket.error

    moved = (len(places) * block_bytes, there.device)
    yield _timed("out, by the engine", lambda: move([BlockCopy(*pair) for pair in pairs]), *moved)
    there[places] = 0
    yield _timed("in, by the engine", lambda: move([BlockCopy(b, a) for a, b in pairs]), *moved)
    engine.close()


def _timed(label: str, move: Callable[[], object], num_bytes: int, device: torch.device) -> Row:
    move()
    _wait(device)
    start = time.perf_counter()
    move()
    _wait(device)
    return Row(label, num_bytes / (time.perf_counter() - start) / 1e9, "GB/s")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
