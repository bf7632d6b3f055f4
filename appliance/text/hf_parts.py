"""The parts of a tokenizers.Tokenizer, as tokenizer.json writes them. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def steps(part: Any) -> list[Mapping[str, Any]]:
    """The steps of a normaliser, pre-tokeniser, post-processor or decoder, sequences taken apart; none of None.

    Each has its `type` and what the library writes with it; older spellings have become today's.
    """
    return [] if part is None else _flat(json.loads(part.__getstate__()))


def _flat(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    # The four kinds of part have a key of their own for it.
    (parts,) = (value for key, value in state.items() if key != "type")
    return [step for inner in parts for step in _flat(inner)]
