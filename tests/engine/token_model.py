"""A language model over plain numbers, and requests to it: what the tests of planning and of KV memory compute with."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from appliance.engine.sampling_params import SamplingParams
from appliance.engine.seeds import derive_seed
from appliance.engine.types import Request, Sequence

VOCAB = 50
EOS = 0

requests = st.lists(
    st.tuples(
        st.integers(1, 18),  # prompt length
        st.integers(0, 2),  # which common prefix
        st.integers(0, 2),  # priority
        st.integers(1, 9),  # max_tokens
        st.integers(0, 12),  # step of arrival
        st.integers(1, 6),  # continuations
        st.booleans(),  # ignore_eos
    ),
    min_size=1,
    max_size=9,
)


def make_sequence(
    name: str,
    prompt: list[int],
    arrived: float,
    *,
    priority: int = 0,
    **sampling: Any,
) -> Sequence:
    params = SamplingParams(**{"max_tokens": 6, **sampling})
    request = Request(
        id=name, prompt_ids=tuple(prompt), sampling=params, arrived_at=arrived, priority=priority
    )
    return Sequence(request, list(prompt), seed=0)


def next_token(tokens: list[int], seed: int) -> int:
    """A model: the next token depends on every token before it and the seed, and now and then ends the text."""
    return random.Random(repr((tokens, seed))).randrange(VOCAB // 3)


def undisturbed(seq: Sequence, index: int, max_model_len: int) -> tuple[list[int], str]:
    """What a continuation of a request must be, whatever happens around it."""
    tokens = list(seq.request.prompt_ids)
    while True:
        token = next_token(tokens, derive_seed(seq.seed, index))
        if token == EOS and not seq.request.sampling.ignore_eos:
            return tokens[seq.num_prompt :], "stop"
        tokens.append(token)
        if len(tokens) - seq.num_prompt == seq.request.sampling.max_tokens or len(tokens) == max_model_len:
            return tokens[seq.num_prompt :], "length"
