"""Chat messages to the prompt that a model was trained on, by the Jinja template it carries.

The environment is the one that transformers renders templates in: that is what they are written against.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from appliance.text.tokenizer import Tokenizer

MAX_SOURCE_CHARS = 1 << 20
MAX_MESSAGES = 10_000
MAX_OUTPUT_CHARS = 1 << 24
_MAX_REASON_CHARS = 500


class TemplateError(ValueError):
    """The messages cannot be made into a prompt by this model's template; one line that says why."""


class NoTemplateError(TemplateError):
    """The model has no template: it was not taught to chat."""


class ChatTemplate:
    """A model's chat template.

    Args:
        source: the template, None where the model has none: then `render` refuses.
        named_tokens: the text of the tokens that templates know by a name. `bos_token` and `eos_token` are ""
            where the model has none.
    """

    def __init__(self, source: str | None, named_tokens: Mapping[str, str] | None = None) -> None:
        self._tokens = {"bos_token": "", "eos_token": "", **(named_tokens or {})}
        self._template: jinja2.Template | None = None
        self._refusal = ""
        self._is_missing = source is None
        if source is None:
            self._refusal = "this model has no chat template; use /v1/completions"
        elif len(source) > MAX_SOURCE_CHARS:
            self._refusal = (
                f"this model's chat template exceeds {MAX_SOURCE_CHARS} characters; use /v1/completions"
            )
        else:
            try:
                self._template = _environment().from_string(source)
            except jinja2.TemplateError as error:
                self._refusal = (
                    f"this model's chat template is broken ({_one_line(error)}); use /v1/completions"
                )

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The template that came with the tokeniser."""
        return cls(tokenizer.chat_template, tokenizer.named_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The prompt. It holds its own special tokens: encode it with `parse_special` and without BOS.

        Args:
            messages: as OpenAI's API has them; see `normalised`.
            add_generation_prompt: whether to end with the beginning of an answer.
            extra: further variables for the template.

        Raises:
            TemplateError: the model has no template, the template refused, or a limit was exceeded.
        """
        if self._template is None:
            raise (NoTemplateError if self._is_missing else TemplateError)(self._refusal)
        variables = {**self._tokens, **extra, "add_generation_prompt": add_generation_prompt}
        variables["messages"] = normalised(messages)
        pieces, length = [], 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_OUTPUT_CHARS:
                    break
        # A template is foreign code: whatever it raises is its verdict on these messages.
        except Exception as error:
            raise TemplateError(
                f"the model's chat template refused the messages: {_one_line(error)}"
            ) from None
        if length > MAX_OUTPUT_CHARS:
            raise TemplateError(f"the rendered prompt exceeds {MAX_OUTPUT_CHARS} characters")
        return "".join(pieces)


def normalised(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them.

    Content null or absent is "", text parts are joined by newlines, an empty or null `tool_calls` is absent.

    Raises:
        TemplateError: too many messages, or a content part that is not text.
    """
    if len(messages) > MAX_MESSAGES:
        raise TemplateError(f"{len(messages)} messages, expected at most {MAX_MESSAGES}")
    result = []
    for index, message in enumerate(messages):
        clean = {key: value for key, value in message.items() if key != "tool_calls" or value}
        clean["content"] = _content(message.get("content"), f"messages[{index}].content")
        result.append(clean)
    return result


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TemplateError(
            f"{where} is a {type(content).__name__}, expected a string or a list of text parts"
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise TemplateError(f"{where}[{index}] has type {kind!r}; this model takes text parts only")
        texts.append(text)
    return "\n".join(texts)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks the model's words for training; ignored here."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """A `namespace` that keeps templates away from Python's internals, which the sandbox does not here."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named `self`, as in Jinja, so that a template may call an attribute so.
        this, *positional = args
        attributes = dict(*positional, **kwargs)
        for name in attributes:
            _check_public(name)
        jinja2.utils.Namespace.__init__(this, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace's attribute must not be called {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which is not what a model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__
