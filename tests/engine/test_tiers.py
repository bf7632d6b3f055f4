"""Blocks' bytes in both tiers: every kind of pool, chunks of main memory, memory that is refused."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from block_copies import check_round_trip, copy, swap

from appliance.engine.tiers.copy_thread import CopyThread
from appliance.engine.tiers.memory import HostPool, MemoryMover
from appliance.kernels.memory import copy_bytes

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.mark.parametrize(
    ("family", "backend", "kv_dtype"),
    [
        ("llama", "reference", "float32"),
        ("llama", "reference", "bfloat16"),
        ("gemma3_text", "reference", "float16"),
        ("llama", "cpu", "float32"),
        ("gemma3_text", "cpu", "bfloat16"),
        ("gemma3_text", "cpu", "int8"),
    ],
)
def test_a_sequence_goes_on_where_its_blocks_come_back_to(family: str, backend: str, kv_dtype: str) -> None:
    check_round_trip(GOLDEN / f"arch_{family}", backend, kv_dtype)


# Below and above where caches are passed by, at any alignment.
@pytest.mark.parametrize("num_bytes", [0, 1, 63, 16384, 16384 + 64, 16384 + 65, 5 * 16384 + 4097])
@pytest.mark.parametrize(("to", "at"), [(0, 0), (1, 0), (0, 3), (63, 17)])
def test_bytes_and_nothing_beside_them(num_bytes: int, to: int, at: int) -> None:
    source = torch.randint(0, 256, (num_bytes + 128,), dtype=torch.uint8)
    target = torch.randint(0, 256, (num_bytes + 128,), dtype=torch.uint8)
    expected = target.clone()
    expected[to : to + num_bytes] = source[at : at + num_bytes]
    copy_bytes(target.data_ptr() + to, source.data_ptr() + at, num_bytes)
    assert torch.equal(target, expected)


def test_neighbours_across_chunks_of_the_host_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.engine.tiers.memory._CHUNK_BYTES", 3 * 100 + 50)
    device = torch.arange(8 * 100, dtype=torch.int32).view(8, 100).to(torch.uint8)
    before, host = device.clone(), HostPool(8, 100)
    engine = CopyThread(MemoryMover([device], [host]))
    swap(engine, "device", [(0, 1, 2, 3, 4, 5)], "host", [(2, 3, 4, 5, 6, 7)])
    assert host.taken_bytes == 8 * 100
    device.zero_()
    swap(engine, "host", [(2, 3, 4, 5, 6, 7)], "device", [(1, 2, 3, 4, 5, 6)])
    assert torch.equal(device[1:7], before[:6])
    assert not device[[0, 7]].any()
    engine.close()


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


def test_a_host_pool_takes_memory_as_it_is_used_and_gives_it_back() -> None:
    before = rss()
    pool = HostPool(1024, 2**20)
    assert pool.taken_bytes == 0
    assert rss() - before < 8 * 2**20
    for block in (0, 1000):
        memory, index = pool.locate(block)
        memory[index].fill_(1)
    # Pages may be of 2 MiB.
    assert 2 * 2**20 <= rss() - before < 16 * 2**20
    for block in range(128):
        memory, index = pool.locate(block)
        memory[index].fill_(1)
    assert rss() - before > 120 * 2**20
    del memory
    pool.close()
    assert rss() - before < 16 * 2**20


def test_pinned_memory_that_is_refused_is_pageable_and_said(caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def refuses(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        if len(asked) > 1:
            raise RuntimeError("CUDA error: out of memory")
        return torch.zeros(num_bytes, dtype=torch.uint8)

    pool = HostPool(200, 2**20, refuses)
    pool.locate(3)
    assert pool.note == ""
    device = torch.randint(0, 256, (200, 2**20), dtype=torch.uint8)
    engine = CopyThread(MemoryMover([device], [pool]))
    expected = device[[0, 1]].clone()
    swap(engine, "device", [(0, 1)], "host", [(70, 150)])
    swap(engine, "host", [(70, 150)], "device", [(9, 8)])
    assert torch.equal(device[[9, 8]], expected)
    assert asked == [64 * 2**20, 64 * 2**20]
    assert pool.note == (
        "64 MiB of pinned memory were refused (CUDA error: out of memory): KV blocks are swapped through pageable "
        "memory, which is slower"
    )
    assert caplog.messages == [pool.note]
    engine.close()


def test_no_main_memory_at_all_fails_the_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_num_bytes: int, *, huge_pages: bool) -> torch.Tensor:  # noqa: ARG001
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("appliance.engine.tiers.memory.anonymous", none_left)
    engine = CopyThread(MemoryMover([torch.zeros(2, 64, dtype=torch.uint8)], [HostPool(2, 64)]))
    ticket = engine.submit([copy("d0", "h1")])
    assert ticket.wait(60)
    assert "Cannot allocate memory" in str(ticket.error)
    engine.close()
