"""The whole engine with the GPU backend, interpreted: texts under pressure, first steps, what it says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packed_families import pack_family

from appliance.engine.config import EngineConfig
from appliance.engine.engine import Engine
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import Request
from appliance.engine.warm_up import warm_up

# Each is about to need its second block.
PROMPTS = tuple(tuple((7 * p + i * (p + 3)) % 60 for i in range(length)) for p, length in enumerate((15, 15)))
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=4, ignore_eos=True, repetition_penalty=1.2),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_family("llama", tmp_path_factory.mktemp("llama"))[0]


def start(model: Path, **config: Any) -> Engine:
    return Engine(EngineConfig(model_path=str(model), backend="gpu", max_num_seqs=3, **config))


def texts(engine: Engine, numbers: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    for number in numbers:
        sampling = SAMPLINGS[number]
        engine.add(
            Request(id=str(number), prompt_ids=PROMPTS[number], sampling=sampling, arrived_at=float(number))
        )
    found: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            found[event.request_id] = found.get(event.request_id, ()) + event.token_ids
    return found


def test_a_text_is_the_same_alone_and_when_blocks_run_out(model: Path) -> None:
    roomy = start(model)
    alone = {name: text for number in range(2) for name, text in texts(roomy, (number,)).items()}
    tight = start(model, kv_cache_memory_bytes=3 * roomy.info.kv_block_bytes)
    assert texts(tight, (0, 1)) == alone
    assert tight.stats().preemptions_total > 0
    assert all(len(text) == 4 for text in alone.values())


def test_what_it_says_of_itself(model: Path) -> None:
    info = start(model).info
    assert (info.backend, info.gpu, info.max_num_batched_tokens) == ("gpu", "Triton's interpreter", 2048)


def test_first_steps_of_every_size(model: Path) -> None:
    engine = start(model)
    steps: list[list[int]] = []
    run = engine._runner.run

    def counted(plan: Any) -> Any:
        steps.append([row.n_tokens for row in plan.rows])
        return run(plan)

    engine._runner.run = counted  # type: ignore[method-assign]
    warm_up(engine._runner, groups=1, block_size=16, max_tokens=3, max_seqs=2, max_model_len=300)
    assert steps == [[1], [2], [3], [1, 1], [2, 1]]
    steps.clear()
    warm_up(engine._runner, groups=1, block_size=16, max_tokens=6, max_seqs=3, max_model_len=300)
    # With few tokens attention keeps more of every sequence than with many, which it computes in another way.
    assert steps[4:] == [[1, 1, 1], [2, 1, 1], [3, 1, 1], [4, 1, 1]]
