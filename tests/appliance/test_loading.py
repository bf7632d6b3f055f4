"""A model that the offline API has loaded is held against removal, and its memory goes when it should."""

from __future__ import annotations

import asyncio
import gc
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
    engine = weakref.ref(model._engine if kind is LLM else model._loop._engine)
    ended = [thread for thread in threading.enumerate() if thread.name == "appliance-engine"]
    del model
    gc.collect()
    if kind is AsyncLLM:
        ended[-1].join(10)
    gc.collect()
    assert engine_threads() == before
    assert engine() is None
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
    engine = weakref.ref(model._engine if kind is LLM else model._loop._engine)
    close(model)
    gc.collect()
    assert engine() is None


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
