"""The whole engine on a tiny model: the same text alone, in a batch, in chunks and after preemption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import BACKENDS, EXACT

from appliance.engine.config import EngineConfig
from appliance.engine.engine import Engine
from appliance.engine.errors import ContextLengthError, MemoryPlanError, ParameterError
from appliance.engine.executors.base import StepOutput
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import PlanRow, Request
from appliance.quant.errors import CheckpointError
from appliance.quant.gguf.file import GGUFFile

BLOCK_BYTES = 1 * 2 * 2 * 16 * 32 * 4  # layers · (k, v) · kv heads · tokens · head_dim · float32
PROMPTS = [
    [5 + (7 * p + i * (p + 3)) % 120 for i in range(length)]
    for p, length in enumerate((3, 40, 17, 65, 1, 33))
]


@dataclass(frozen=True)
class Subject:
    """A model and what runs it."""

    path: str
    backend: str = "auto"


@pytest.fixture(params=BACKENDS)
def model(golden: Path, request: pytest.FixtureRequest) -> Subject:
    return Subject(str(golden / "gguf_q4_0" / "mini-q4_0.gguf"), request.param)


def start(model: Subject | str, **config: Any) -> Engine:
    subject = Subject(model) if isinstance(model, str) else model
    settings = {"backend": subject.backend, **EXACT, **config}
    return Engine(EngineConfig(model_path=subject.path, **settings))


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


def floats(pool: torch.Tensor) -> torch.Tensor:
    """A pool in float32, whoever keeps it."""
    return pool.view(torch.float32) if pool.dtype is torch.uint8 else pool


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.95}])
def test_text_alone_is_the_text_in_any_company(model: Subject, sampling: dict[str, Any]) -> None:
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


def test_stop_tokens_end_the_text_and_are_not_in_it(model: Subject) -> None:
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


def test_the_context_ends_the_text(model: Subject) -> None:
    (text,) = run(start(model, max_model_len=48), [PROMPTS[1]], max_tokens=None)
    assert len(text) == 8


def test_a_context_beyond_the_pool_is_served_as_far_as_the_pool_goes(model: Subject) -> None:
    engine = start(model, kv_cache_memory_bytes=4 * BLOCK_BYTES)
    assert engine.info.max_model_len == 64
    assert "64" in engine.info.notes[0]
    (text,) = run(engine, [PROMPTS[1]], max_tokens=None)
    assert len(text) == 24


def test_unusable_requests_are_refused_and_nothing_is_queued(model: Subject) -> None:
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


def test_abort_frees_the_blocks_at_once_and_says_so_once(model: Subject) -> None:
    engine = start(model)
    sampling = SamplingParams(max_tokens=100)
    engine.add(Request(id="a", prompt_ids=tuple(PROMPTS[3]), sampling=sampling, arrived_at=0.0))
    engine.step()
    assert engine.stats().blocks_used == 5
    (event,) = engine.abort("a")
    assert (event.finish_reason, event.is_last) == ("abort", True)
    assert engine.abort("a") == []
    assert (engine.stats().blocks_used, engine.has_work) == (0, False)


def test_a_step_that_fails_ends_its_own_requests_and_the_engine_goes_on(model: Subject) -> None:
    engine = start(model)
    expected = run(engine, [PROMPTS[0]])
    executor = engine._runner._executor
    run_step = executor.run

    def fails(rows: Sequence[PlanRow], greedy: Sequence[int]) -> StepOutput:
        if any(50 in row.token_ids for row in rows):
            raise RuntimeError("a step that cannot be computed")
        return run_step(rows, greedy)

    executor.run = fails  # type: ignore[method-assign]
    engine.add(Request(id="bad", prompt_ids=(50,), sampling=SamplingParams(), arrived_at=0.0))
    (event,) = engine.step()
    assert event.error is not None
    assert (event.request_id, event.finish_reason, event.error.code) == ("bad", "error", "step_failed")
    executor.run = run_step  # type: ignore[method-assign]
    assert run(engine, [PROMPTS[0]]) == expected


def test_a_gpu_that_failed_is_not_asked_again(model: Subject) -> None:
    engine = start(model)

    def fails(_rows: Sequence[PlanRow], _greedy: Sequence[int]) -> StepOutput:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    engine._runner._executor.run = fails  # type: ignore[method-assign]
    engine.add(Request(id="a", prompt_ids=(5,), sampling=SamplingParams(), arrived_at=0.0))
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        engine.step()


def test_a_row_that_is_not_finite_fails_alone_and_leaves_nothing_behind(model: Subject) -> None:
    engine = start(model, max_num_batched_tokens=32, max_num_seqs=4)
    expected = run(engine, [PROMPTS[0], PROMPTS[1]])
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for name, prompt in (("good", PROMPTS[0]), ("bad", PROMPTS[3])):
        request = Request(
            id=name, prompt_ids=tuple(prompt), sampling=sampling, arrived_at=float(name == "bad")
        )
        engine.add(request)
    events = engine.step()
    (bad,) = engine.scheduler.find("bad")
    assert bad.deficit > 0, "the prompt is to be computed in chunks"
    pool = floats(engine._runner._executor._pools[0])
    pool[bad.tables[0][0]] = float("nan")
    while engine.has_work:
        events += engine.step()
        engine.scheduler.check()
    (failed,) = [event for event in events if event.request_id == "bad"]
    assert failed.error is not None
    assert (failed.error.code, failed.is_last) == ("numerical_error", True)
    text = tuple(token for event in events if event.request_id == "good" for token in event.token_ids)
    assert text == expected[0]
    assert pool.isnan().any(), "the blocks are to be used again as they are"
    for _ in range(3):
        assert run(engine, [PROMPTS[0], PROMPTS[1], PROMPTS[3]])[:2] == expected


def test_unseeded_requests_differ_and_figures_are_kept(model: Subject) -> None:
    engine = start(model)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    texts = []
    for index in range(2):
        request = Request(id=str(index), prompt_ids=tuple(PROMPTS[3]), sampling=sampling, arrived_at=0.0)
        engine.add(request)
        events = []
        while engine.has_work:
            events += engine.step()
        texts.append([token for event in events for token in event.token_ids])
        assert {event.num_cached_tokens for event in events} == {64 * index}
    assert texts[0] != texts[1]
    stats = engine.stats()
    assert (stats.generated_tokens_total, stats.prompt_tokens_total) == (24, 2 * len(PROMPTS[3]))


@pytest.mark.parametrize("block_size", [8, 24, 128])
def test_a_block_size_that_attention_cannot_split_is_refused(model: Subject, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size is {block_size}, expected one of"):
        start(model, block_size=block_size)


def test_weights_that_are_not_numbers_are_refused_by_name(golden: Path, tmp_path: Path) -> None:
    data = bytearray((golden / "gguf_f16" / "mini-f16.gguf").read_bytes())
    with GGUFFile(golden / "gguf_f16" / "mini-f16.gguf") as file:
        at = file.tensors["blk.0.ffn_down.weight"].offset
    data[at : at + 2] = b"\x00\x7e"  # NaN in half precision
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"layers\.0\.down holds values that are not finite"):
        start(str(path))


def test_a_pool_that_fits_nothing_is_refused(model: Subject) -> None:
    with pytest.raises(MemoryPlanError, match="two blocks of 16 tokens take"):
        start(model, kv_cache_memory_bytes=BLOCK_BYTES)
