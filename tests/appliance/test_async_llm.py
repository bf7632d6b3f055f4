"""AsyncLLM: the texts of LLM as deltas, side by side, with abort and cancellation that free what was held."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance import LLM, AsyncLLM, SamplingParams
from appliance.engine.errors import ContextLengthError, EngineError, ParameterError

Run = Callable[[Coroutine[Any, Any, Any]], Any]
PROMPTS = ["Hello", [5, 6, 7], "world"]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def path(golden: Path) -> str:
    return str(golden / "gguf_q8_0" / "mini-q8_0.gguf")


@pytest.fixture(scope="module")
def llm(path: str) -> Iterator[AsyncLLM]:
    model = AsyncLLM(path, kv_cache_memory_bytes=2**20)
    yield model
    asyncio.run(model.close())


async def text_of(
    llm: AsyncLLM, prompt: Any, sampling: SamplingParams = SAMPLING, **named: Any
) -> tuple[str, str]:
    text, reason = "", ""
    async for delta in llm.generate(prompt, sampling, **named):
        assert not reason, "a delta after the end"
        text += delta.text
        reason = delta.finish_reason or ""
    return text, reason


def blocks_used(llm: AsyncLLM) -> int:
    return llm._loop._engine.stats().blocks_used


def test_deltas_side_by_side_make_the_texts_of_the_offline_api(llm: AsyncLLM, path: str) -> None:
    expected = LLM(path, kv_cache_memory_bytes=2**20).generate(PROMPTS, SAMPLING)

    async def all_at_once() -> list[tuple[str, str]]:
        return await asyncio.gather(*(text_of(llm, prompt) for prompt in PROMPTS))

    got = asyncio.run(all_at_once())
    assert got == [(output.outputs[0].text, "length") for output in expected]


def test_continuations_come_by_index(llm: AsyncLLM) -> None:
    async def run() -> dict[int, str]:
        texts: dict[int, str] = {}
        sampling = SamplingParams(n=3, seed=5, max_tokens=10, ignore_eos=True)
        async for delta in llm.generate([5, 6], sampling):
            texts[delta.index] = texts.get(delta.index, "") + delta.text
        return texts

    texts = asyncio.run(run())
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) == 3


def test_abort_ends_the_iterator(llm: AsyncLLM) -> None:
    async def run() -> str | None:
        sampling = SamplingParams(max_tokens=400, ignore_eos=True)
        reason = None
        async for delta in llm.generate([5, 6], sampling, request_id="mine"):
            llm.abort("mine")
            reason = delta.finish_reason
        return reason

    assert asyncio.run(run()) == "abort"
    assert blocks_used(llm) == 0


def test_leaving_the_iteration_frees_the_blocks(llm: AsyncLLM) -> None:
    async def run() -> None:
        deltas = llm.generate([5, 6], SamplingParams(max_tokens=400, ignore_eos=True))
        async for _ in deltas:
            break
        await deltas.aclose()
        for _ in range(200):
            if blocks_used(llm) == 0:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("blocks are still held")

    asyncio.run(run())


def test_unusable_prompts_and_ids_in_use_are_refused_and_hurt_nobody(llm: AsyncLLM) -> None:
    async def run() -> tuple[str, str]:
        first = asyncio.create_task(text_of(llm, [5, 6], request_id="same"))
        await asyncio.sleep(0)
        with pytest.raises(ParameterError, match="'same' is being served"):
            await text_of(llm, [7], request_id="same")
        with pytest.raises(ContextLengthError):
            await text_of(llm, [5] * 600)
        return await first

    assert asyncio.run(run()) == asyncio.run(text_of(llm, [5, 6]))


@pytest.mark.parametrize("prompt", [{"text": "x"}, ["a"], b"x", None, 5])
def test_what_is_no_prompt_is_refused_and_the_engine_goes_on(llm: AsyncLLM, prompt: Any) -> None:
    with pytest.raises(ParameterError, match="a prompt"):
        asyncio.run(text_of(llm, prompt))
    expected = asyncio.run(text_of(llm, [5, 6]))
    assert asyncio.run(text_of(llm, {"prompt_token_ids": [5, 6]})) == expected


def test_parameters_that_a_stream_cannot_honour_are_refused(llm: AsyncLLM) -> None:
    with pytest.raises(ParameterError, match="best_of cannot be streamed"):
        asyncio.run(text_of(llm, [5], SamplingParams(best_of=3)))
    with pytest.raises(ParameterError, match="expected SamplingParams"):
        asyncio.run(text_of(llm, [5], {"temperature": 0}))  # type: ignore[arg-type]


def test_log_probabilities_are_those_of_the_offline_api(llm: AsyncLLM, path: str) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (whole,) = LLM(path, kv_cache_memory_bytes=2**20).generate([[5, 6, 7]], sampling)

    async def run() -> tuple[list[Any], list[Any]]:
        deltas = [delta async for delta in llm.generate([5, 6, 7], sampling)]
        return [p for d in deltas for p in d.logprobs], [p for d in deltas for p in d.prompt_logprobs]

    told, prompt = asyncio.run(run())
    assert (tuple(told), tuple(prompt)) == (whole.outputs[0].logprobs, whole.prompt_logprobs)
    assert len(prompt) == 2


def test_an_event_loop_that_ended_without_a_word_frees_the_blocks(llm: AsyncLLM) -> None:
    async def first() -> Any:
        deltas = llm.generate([5, 6], SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(deltas)
        return deltas

    before = llm._loop._engine.stats().generated_tokens_total
    loop = asyncio.new_event_loop()
    deltas = loop.run_until_complete(first())
    loop.close()
    deadline = time.monotonic() + 10
    while blocks_used(llm):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert llm._loop._engine.stats().generated_tokens_total < before + 400
    del deltas


def test_an_engine_that_breaks_ends_every_request_with_an_error(path: str) -> None:
    llm = AsyncLLM(path, kv_cache_memory_bytes=2**20)

    def broken() -> Any:
        raise RuntimeError("a bug")

    async def run() -> list[Any]:
        return await asyncio.gather(*(text_of(llm, [5 + n]) for n in range(3)), return_exceptions=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        patch.setattr(llm._loop._engine, "step", broken)
        assert [str(error) for error in asyncio.run(run())] == [
            "the engine failed; the traceback says why"
        ] * 3
    with pytest.raises(EngineError, match="was closed"):
        asyncio.run(text_of(llm, [5]))


def test_what_is_asked_while_the_model_closes_ends(path: str) -> None:
    async def run() -> list[Any]:
        llm = AsyncLLM(path, kv_cache_memory_bytes=2**20)
        llm._loop._commands.put(None)
        asked = [asyncio.create_task(text_of(llm, [5])) for _ in range(3)]
        await llm.close()
        return await asyncio.gather(*asked, return_exceptions=True)

    for error in asyncio.run(asyncio.wait_for(run(), 30)):
        assert isinstance(error, EngineError)
        assert "was closed" in str(error)


def test_closing_ends_what_runs_with_an_error(path: str) -> None:
    async def run() -> None:
        async with AsyncLLM(path, kv_cache_memory_bytes=2**20) as short:
            running = asyncio.create_task(
                text_of(short, [5], SamplingParams(max_tokens=400, ignore_eos=True))
            )
            await asyncio.sleep(0.1)
        with pytest.raises(EngineError, match="closed while the request ran"):
            await running
        with pytest.raises(EngineError, match="was closed"):
            await text_of(short, [5])

    asyncio.run(run())
