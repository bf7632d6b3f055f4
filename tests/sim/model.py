"""A language model over plain numbers, and what it says when nothing disturbs it.

A *mark* is a number that stands for a token and all tokens before it. It is what the model keeps of a position in KV
memory, so whoever reads a mark sees which text was computed there, and at which position.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from appliance.engine.sampling_params import SamplingParams
from appliance.engine.seeds import derive_seed
from appliance.engine.types import Request

VOCAB = 64
EOS = 0

Candidate = tuple[int, float]
"""A token and its log probability."""


@dataclass(slots=True)
class Text:
    """Tokens and their marks."""

    tokens: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)

    def append(self, token: int) -> None:
        # Hashes of tuples of numbers are the same in every process.
        self.marks.append(hash((self.marks[-1] if self.marks else 0, token)))
        self.tokens.append(token)

    def copy(self) -> Text:
        return Text(list(self.tokens), list(self.marks))

    def seen_by_last(self, windows: Many[int]) -> list[list[int]]:
        """For each group, the marks that the last token sees."""
        return [self.marks[-window:] for window in windows]


def text_of(tokens: Many[int]) -> Text:
    text = Text()
    for token in tokens:
        text.append(token)
    return text


def next_token(seen: Many[Many[int]], seed: int, forbidden: Many[int] = ()) -> int:
    """What follows: a function of all that the last token sees in every group, and of the seed."""
    token = _digest(seen, seed) % VOCAB
    while token in forbidden:
        token = (token + 1) % VOCAB
    return token


def candidates(seen: Many[Many[int]], count: int) -> list[Candidate]:
    """What may follow, most likely first."""
    number = _digest(seen, 0)
    return [((number + 5 * place) % VOCAB, -place - (number >> place) % 8 / 8) for place in range(count)]


def _digest(seen: Many[Many[int]], seed: int) -> int:
    return hash((seed, *(hash(tuple(marks)) for marks in seen)))


def ends(sampling: SamplingParams) -> tuple[int, ...]:
    """The ids that end a sequence."""
    return tuple(sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}))


def undisturbed(
    request: Request, seed: int, index: int, windows: Many[int], max_model_len: int
) -> tuple[Text, str]:
    """A continuation of a request, and why it ends: what must come out whatever happens around it."""
    sampling, text = request.sampling, text_of(request.prompt_ids)
    if sampling.max_tokens == 0:
        return text, "length"
    num_prompt, own_seed = len(text.tokens), derive_seed(seed, index)
    longest = (
        max_model_len if sampling.max_tokens is None else min(max_model_len, num_prompt + sampling.max_tokens)
    )
    while True:
        is_short = len(text.tokens) - num_prompt < sampling.min_tokens
        token = next_token(text.seen_by_last(windows), own_seed, ends(sampling) if is_short else ())
        if token in ends(sampling):
            return text, "stop"
        text.append(token)
        if len(text.tokens) == longest:
            return text, "length"


@dataclass(slots=True)
class Beam:
    text: Text
    logprob: float = 0.0


def grow_beams(
    beams: Mapping[int, Beam], said: Mapping[int, Many[Candidate]], width: int
) -> list[tuple[int, Beam]]:
    """The `width` best continuations by one token, best first, and which beam each of them continues."""
    grown = [
        (-(beam.logprob + logprob), beam.text.tokens, token, index)
        for index, beam in beams.items()
        for token, logprob in said[index]
    ]
    best = []
    for negative, _, token, index in sorted(grown)[:width]:
        text = beams[index].text.copy()
        text.append(token)
        best.append((index, Beam(text, -negative)))
    return best


def undisturbed_beams(prompt: Many[int], width: int, length: int, windows: Many[int]) -> list[list[int]]:
    """The texts that a beam search finds, best first."""
    beams = {0: Beam(text_of(prompt))}
    for _ in range(length):
        said = {i: candidates(beam.text.seen_by_last(windows), 2 * width) for i, beam in beams.items()}
        beams = dict(enumerate(beam for _, beam in grow_beams(beams, said, width)))
    return [beam.text.tokens for beam in beams.values()]
