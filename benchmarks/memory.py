"""KV memory under pressure, in ratios of one run: `python -m benchmarks.memory [--model PATH]`.

Blocks of the model's size go out of a pool and come back, in batches and from anywhere, beside one plain memcpy of as
many bytes: alone, and while the model decodes. Then what decoding loses meanwhile.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread

import torch
from rich.console import Console
from rich.table import Table

from appliance.engine.config import EngineConfig
from appliance.engine.engine import Engine
from appliance.engine.tiers.copy_engine import Way
from appliance.engine.tiers.copy_thread import CopyThread
from appliance.engine.tiers.memory import HostPool, MemoryMover
from appliance.engine.types import BlockCopy, BlockRef
from appliance.kernels.memory import anonymous
from benchmarks.engine import decode, starter

Share = tuple[str, float, float]
"""What is measured, the value, and what it is held against."""


class Swapping:
    """A pool in main memory whose blocks are all swapped, some at a time, beside memory of the same size to memcpy."""

    def __init__(self, block_bytes: int, blocks: int, batch: int) -> None:
        self._pool = anonymous(blocks * block_bytes).view(blocks, block_bytes)
        self._pool.random_(0, 256)
        self._other = torch.ones_like(self._pool)
        self._batch = batch
        self._engine = CopyThread(MemoryMover([self._pool], [HostPool(blocks, block_bytes)]))
        places = random.Random(0)
        self._order = [places.sample(range(blocks), blocks) for _ in range(2)]
        self.swap(Way.OUT)  # takes the host's memory

    def swap(self, way: Way) -> int:
        """Every block, one way: bytes."""
        pairs = [
            (BlockRef(0, "device", here), BlockRef(0, "host", there))
            for here, there in zip(*self._order, strict=True)
        ]
        copies = [BlockCopy(*(pair if way is Way.OUT else reversed(pair))) for pair in pairs]
        starts = range(0, len(copies), self._batch)
        tickets = [self._engine.submit(copies[start : start + self._batch]) for start in starts]
        for ticket in tickets:
            ticket.wait()
        self._engine.completed()
        return self._pool.nbytes

    def memcpy(self) -> int:
        """As many bytes by one call."""
        ctypes.memmove(self._other.data_ptr(), self._pool.data_ptr(), self._pool.nbytes)
        return self._pool.nbytes

    def close(self) -> None:
        self._engine.close()


def speed(move: Callable[[], int]) -> float:
    """GB/s."""
    start = time.perf_counter()
    moved = move()
    return moved / (time.perf_counter() - start) / 1e9


def meanwhile(move: Callable[[], int], work: Callable[[], float]) -> tuple[float, float]:
    """GB/s of moving for as long as the work takes, and what the work says."""
    ended, speeds = Event(), []

    def go_on() -> None:
        while not ended.is_set():
            speeds.append(speed(move))

    thread = Thread(target=go_on)
    thread.start()
    done = work()
    ended.set()
    thread.join()
    return statistics.median(speeds), done


def shares(swapping: Swapping, engine: Engine, options: argparse.Namespace) -> Iterator[Share]:
    """One round."""
    rng = random.Random(options.seed)

    def out_and_in() -> int:
        return swapping.swap(Way.OUT) + swapping.swap(Way.IN)

    def work() -> float:
        return decode(engine, rng, options.streams, options.tokens)

    memcpy = speed(swapping.memcpy)
    yield "swap out / memcpy, GB/s", speed(lambda: swapping.swap(Way.OUT)), memcpy
    yield "swap in / memcpy, GB/s", speed(lambda: swapping.swap(Way.IN)), memcpy
    alone = work()
    copied, beside_memcpy = meanwhile(swapping.memcpy, work)
    swapped, beside_swap = meanwhile(out_and_in, work)
    yield "swap / memcpy while decoding, GB/s", swapped, copied
    yield "swap while decoding / memcpy alone, GB/s", swapped, memcpy
    yield "decoding beside memcpy / alone, tok/s", beside_memcpy, alone
    yield "decoding while swapping / alone, tok/s", beside_swap, alone


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a .gguf file or a model folder; default: the starter")
    parser.add_argument("--mib", type=int, default=256, help="of blocks that are swapped")
    parser.add_argument("--batch", type=int, default=32, help="blocks of a batch")
    parser.add_argument("--streams", type=int, default=8, help="that are decoded meanwhile")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    options = parser.parse_args()
    model = (options.model or starter()).absolute()
    engine = Engine(EngineConfig(model_path=str(model), max_model_len=1024))
    block_bytes = engine.info.kv_block_bytes
    swapping = Swapping(block_bytes, options.mib * 2**20 // block_bytes, options.batch)
    rounds = [list(shares(swapping, engine, options)) for _ in range(options.rounds)]
    swapping.close()
    table = Table("figure", "value", "held against", "share", "range", title=f"{model.name}, medians")
    for figures in zip(*rounds, strict=True):
        value, against = (statistics.median(figure[i] for figure in figures) for i in (1, 2))
        ratios = [100 * figure[1] / figure[2] for figure in figures]
        span = f"{min(ratios):.0f} to {max(ratios):.0f}"
        table.add_row(
            figures[0][0], f"{value:.1f}", f"{against:.1f}", f"{statistics.median(ratios):.0f} %", span
        )
    Console().print(f"blocks of {block_bytes / 1024:.0f} KiB, {options.batch} a batch", table)


if __name__ == "__main__":
    main()
