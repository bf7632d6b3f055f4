"""Continuations, log probabilities and lower limits through the whole engine, on a tiny model."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_models import BACKENDS, EXACT

from appliance.engine.config import EngineConfig
from appliance.engine.engine import Engine
from appliance.engine.errors import ParameterError
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.seeds import derive_seed
from appliance.engine.types import PositionLogprobs, Request, TokenEvent

BLOCK_BYTES = 1 * 2 * 2 * 16 * 32 * 4
PROMPT = [5 + (7 * i) % 120 for i in range(45)]


@pytest.fixture(scope="module")
def folder(golden: Path) -> Path:
    return golden / "gguf_f16"


def start(folder: Path, **config: Any) -> Engine:
    return Engine(EngineConfig(model_path=str(folder / "mini-f16.gguf"), **config))


def run(engine: Engine, prompt: list[int], **sampling: Any) -> list[TokenEvent]:
    params = SamplingParams(**{"ignore_eos": True, "max_tokens": 8, **sampling})
    engine.add(Request(id="r", prompt_ids=tuple(prompt), sampling=params, arrived_at=0.0))
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
        engine.scheduler.check()
    assert [event.is_last for event in events] == [False] * (len(events) - 1) + [True]
    assert engine.stats().blocks_used == 0
    return events


def texts(events: list[TokenEvent]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = defaultdict(tuple)
    for event in events:
        found[event.index] += event.token_ids
    return dict(found)


def prompt_logprobs(events: list[TokenEvent]) -> list[PositionLogprobs]:
    return [position for event in events for position in event.prompt_logprobs]


@pytest.mark.parametrize("config", [{}, {"max_num_seqs": 2}, {"kv_cache_memory_bytes": 7 * BLOCK_BYTES}])
def test_each_continuation_is_what_its_seed_alone_would_give(folder: Path, config: dict[str, Any]) -> None:
    engine = start(folder, **config)
    together = texts(run(engine, PROMPT, n=4, seed=9, temperature=1.0))
    assert len(set(together.values())) == 4
    for index, text in together.items():
        assert texts(run(engine, PROMPT, seed=derive_seed(9, index), temperature=1.0)) == {0: text}


def test_continuations_share_the_memory_of_a_long_prompt(folder: Path) -> None:
    def most_blocks(n: int) -> int:
        engine = start(folder)
        sampling = SamplingParams(n=n, max_tokens=12, ignore_eos=True)
        engine.add(Request(id="r", prompt_ids=tuple(PROMPT * 8), sampling=sampling, arrived_at=0.0))
        most = 0
        while engine.has_work:
            engine.step()
            most = max(most, engine.stats().blocks_used)
        return most

    assert most_blocks(4) < 1.3 * most_blocks(1)


def test_aborting_one_continuation_leaves_the_others(folder: Path) -> None:
    engine = start(folder)
    expected = texts(run(engine, PROMPT, n=3, seed=1))
    sampling = SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True)
    engine.add(Request(id="r", prompt_ids=tuple(PROMPT), sampling=sampling, arrived_at=0.0))
    events = engine.step() + engine.step()
    (ended,) = engine.abort("r", 1)
    assert (ended.index, ended.finish_reason, ended.is_last) == (1, "abort", False)
    while engine.has_work:
        events += engine.step()
    got = texts(events)
    assert (got[0], got[2]) == (expected[0], expected[2])
    assert got[1] == expected[1][:2]
    assert events[-1].is_last


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 16}])
def test_log_probabilities_agree_with_transformers(
    folder: Path, config: dict[str, Any], backend: str
) -> None:
    golden = load_file(folder / "expected.safetensors")
    ids = golden["input_ids"][0].tolist()
    expected = torch.log_softmax(golden["logits"][0].double(), -1)
    engine = start(folder, backend=backend, **EXACT, **config)
    for _ in range(2):  # a cached prefix has no logits: it is computed again
        events = run(engine, ids, prompt_logprobs=2, logprobs=3, temperature=0.0, max_tokens=1)
        scored = prompt_logprobs(events)
        assert [position.token.token_id for position in scored] == ids[1:]
        for at, position in enumerate(scored):
            assert position.token.logprob == pytest.approx(float(expected[at, ids[at + 1]]), abs=1e-3)
            assert [top.token_id for top in position.top] == expected[at].topk(2).indices.tolist()
        (first,) = [position for event in events for position in event.logprobs]
        assert first.token.token_id == int(expected[-1].argmax())
        assert [top.logprob for top in first.top] == pytest.approx(
            expected[-1].topk(3).values.tolist(), abs=1e-3
        )


def test_a_prompt_can_be_scored_without_generating(folder: Path) -> None:
    engine = start(folder, max_num_batched_tokens=16, max_num_seqs=16)
    events = run(engine, PROMPT, prompt_logprobs=0, max_tokens=0)
    assert len(prompt_logprobs(events)) == len(PROMPT) - 1
    assert texts(events) == {0: ()}
    assert events[-1].finish_reason == "length"
    assert run(engine, [5], max_tokens=0)[-1].finish_reason == "length"


def test_scores_are_the_same_and_come_once_under_preemption(folder: Path) -> None:
    expected = prompt_logprobs(run(start(folder), PROMPT, prompt_logprobs=1, max_tokens=1))
    engine = start(folder, kv_cache_memory_bytes=5 * BLOCK_BYTES, max_num_batched_tokens=16, max_num_seqs=4)
    for name, prompt in (("a", PROMPT[:30]), ("r", PROMPT)):
        sampling = SamplingParams(prompt_logprobs=1, max_tokens=20, ignore_eos=True)
        request = Request(id=name, prompt_ids=tuple(prompt), sampling=sampling, arrived_at=float(name == "r"))
        engine.add(request)
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    assert prompt_logprobs([event for event in events if event.request_id == "r"]) == expected


def test_no_end_before_min_tokens(folder: Path) -> None:
    engine = start(folder)
    (plain,) = texts(run(engine, PROMPT, temperature=0.0)).values()
    early = run(engine, PROMPT, temperature=0.0, stop_token_ids=[plain[1]])
    assert len(texts(early)[0]) == 1
    late = run(engine, PROMPT, temperature=0.0, stop_token_ids=[plain[1]], min_tokens=5)
    assert len(texts(late)[0]) >= 5
    assert plain[1] not in texts(late)[0][:5]


def test_a_bias_outside_the_vocabulary_is_refused(folder: Path) -> None:
    with pytest.raises(ParameterError, match="token id 133 is outside the vocabulary of 128"):
        run(start(folder), PROMPT, logit_bias={133: 5.0})


@pytest.mark.parametrize("config", [{}, {"max_num_seqs": 1}])
def test_where_nothing_is_to_be_generated_every_continuation_ends(
    folder: Path, config: dict[str, Any]
) -> None:
    events = run(start(folder, **config), PROMPT, n=3, max_tokens=0, prompt_logprobs=0)
    ends = [(event.index, event.finish_reason) for event in events if event.finish_reason]
    assert ends == [(0, "length"), (1, "length"), (2, "length")]
    assert len(prompt_logprobs(events)) == len(PROMPT) - 1
