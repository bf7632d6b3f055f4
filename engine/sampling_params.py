"""`SamplingParams`: how tokens are chosen and when a sequence ends. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

import msgspec

from appliance.engine.errors import ParameterError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_SEED = 2**63 - 1
MAX_N = 64
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 64
MAX_LOGIT_BIAS = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen and when a sequence ends. Names and meanings are vLLM's.

    Attributes:
        n: continuations to return; they share the prompt's KV memory.
        best_of: continuations to generate, of which the `n` most likely (by mean log probability) are returned;
            None: `n`.
        temperature: 0 picks the most likely token (greedy); otherwise logits are divided by it. Range 0…2.
        top_p: keep the smallest set of tokens whose probabilities sum to at least `top_p`. Range (0, 1].
        top_k: keep the `top_k` most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than `min_p` times the most likely one. Range 0…1.
        presence_penalty: taken off the logit of every token generated so far. Range -2…2.
        frequency_penalty: taken off as often as the token was generated. Range -2…2.
        repetition_penalty: logits of tokens in prompt or output are divided by it where positive, multiplied where
            negative (Keskar et al. 2019, arXiv:1909.05858). Range 0.01…10; 1 is none.
        dry_multiplier: "don't repeat yourself": a token that would prolong a repetition of length l by one loses
            dry_multiplier · dry_base^(l - dry_allowed_length), for l from dry_allowed_length up. 0 is off.
        xtc_probability: "exclude top choices": with this probability, of all tokens at least as likely as
            `xtc_threshold` only the least likely is kept. Ranges 0…1 and 0…0.5.
        seed: makes the sampled ids a function of (seed, position) alone; None draws a seed per request.
        max_tokens: end with reason "length" after this many tokens; None runs to the end of the context.
        min_tokens: no end-of-sequence or stop token, and no stop string, before this many tokens.
        stop: strings that end the text and are not part of it (at most 16, each at most 256 characters).
        stop_token_ids: ids that end the sequence, in addition to the model's own.
        bad_words: texts that are not generated: their last token is forbidden after the others.
        logit_bias: added to the logits of these token ids; -100…100.
        ignore_eos: go on past the model's end-of-sequence tokens.
        logprobs: return the log probability of each generated token and of this many most likely ones.
        prompt_logprobs: the same for the tokens of the prompt, from the second on.

    Raises:
        ParameterError: a value has the wrong type or is outside its range; `param` names it.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    logit_bias: dict[int, float] = {}
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words"):
            value: Any = getattr(self, name)
            if isinstance(value, str):
                value = (value,)
            elif value is None or isinstance(value, Iterable):
                value = tuple(() if value is None else value)
            msgspec.structs.force_setattr(self, name, value)
        bias: Any = {} if self.logit_bias is None else self.logit_bias
        msgspec.structs.force_setattr(self, "logit_bias", dict(bias) if isinstance(bias, Mapping) else bias)
        check_types(self)
        self._check_ranges()
        self._check_lists()

    @property
    def num_sequences(self) -> int:
        """Continuations to generate."""
        return self.best_of or self.n

    @property
    def needs_context(self) -> bool:
        """Whether the choice of a token depends on the tokens before it (other than through the model)."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.dry_multiplier
            or self.bad_words
        )

    def _check_ranges(self) -> None:
        # `not (a <= x <= b)` rather than `x < a or x > b`, so that NaN is refused too.
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ParameterError(name, f"{name} is {value}, expected {low} to {high}")
        if not 0.0 < self.top_p <= 1.0:
            raise ParameterError("top_p", f"top_p is {self.top_p}, expected more than 0 and at most 1")
        if self.best_of is not None and self.best_of < self.n:
            raise ParameterError("best_of", f"best_of is {self.best_of}, expected at least n = {self.n}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                "min_tokens",
                f"min_tokens is {self.min_tokens}, expected at most max_tokens = {self.max_tokens}",
            )

    def _check_lists(self) -> None:
        for name, limit in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
            texts = getattr(self, name)
            if len(texts) > limit:
                raise ParameterError(name, f"{name} has {len(texts)} entries, expected at most {limit}")
            if any(not 1 <= len(text) <= MAX_STOP_CHARS for text in texts):
                raise ParameterError(name, f"each entry of {name} must have 1 to {MAX_STOP_CHARS} characters")
        if any(token < 0 for token in self.stop_token_ids):
            raise ParameterError("stop_token_ids", "stop_token_ids must not be negative")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ParameterError(
                "logit_bias",
                f"logit_bias has {len(self.logit_bias)} entries, expected at most {MAX_LOGIT_BIAS}",
            )
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise ParameterError(
                    "logit_bias", f"logit_bias of token {token} is {bias}, expected -100 to 100"
                )


def check_types(params: msgspec.Struct) -> None:
    """Raises ParameterError: a value has not the type of its field."""
    for field in msgspec.structs.fields(params):
        value = getattr(params, field.name)
        try:
            msgspec.convert(value, field.type, strict=True)
        except msgspec.ValidationError:
            kind = str(field.type) if get_args(field.type) else field.type.__name__
            raise ParameterError(field.name, f"{field.name} is {value!r}, expected {kind}") from None


_RANGES = (
    ("n", 1, MAX_N),
    ("best_of", 1, MAX_N),
    ("temperature", 0.0, 2.0),
    ("top_k", -1, 2**31 - 1),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 10.0),
    ("dry_multiplier", 0.0, 100.0),
    ("dry_base", 1.0, 10.0),
    ("dry_allowed_length", 1, 2**20),
    ("xtc_probability", 0.0, 1.0),
    ("xtc_threshold", 0.0, 0.5),
    ("seed", 0, MAX_SEED),
    ("max_tokens", 0, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
