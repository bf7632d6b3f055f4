"""The whole engine on a tiny model: the same text alone, in a batch, in chunks and after preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.engine.config import EngineConfig
from appliance.engine.engine import Engine
from appliance.engine.errors import ContextLengthError, MemoryPlanError, ParameterError
from appliance.engine.types import Request, SamplingParams

BLOCK_BYTES = 1 * 2 * 2 * 16 * 32 * 4  # layers · (k, v) · kv heads · tokens · head_dim · float32
PROMPTS = [
    [5 + (7 * p + i * (p + 3)) % 120 for i in range(length)]
    for p, length in enumerate((3, 40, 17, 65, 1, 33))
]


@pytest.fixture(scope="module")
def model(golden: Path) -> str:
    return str(golden / "gguf_q4_0" / "mini-q4_0.gguf")


def start(model: str, **config: Any) -> Engine:
    return Engine(EngineConfig(model_path=model, **config))


def run(engine: Engine, prompts: list[list[int]], **sampling: Any) -> list[tuple[int, ...]]:
    params = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling}
    for index, prompt in enumerate(prompts):
        seeded = SamplingParams(**{**params, "seed": 100 + index})
        engine.add(Request(id=str(index), prompt_ids=tuple(prompt), sampling=seeded, arrived_at=index))
    texts: dict[str, tuple[int, ...]] = {str(index): () for index in range(len(prompts))}
    ended = set()
    while engine.has_work:
        for event in engine.step():
            assert event.request_id not in ended
            texts[event.request_id] += event.token_ids
            if event.finish_reason:
                ended.add(event.request_id)
        engine.scheduler.check()
    assert ended == set(texts)
    assert engine.stats().blocks_used == 0
    return list(texts.values())


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.95}])
def test_text_alone_is_the_text_in_any_company(model: str, sampling: dict[str, Any]) -> None:
    alone = [
        run(start(model, enable_prefix_caching=False), [prompt], **sampling)[0] for prompt in PROMPTS[:1]
    ]
    ample = start(model, enable_prefix_caching=False)
    together = run(ample, PROMPTS, **sampling)
    assert together[0] == alone[0]
    assert ample.stats().preemptions_total == 0
    chunked = run(start(model, max_num_batched_tokens=16, max_num_seqs=16), PROMPTS, **sampling)
    assert chunked == together
    tiny = start(model, kv_cache_memory_bytes=8 * BLOCK_BYTES)
    assert run(tiny, PROMPTS, **sampling) == together
    assert tiny.stats().preemptions_total > 0
    again = run(tiny, PROMPTS, **sampling)
    assert again == together
    assert tiny.stats().prefix_hit_tokens_total > 0


def test_stop_tokens_end_the_text_and_are_not_in_it(model: str) -> None:
    engine = start(model)
    (plain,) = run(engine, [PROMPTS[0]])
    stop = plain[5]
    engine.add(
        Request(
            id="s",
            prompt_ids=tuple(PROMPTS[0]),
            sampling=SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop_token_ids=(stop,)),
            arrived_at=0.0,
        )
    )
    events = []
    while engine.has_work:
        events += engine.step()
    text = tuple(token for event in events for token in event.token_ids)
    assert text == plain[: plain.index(stop)]
    assert (events[-1].finish_reason, events[-1].stop_token_id) == ("stop", stop)


def test_the_context_ends_the_text(model: str) -> None:
    (text,) = run(start(model, max_model_len=48), [PROMPTS[1]], max_tokens=None)
    assert len(text) == 8


def test_a_context_beyond_the_pool_is_served_as_far_as_the_pool_goes(model: str) -> None:
    engine = start(model, kv_cache_memory_bytes=4 * BLOCK_BYTES)
    assert engine.info.max_model_len == 64
    assert "64" in engine.info.note
    (text,) = run(engine, [PROMPTS[1]], max_tokens=None)
    assert len(text) == 24


def test_unusable_requests_are_refused_and_nothing_is_queued(model: str) -> None:
    engine = start(model, max_model_len=64)

    def add(ids: list[int], **sampling: Any) -> None:
        engine.add(
            Request(id="x", prompt_ids=tuple(ids), sampling=SamplingParams(**sampling), arrived_at=0.0)
        )

    with pytest.raises(ContextLengthError, match=r"64 tokens, but this model serves a context of 64"):
        add([5] * 64)
    with pytest.raises(ParameterError, match="token id 128 is outside the vocabulary of 128"):
        add([5, 128])
    with pytest.raises(ParameterError, match="token id 4000 is outside"):
        add([5], stop_token_ids=(4000,))
    with pytest.raises(ParameterError, match="no tokens"):
        add([])
    assert not engine.has_work
    add([5])
    with pytest.raises(ParameterError, match="'x' is being served"):
        add([5])


def test_abort_frees_the_blocks_at_once_and_says_so_once(model: str) -> None:
    engine = start(model)
    sampling = SamplingParams(max_tokens=100)
    engine.add(Request(id="a", prompt_ids=tuple(PROMPTS[3]), sampling=sampling, arrived_at=0.0))
    engine.step()
    assert engine.stats().blocks_used == 5
    event = engine.abort("a")
    assert event is not None
    assert event.finish_reason == "abort"
    assert engine.abort("a") is None
    assert (engine.stats().blocks_used, engine.has_work) == (0, False)


def test_a_step_that_fails_ends_its_own_requests_and_the_engine_goes_on(model: str) -> None:
    engine = start(model)
    expected = run(engine, [PROMPTS[0]])
    embeddings = engine._runner._executor._embeddings
    whole = embeddings["embed"]
    embeddings["embed"] = whole.select_rows(torch.arange(10))  # token ids from 10 up now fail inside torch
    engine.add(Request(id="bad", prompt_ids=(50,), sampling=SamplingParams(), arrived_at=0.0))
    (event,) = engine.step()
    assert event.error is not None
    assert (event.request_id, event.finish_reason, event.error.code) == ("bad", "error", "step_failed")
    embeddings["embed"] = whole
    assert run(engine, [PROMPTS[0]]) == expected


def test_a_pool_that_fits_nothing_is_refused(model: str) -> None:
    with pytest.raises(MemoryPlanError, match="two blocks of 16 tokens take"):
        start(model, kv_cache_memory_bytes=BLOCK_BYTES)
