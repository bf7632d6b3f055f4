"""Errors of the engine that a caller can act on. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.types import BlockCopy


class EngineError(Exception):
    """The engine could not do what it was asked; the message says what was found, expected and to do."""

    code = "engine_error"


class ParameterError(EngineError, ValueError):
    """A request parameter is outside its range.

    Attributes:
        param: name of the offending field.
    """

    code = "invalid_parameter"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(ParameterError):
    """The prompt does not leave room for one token in the served context."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(
            "prompt",
            f"the prompt has {prompt_tokens} tokens, but this model serves a context of {max_model_len} tokens "
            f"of which one is needed for the answer; shorten the prompt by {prompt_tokens - max_model_len + 1} tokens",
        )
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class UnsupportedModelError(EngineError):
    """The checkpoint is sound, but its architecture or one of its features is not supported."""

    code = "unsupported_model"


class BackendError(EngineError):
    """The backend that was asked for is not there, or cannot do what a setting asks of it."""

    code = "unsupported_backend"


class MemoryPlanError(EngineError):
    """The model or the smallest useful KV pool does not fit in the memory that is free."""

    code = "out_of_memory"


class CopyError(EngineError):
    """A block of KV memory was not copied; the target holds anything.

    Attributes:
        copy: the one that failed, or the first of several that lie side by side.
    """

    code = "copy_failed"

    def __init__(self, copy: BlockCopy, reason: str) -> None:
        source, target = copy.source, copy.target
        super().__init__(
            f"KV block {source.id} of group {source.group} ({source.tier}) was not copied to block {target.id} "
            f"({target.tier}): {reason}"
        )
        self.copy = copy
