"""Copies of blocks, and whether a sequence survives them."""

from __future__ import annotations

from pathlib import Path

import torch
from small_models import BLOCK_SIZE, load_executor, read

from appliance.engine.executors import Executor
from appliance.engine.kv_groups import kv_groups
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.tiers.copy_engine import CopyEngine, Ticket
from appliance.engine.tiers.copy_thread import CopyThread
from appliance.engine.tiers.memory import HostPool, MemoryMover
from appliance.engine.types import BlockCopy, BlockRef, PlanRow


def copy(source: str, target: str, group: int = 0) -> BlockCopy:
    """`copy("d1", "h2")`: from the device's block 1 to the host's block 2."""
    tiers = {"d": "device", "h": "host"}
    refs = (BlockRef(group, tiers[name[0]], int(name[1:])) for name in (source, target))
    return BlockCopy(*refs)


def check_round_trip(path: Path, backend: str, kv_dtype: str) -> None:
    """A sequence's blocks go to the host and come back elsewhere, nothing being left where they were: it goes on."""
    executor = load_executor(path, backend, kv_dtype=kv_dtype)
    groups = len(kv_groups(read(path), torch.float32))
    pools = [executor.pool_bytes(group) for group in range(groups)]
    assert [pool.shape for pool in pools] == [(16, executor.block_bytes(group)) for group in range(groups)]
    engine = CopyThread(MemoryMover(pools, [HostPool(5, pool.shape[1]) for pool in pools]))
    ids = tuple((5 * i) % 50 for i in range(2 * BLOCK_SIZE + 3))
    table = (3, 9, 4)
    decode(executor, ids, 0, [table] * groups)
    expected = decode(executor, (7,), len(ids), [table] * groups)
    held = [pool[list(table)].clone() for pool in pools]
    # Each group's go to other places, and come back to others again.
    out = [(4 - 2 * group, 1, 3 * group) for group in range(groups)]
    back = [(8, 2 + group, 6) for group in range(groups)]
    assert swap(engine, "device", [table] * groups, "host", out).error is None
    for pool in pools:
        pool.fill_(0xA5)
    assert swap(engine, "host", out, "device", back).error is None
    for pool, where, before in zip(pools, back, held, strict=True):
        assert torch.equal(pool[list(where)], before)
        others = [block for block in range(16) if block not in where]
        assert bool((pool[others] == 0xA5).all())
    assert torch.equal(decode(executor, (7,), len(ids), back), expected)
    engine.close()


def decode(
    executor: Executor, ids: tuple[int, ...], start: int, tables: list[tuple[int, ...]]
) -> torch.Tensor:
    executor.run([PlanRow("r", ids, start, tuple(tables), True, SamplingParams(), (0,))], [])
    return executor.logits([len(ids) - 1])


def swap(
    engine: CopyEngine,
    source: str,
    sources: list[tuple[int, ...]],
    target: str,
    targets: list[tuple[int, ...]],
) -> Ticket:
    """Copy each group's blocks, all groups' in one batch."""
    ticket = engine.submit(
        [
            BlockCopy(BlockRef(group, source, a), BlockRef(group, target, b))
            for group, blocks in enumerate(zip(sources, targets, strict=True))
            for a, b in zip(*blocks, strict=True)
        ]
    )
    assert ticket.wait(60)
    assert engine.completed() == [ticket]
    return ticket
