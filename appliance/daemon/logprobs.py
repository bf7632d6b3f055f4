"""Log probabilities in the shapes of OpenAI's two routes and of vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from appliance.engine.types import PositionLogprobs, TokenLogprob
from appliance.text.tokenizer import Tokenizer


def chat(tokenizer: Tokenizer, positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    content = [
        {
            **_chat_token(tokenizer, position.token),
            "top_logprobs": [_chat_token(tokenizer, t) for t in position.top],
        }
        for position in positions
    ]
    return {"content": content, "refusal": None}


def completion(
    tokenizer: Tokenizer, positions: Sequence[PositionLogprobs], offset: int, first_id: int | None = None
) -> dict[str, Any]:
    """The `logprobs` of a completion choice.

    Args:
        offset: characters of the choice's text before these tokens.
        first_id: a token before all others, which has no log probability: the first one of an echoed prompt.
    """
    tokens = [tokenizer.token_text(position.token.token_id) for position in positions]
    logprobs: list[float | None] = [position.token.logprob for position in positions]
    tops: list[dict[str, float] | None] = [
        {tokenizer.token_text(top.token_id): top.logprob for top in reversed((position.token, *position.top))}
        for position in positions
    ]
    if first_id is not None:
        tokens, logprobs, tops = [tokenizer.token_text(first_id), *tokens], [None, *logprobs], [None, *tops]
    offsets = [offset + sum(map(len, tokens[:place])) for place in range(len(tokens))]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def prompt(tokenizer: Tokenizer, positions: Sequence[PositionLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt but the first, by id, it and the most likely ones."""
    scored = [
        {str(each.token_id): _described(tokenizer, each) for each in (*position.top, position.token)}
        for position in positions
    ]
    return [None, *scored]


def _described(tokenizer: Tokenizer, token: TokenLogprob) -> dict[str, Any]:
    text = tokenizer.token_text(token.token_id)
    return {"logprob": token.logprob, "rank": token.rank, "decoded_token": text}


def _chat_token(tokenizer: Tokenizer, token: TokenLogprob) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token.token_id)
    return {"token": tokenizer.token_text(token.token_id), "logprob": token.logprob, "bytes": list(raw)}
