"""The offline API, and that it and the daemon say the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from live_daemon import MODEL, PRECISION

from appliance import LLM, SamplingParams
from appliance.engine.errors import ContextLengthError, EngineError, ParameterError
from appliance.model_files import ModelFilesError
from appliance.settings import SettingsError

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture(scope="module")
def tiny(golden: Path) -> LLM:
    return LLM(str(golden / "gguf_q8_0" / "mini-q8_0.gguf"), kv_cache_memory_bytes=2**20)


@pytest.fixture(scope="module")
def starter(starter_models_dir: Path) -> LLM:
    return LLM(
        MODEL,
        download_dir=starter_models_dir,
        kv_cache_memory_bytes=2**28,
        max_model_len=512,
        activation_precision=PRECISION,
    )


def test_texts_and_ids_come_back_in_order(tiny: LLM) -> None:
    prompts = ["Hello", [5, 6, 7], "world"]
    outputs = tiny.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == ["Hello", None, "world"]
    assert outputs[1].prompt_token_ids == (5, 6, 7)
    for output, prompt in zip(outputs, prompts, strict=True):
        (alone,) = tiny.generate([prompt], GREEDY)
        assert output.outputs == alone.outputs
        (completion,) = output.outputs
        assert completion.text == tiny.tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == ("length" if len(completion.token_ids) == 20 else "stop")


def test_one_prompt_may_be_given_as_it_is(tiny: LLM) -> None:
    assert tiny.generate([5, 6, 7], GREEDY)[0].outputs == tiny.generate([[5, 6, 7]], GREEDY)[0].outputs
    assert tiny.generate("Hello", GREEDY)[0].prompt == "Hello"
    assert tiny.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_parameters(tiny: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 7)]
    outputs = tiny.generate([[5], [5]], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 7]
    with pytest.raises(ParameterError, match="1 sampling parameters for 2 prompts"):
        tiny.generate([[5], [6]], params[:1])


def test_a_bad_prompt_stops_the_call_before_anything_runs(tiny: LLM) -> None:
    with pytest.raises(ContextLengthError, match="512"):
        tiny.generate([[5], [5] * 600], GREEDY)
    with pytest.raises(ParameterError, match="expected a text or a list of token ids"):
        tiny.generate([[5], [1.5]], GREEDY)  # type: ignore[list-item]
    assert len(tiny.generate([[5]], GREEDY)) == 1


def test_a_stop_string_ends_the_text_before_it(starter: LLM) -> None:
    (plain,) = starter.generate("The capital of France is", GREEDY)
    text = plain.outputs[0].text
    stop = text[8:13]
    params = SamplingParams(temperature=0.0, max_tokens=20, stop=[stop])
    (stopped,) = starter.generate("The capital of France is", params)
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)


def test_prompts_may_be_any_sequence_of_whole_numbers(tiny: LLM) -> None:
    expected = tiny.generate([[5, 6, 7]], GREEDY)[0].outputs
    for prompt in (np.array([5, 6, 7]), (5, 6, 7), range(5, 8), {"prompt_token_ids": [5, 6, 7]}):
        assert tiny.generate([prompt], GREEDY)[0].outputs == expected  # type: ignore[list-item]
    for bad in (
        b"Hello",
        None,
        [5, "x"],
        [True, True],
        {"prompt": 5},
        {"text": "x"},
        {"prompt": "x", 5: 6},
        {},
    ):
        with pytest.raises(ParameterError, match="a prompt"):
            tiny.generate([bad], GREEDY)  # type: ignore[list-item]
    for params in ({"temperature": 0}, [{"temperature": 0}], 5, "greedy"):
        with pytest.raises(ParameterError, match="expected SamplingParams"):
            tiny.generate([[5]], params)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", ["hello", 5, None, {"role": "user", "content": "x"}, [{}, "x"], ["x"]])
def test_what_is_no_conversation_is_refused(tiny: LLM, messages: Any) -> None:
    with pytest.raises(ParameterError, match=r"a conversation is .*, expected a list of messages"):
        tiny.chat(messages)


def test_threads_take_turns(tiny: LLM) -> None:
    prompts = [[5 + n, 6, 7] for n in range(6)]
    expected = [tiny.generate([prompt], GREEDY)[0].outputs for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda prompt: tiny.generate([prompt], GREEDY)[0].outputs, prompts)) == expected


def test_an_interrupted_call_leaves_nothing_behind(tiny: LLM) -> None:
    def interrupted(events: int) -> None:
        step = tiny._engine.step  # type: ignore[union-attr]
        calls = iter(range(events))

        def interrupt() -> Any:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return step()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny._engine, "step", interrupt)
            with pytest.raises(KeyboardInterrupt):
                tiny.generate([[5], [6, 7]], GREEDY)

    expected = tiny.generate([[8, 9]], GREEDY)[0].outputs
    for events in (0, 1, 3):
        interrupted(events)
        assert tiny.generate([[8, 9]], GREEDY)[0].outputs == expected
        assert tiny._engine.stats().blocks_used == 0  # type: ignore[union-attr]


def test_a_conversation_is_answered_as_by_the_daemons_route(starter: LLM, api: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    (offline,) = starter.chat(messages, SamplingParams(temperature=0.0, max_tokens=24))
    online = api.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=24)  # type: ignore[arg-type]
    assert offline.outputs[0].text == online.choices[0].message.content
    both = starter.chat([messages, messages], SamplingParams(temperature=0.0, max_tokens=24))
    assert [output.outputs[0].text for output in both] == [offline.outputs[0].text] * 2


def test_a_closed_model_says_so(golden: Path) -> None:
    with LLM(str(golden / "gguf_q8_0" / "mini-q8_0.gguf"), kv_cache_memory_bytes=2**20) as llm:
        (output,) = llm.generate(
            [[5]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1)
        )
        assert output.finished
        assert output.metrics.first_token_at is not None
        assert output.outputs[0].cumulative_logprob == pytest.approx(
            sum(position.token.logprob for position in output.outputs[0].logprobs or ())
        )
    with pytest.raises(EngineError, match="was closed"):
        llm.generate([[5]])


def test_an_unknown_setting_or_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"max_model_length .*did you mean max_model_len\?"):
        LLM(MODEL, max_model_length=5)
    with pytest.raises(ModelFilesError, match=r"nothing\.gguf"):
        LLM(str(tmp_path / "nothing.gguf"))


@pytest.mark.starter
def test_offline_text_is_the_daemons_text_alone_and_in_a_batch(starter: LLM, api: openai.OpenAI) -> None:
    prompts = [
        f"{n}. Once upon a time in {place}," for n, place in enumerate(("Rome", "Oslo", "the sea", "1820"))
    ]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    offline = [output.outputs[0].text for output in starter.generate(prompts, params)]
    assert offline == [starter.generate(prompt, params)[0].outputs[0].text for prompt in prompts]

    def online(prompt: str) -> str:
        return (
            api.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0).choices[0].text
        )

    assert [online(prompt) for prompt in prompts] == offline
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(online, prompts)) == offline


@pytest.mark.starter
def test_seeded_text_is_the_daemons_text(starter: LLM, api: openai.OpenAI) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=24)
    (offline,) = starter.generate("My favourite animal is", params)
    answer = api.completions.create(
        model=MODEL, prompt="My favourite animal is", max_tokens=24, temperature=0.9, top_p=0.9, seed=11
    )
    assert answer.choices[0].text == offline.outputs[0].text


@pytest.mark.starter
def test_a_pool_that_forces_preemption_gives_the_text_of_an_ample_one(
    starter: LLM, starter_models_dir: Path
) -> None:
    prompts = [f"Write about the number {n} and " * 4 for n in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    ample = [output.outputs[0].token_ids for output in starter.generate(prompts, params)]
    tiny_pool = LLM(
        MODEL,
        download_dir=starter_models_dir,
        kv_cache_memory_bytes=10 * 368640,
        max_model_len=160,
        activation_precision=PRECISION,
    )
    squeezed = [output.outputs[0].token_ids for output in tiny_pool.generate(prompts, params)]
    assert squeezed == ample
    assert tiny_pool._engine.stats().preemptions_total > 0
