"""The native executor's threads: their number changes no bit, and whatever the system does to them, steps end."""

from __future__ import annotations

import hashlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import BLOCK_SIZE, load_executor, read

from appliance.engine.executors import Executor
from appliance.engine.kv_groups import kv_groups
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import PlanRow

GOLDEN = Path(__file__).parents[1] / "golden"
(LLAMA,) = (GOLDEN / "gguf_q4_0").glob("*.gguf")
GPT_OSS = GOLDEN / "arch_gpt_oss"
# Of one sequence, of four.
MOST_TOKENS = 768
BLOCKS_A_SEQUENCE = MOST_TOKENS // BLOCK_SIZE
# Several segments of attention (256 tokens each) long, so that threads share a context.
LONG = (701, 598)


def load(path: Path, threads: int, **options: Any) -> Executor:
    options = {"precision": "int8", "kv_dtype": "bfloat16", **options}
    blocks = 4 * BLOCKS_A_SEQUENCE
    return load_executor(path, "cpu", threads=threads, blocks=blocks, max_model_len=MOST_TOKENS, **options)


def row(path: Path, sequence: int, start: int, count: int) -> PlanRow:
    """Tokens of a sequence, whose blocks are in an order of their own in each KV group."""
    vocabulary = 64
    ids = tuple((7 * sequence + 3 * at + at // 11) % vocabulary for at in range(start, start + count))
    first, needed = sequence * BLOCKS_A_SEQUENCE, -(-(start + count) // BLOCK_SIZE)
    table = tuple(first + (5 * place + 1) % BLOCKS_A_SEQUENCE for place in range(needed))
    tables = (table,) * len(kv_groups(read(path), torch.float32))
    return PlanRow(str(sequence), ids, start, tables, True, SamplingParams(), (0,))


def step(executor: Executor, rows: list[PlanRow]) -> torch.Tensor:
    """Logits of every token."""
    count = sum(row.n_tokens for row in rows)
    output = executor.run(rows, [count - 1])
    logits = executor.logits(range(count))
    assert output.finite.all()
    assert output.largest.tolist() == [int(logits[-1].argmax())]
    return logits


def fill(executor: Executor, path: Path) -> None:
    """Two long contexts, but for their last token."""
    for sequence, length in enumerate(LONG):
        for start in range(0, length, 256):
            executor.run([row(path, sequence, start, min(256, length - start))], [])


def decode(path: Path) -> list[PlanRow]:
    return [row(path, sequence, length, 1) for sequence, length in enumerate(LONG)]


def ragged(path: Path) -> list[PlanRow]:
    first, second = decode(path)
    return [row(path, 2, 0, 40), first, row(path, 3, 0, 200), second]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float32"])
@pytest.mark.parametrize("path", [LLAMA, GPT_OSS], ids=["llama", "gpt_oss"])
def test_the_number_of_threads_changes_no_bit(path: Path, kv_dtype: str) -> None:
    results = []
    for threads in (1, 2, 3, 8):
        executor = load(path, threads, kv_dtype=kv_dtype)
        fill(executor, path)
        # Alone, a context is split among threads; among many rows, it is not.
        alone = [step(executor, [each]) for each in decode(path)]
        few, many = step(executor, decode(path)), step(executor, ragged(path))
        assert torch.equal(torch.cat(alone), few)
        assert torch.equal(many[[40, 241]], few)
        results.append(many)
    assert all(torch.equal(result, results[0]) for result in results)
    assert not torch.equal(results[0][40], results[0][241])


@contextmanager
def busy_cores() -> Iterator[None]:
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_steps_end_while_others_burn_the_cores(threads: int) -> None:
    alone = load(LLAMA, 1)
    fill(alone, LLAMA)
    expected = [step(alone, rows) for rows in (decode(LLAMA), ragged(LLAMA))]
    before = time.monotonic()
    for _ in range(20):
        step(alone, ragged(LLAMA))
    twenty_steps = time.monotonic() - before

    executor = load(LLAMA, threads)
    fill(executor, LLAMA)
    wrong: list[int] = []

    def steps() -> None:
        for number in range(200):
            rows = ragged(LLAMA) if number % 2 else decode(LLAMA)
            if not torch.equal(step(executor, rows), expected[number % 2]):
                wrong.append(number)

    thread = threading.Thread(target=steps, daemon=True)
    with busy_cores():
        thread.start()
        thread.join(60 + 50 * twenty_steps)
        assert not thread.is_alive(), "a step does not end"
    assert wrong == []


@pytest.mark.parametrize("threads", [1, 3])
def test_a_forked_child_computes_the_same_and_the_parent_goes_on(threads: int) -> None:
    executor = load(LLAMA, threads)
    fill(executor, LLAMA)
    expected = step(executor, ragged(LLAMA))
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            digest = hashlib.sha256(step(executor, ragged(LLAMA)).numpy().tobytes()).digest()
            del executor  # whose threads are not there
            os.write(writer, digest)
        finally:
            os._exit(0)
    os.close(writer)
    try:
        assert select.select([reader], [], [], 60)[0], "the child does not end"
        told = os.read(reader, 32)
    finally:
        os.close(reader)
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert told == hashlib.sha256(expected.numpy().tobytes()).digest()
    assert torch.equal(step(executor, ragged(LLAMA)), expected)


def test_idle_threads_take_no_time() -> None:
    executor = load(LLAMA, 8)
    for _ in range(20):
        step(executor, ragged(LLAMA)[:1])
    time.sleep(1)
    before = time.process_time()
    time.sleep(1)
    assert time.process_time() - before < 0.02
