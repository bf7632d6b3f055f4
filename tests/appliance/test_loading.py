"""A model that the offline API has loaded is held against removal, and its memory goes when it should."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance import LLM, AsyncLLM, SamplingParams
from appliance.engine.errors import EngineError
from appliance.pull import local
from appliance.store import Store, StoreError

Make = Callable[..., Any]


@pytest.fixture
def store(tmp_path: Path, golden: Path) -> Store:
    store = Store(tmp_path / "models")
    local.link(str(golden / "gguf_q8_0" / "mini-q8_0.gguf"), "mini", store)
    return store


def make(kind: Make, store: Store, **settings: Any) -> Any:
    return kind("mini", download_dir=store.models_dir, kv_cache_memory_bytes=2**20, **settings)


def close(model: Any) -> None:
    ended = model.close()
    if ended is not None:
        asyncio.run(ended)


def executor_of(model: Any) -> weakref.ref[Any]:
    """What holds the weights and the KV memory."""
    engine = model._engine if isinstance(model, LLM) else model._loop._engine
    return weakref.ref(engine._runner._executor)


def engine_threads() -> int:
    return sum(thread.name == "appliance-engine" for thread in threading.enumerate())


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_loaded_model_is_not_removed_until_it_is_closed(kind: Make, store: Store) -> None:
    model = make(kind, store)
    with pytest.raises(StoreError, match="mini:latest is in use"):
        store.remove("mini")
    close(model)
    assert store.remove("mini").name == "mini:latest"
    close(model)  # a second time does no harm


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_model_that_nobody_closed_is_let_go_with_the_last_reference(kind: Make, store: Store) -> None:
    before = engine_threads()
    model = make(kind, store)
    executor = executor_of(model)
    del model
    assert engine_threads() == before
    assert executor() is None
    assert store.remove("mini").name == "mini:latest"


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_model_that_does_not_load_is_not_held(kind: Make, store: Store) -> None:
    with pytest.raises(EngineError) as failure:
        kind("mini", download_dir=store.models_dir, kv_cache_memory_bytes=1)
    # The traceback, and with it all that it refers to, is still there.
    assert failure.value.__traceback__ is not None
    assert store.remove("mini").name == "mini:latest"


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_closing_frees_the_memory_whoever_still_has_the_object(kind: Make, store: Store) -> None:
    model = make(kind, store)
    executor = executor_of(model)
    close(model)
    assert executor() is None


MEMORY = """
import sys
import psutil
from appliance import LLM
def own() -> int:
    return psutil.Process().memory_full_info().uss
with LLM(sys.argv[1], kv_cache_memory_bytes=2**26, max_model_len=512, backend="reference"):
    loaded = own()
print(loaded, own())
"""


@pytest.mark.starter
def test_closing_gives_the_memory_back_to_the_system(starter_model: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MEMORY, str(starter_model)], capture_output=True, text=True, check=True
    )
    loaded, closed = map(int, ended.stdout.split())
    assert loaded - closed > 2**29  # of 135 million weights as float32


LEFT_OPEN = """
import asyncio
import sys
from appliance import AsyncLLM, SamplingParams
llm = AsyncLLM(sys.argv[1], kv_cache_memory_bytes=2**20)
async def main():
    async for _ in llm.generate([5], SamplingParams(max_tokens=400, ignore_eos=True)):
        break
asyncio.run(main())
going = llm.generate([6], SamplingParams(max_tokens=400, ignore_eos=True))
loop = asyncio.new_event_loop()
loop.run_until_complete(anext(going))
"""


def test_a_program_may_end_with_the_model_open(golden: Path) -> None:
    path = golden / "gguf_q8_0" / "mini-q8_0.gguf"
    ended = subprocess.run([sys.executable, "-c", LEFT_OPEN, str(path)], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_forked_process_is_told_what_to_do(store: Store) -> None:
    llm, asynchronous = make(LLM, store), make(AsyncLLM, store)

    async def first() -> Any:
        return await anext(asynchronous.generate([5], SamplingParams()))

    pid = os.fork()
    if pid == 0:  # pytest is not to go on here, whatever happens
        told = 0
        try:
            llm.generate([[5]])
        except EngineError as error:
            told += "spawn" in str(error)
        try:
            asyncio.run(first())
        except EngineError:
            told += 1
        finally:
            os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert len(llm.generate([[5]])) == 1
    close(asynchronous)


def test_closing_waits_for_the_call_of_another_thread(store: Store) -> None:
    llm = make(LLM, store)
    began, steps, step = threading.Event(), 0, llm._engine.step

    def counted() -> Any:
        nonlocal steps
        steps += 1
        began.set()
        return step()

    llm._engine.step = counted
    lengths: list[int] = []

    def generate() -> None:
        (output,) = llm.generate([[5]], SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
        lengths.append(len(output.outputs[0].token_ids))

    thread = threading.Thread(target=generate)
    thread.start()
    began.wait()
    llm.close()
    assert steps == 50
    thread.join()
    assert lengths == [50]
