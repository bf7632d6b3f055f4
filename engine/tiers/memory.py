"""The bytes of KV blocks: each group's pool on the device and its pool in main memory, and moving them by the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from appliance.engine.tiers.copy_thread import Run
from appliance.engine.types import BlockRef
from appliance.kernels.memory import anonymous, copy_bytes

log = logging.getLogger("appliance.engine")

Allocate = Callable[[int], torch.Tensor]
"""Takes some bytes of main memory: uint8 [bytes]. Raises RuntimeError where they are refused."""

Place = tuple[torch.Tensor, int]
"""Some memory, uint8 [blocks, block_bytes], and the number of a block in it."""

_CHUNK_BYTES = 64 * 2**20


class HostPool:
    """Blocks of one KV group in main memory, which is taken by chunks of them as they are first used.

    Args:
        pinned: takes memory that the device copies from and to by itself; None where there is no such device.

    Attributes:
        note: why memory is not pinned though it was asked for, "" where it is or nobody asked.
    """

    def __init__(self, num_blocks: int, block_bytes: int, pinned: Allocate | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.note = ""
        self._pinned = pinned
        self._chunk_blocks = max(1, _CHUNK_BYTES // block_bytes)
        self._chunks: dict[int, torch.Tensor] = {}

    @property
    def taken_bytes(self) -> int:
        """Memory taken; of what is not pinned, pages never written count though they cost nothing."""
        return sum(chunk.nbytes for chunk in self._chunks.values())

    def locate(self, block: int) -> Place:
        """Where a block is.

        Raises:
            OSError: there is no memory.
        """
        number, index = divmod(block, self._chunk_blocks)
        if number not in self._chunks:
            blocks = min(self._chunk_blocks, self.num_blocks - number * self._chunk_blocks)
            self._chunks[number] = self._take(blocks * self.block_bytes).view(blocks, self.block_bytes)
        return self._chunks[number], index

    def close(self) -> None:
        """Give the memory back; what it held is lost."""
        self._chunks.clear()

    def _take(self, num_bytes: int) -> torch.Tensor:
        if self._pinned is not None:
            try:
                return self._pinned(num_bytes)
            except RuntimeError as error:
                self._pinned = None
                self.note = (
                    f"{num_bytes / 2**20:,.0f} MiB of pinned memory were refused ({error}): KV blocks are swapped "
                    "through pageable memory, which is slower"
                )
                log.warning(self.note)
        return anonymous(num_bytes, huge_pages=True)


class Tiers:
    """Where each block's bytes are.

    Args:
        device: each group's pool on the device, uint8 [num_blocks, block_bytes].
        host: each group's pool in main memory; none where there is no such tier.
    """

    def __init__(self, device: Sequence[torch.Tensor], host: Sequence[HostPool]) -> None:
        self._device = device
        self._host = host

    def num_blocks(self, group: int, tier: str) -> int:
        if tier == "device":
            return len(self._device[group])
        return self._host[group].num_blocks if self._host else 0

    def block_bytes(self, group: int) -> int:
        return self._device[group].shape[1]

    def pieces(self, run: Run) -> Iterator[tuple[Place, Place, int]]:
        """Target, source and number of the blocks of a run that lie side by side in both."""
        done = 0
        while done < run.num_blocks:
            target, source = self._locate(run.first.target, done), self._locate(run.first.source, done)
            count = min(run.num_blocks - done, len(target[0]) - target[1], len(source[0]) - source[1])
            yield target, source, count
            done += count

    def _locate(self, ref: BlockRef, skip: int) -> Place:
        if ref.tier == "host":
            return self._host[ref.group].locate(ref.id + skip)
        return self._device[ref.group], ref.id + skip


class MemoryMover(Tiers):
    """A `Mover` for tiers that are all in main memory. Python runs on while a run is moved."""

    portion_bytes = 8 * 2**20

    def fence(self) -> object:
        """Nothing: a step on the CPU has ended when its call returns."""
        return None

    def pass_fence(self, fence: object) -> None:
        pass

    def move(self, run: Run) -> None:
        block_bytes = self.block_bytes(run.first.source.group)
        for (target, to), (source, at), count in self.pieces(run):
            addresses = target.data_ptr() + to * block_bytes, source.data_ptr() + at * block_bytes
            copy_bytes(*addresses, count * block_bytes)

    def finish(self) -> None:
        pass
