"""Beam search against the same search written down plainly, every candidate scored from its whole text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from random_model import write_model

from appliance import LLM, BeamSearchParams, SamplingParams
from appliance.engine.errors import ParameterError

BLOCK_BYTES = 1 * 2 * 2 * 16 * 32 * 4
PROMPTS = [[5 + (7 * i) % 120 for i in range(length)] for length in (20, 37)]


@pytest.fixture(scope="module")
def path(golden: Path) -> str:
    return str(golden / "gguf_f16" / "mini-f16.gguf")


def plain_search(
    llm: LLM, prompt: list[int], params: BeamSearchParams
) -> list[tuple[tuple[int, ...], float]]:
    width, penalty = params.beam_width, params.length_penalty
    eos = () if params.ignore_eos else llm.tokenizer.eos_token_ids
    scoring = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=2 * width)
    beams: list[tuple[tuple[int, ...], float]] = [(tuple(prompt), 0.0)]
    found: list[tuple[float, tuple[int, ...], float]] = []
    for _ in range(params.max_tokens):
        grown = []
        for tokens, total in beams:
            (output,) = llm.generate([list(tokens)], scoring)
            for token in output.outputs[0].logprobs[0].top:  # type: ignore[index]
                logprob = total + token.logprob
                score = logprob / (len(tokens) + 1) ** penalty
                if token.token_id in eos:
                    found.append((score, tokens, logprob))
                else:
                    grown.append((score, (*tokens, token.token_id), logprob))
        grown.sort(key=lambda item: -item[0])
        beams = [(tokens, logprob) for _, tokens, logprob in grown[:width]]
    found += [(logprob / len(tokens) ** penalty, tokens, logprob) for tokens, logprob in beams]
    found.sort(key=lambda item: -item[0])
    return [(tokens, logprob) for _, tokens, logprob in found[:width]]


@pytest.mark.parametrize("config", [{}, {"max_num_seqs": 2}, {"kv_cache_memory_bytes": 8 * BLOCK_BYTES}])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0])
def test_finds_what_the_plain_search_finds(path: str, config: dict[str, Any], length_penalty: float) -> None:
    llm = LLM(path, **{"kv_cache_memory_bytes": 2**21, **config})
    params = BeamSearchParams(beam_width=3, max_tokens=7, length_penalty=length_penalty)
    outputs = llm.beam_search(PROMPTS, params)
    reference = LLM(path, kv_cache_memory_bytes=2**21)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        got = [(sequence.tokens, sequence.cum_logprob) for sequence in output.sequences]
        expected = plain_search(reference, prompt, params)
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
        assert [logprob for _, logprob in got] == pytest.approx([logprob for _, logprob in expected])
        for sequence in output.sequences:
            assert sequence.text == llm.tokenizer.decode(sequence.tokens[len(prompt) :])
    assert llm._engine.stats().blocks_used == 0  # type: ignore[union-attr]


def test_beams_share_the_prompt(path: str) -> None:
    llm = LLM(path, kv_cache_memory_bytes=2**21)
    engine, most = llm._engine, 0
    assert engine is not None
    step = engine.step

    def watched() -> Any:
        nonlocal most
        events = step()
        most = max(most, engine.stats().blocks_used)
        engine.scheduler.check()
        return events

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", watched)
        llm.beam_search([PROMPTS[0] * 10], BeamSearchParams(beam_width=6, max_tokens=6))
    assert most <= 13 + 6 + 1  # the prompt has 200 tokens; six beams write at most one block each


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("beam_width", 11, "beam_width is 11, expected 1 to 10"),
        ("beam_width", 2.5, "beam_width is 2.5, expected int"),
        ("max_tokens", 0, "max_tokens is 0, expected at least 1"),
        ("max_tokens", None, "max_tokens is None, expected int"),
        ("length_penalty", 1000.0, "length_penalty is 1000.0, expected -10 to 10"),
        ("length_penalty", float("nan"), "length_penalty is nan, expected -10 to 10"),
    ],
)
def test_an_unusable_parameter_is_refused_by_name(field: str, value: Any, expected: str) -> None:
    with pytest.raises(ParameterError, match=expected) as refused:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 5, field: value})
    assert refused.value.param == field


def test_parameters_of_another_kind_are_refused(path: str) -> None:
    llm = LLM(path, kv_cache_memory_bytes=2**20)
    with pytest.raises(ParameterError, match="expected BeamSearchParams, found dict"):
        llm.beam_search([[5]], {"beam_width": 2, "max_tokens": 2})  # type: ignore[arg-type]


def test_a_continuation_keeps_the_space_that_it_begins_with(tmp_path: Path) -> None:
    """A whole text of this tokeniser would lose it."""
    with LLM(str(write_model(tmp_path / "m", hidden=64, layers=1)), kv_cache_memory_bytes=2**20) as llm:
        (word,) = llm.tokenizer.encode("the", parse_special=False, add_bos=False)
        prompt, params = [word] * 3, BeamSearchParams(beam_width=1, max_tokens=2, ignore_eos=True)
        (output,) = llm.beam_search([prompt], params)
    assert output.sequences[0].tokens == (word,) * 5
    assert output.sequences[0].text == " the the"
