"""Regular expressions out of a model folder, which are nobody's friends. No torch."""

from __future__ import annotations

import re
from functools import lru_cache

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

MAX_PATTERN_CHARS = 512
# Counted repeats and the large Unicode classes make programs that are slow to build; layers' names need neither.
_COSTLY = re.compile(r"\{|\\(?![dwb])[A-Za-z0-9]")


def matches_start(pattern: str, text: str) -> bool | None:
    """Whether `text` starts with `pattern`, None where that is not known: it is malformed, or beyond what is tried.

    Python's own engine backtracks, for ages on some patterns. Rust's, which pydantic brings, takes linear time.
    """
    validator = _compile(pattern)
    if validator is None:
        return None
    try:
        validator.validate_python(text)
    except ValidationError:
        return False
    return True


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> SchemaValidator | None:
    if len(pattern) > MAX_PATTERN_CHARS or _COSTLY.search(pattern):
        return None
    try:
        schema = core_schema.str_schema(pattern=f"^(?:{pattern})", regex_engine="rust-regex")
        return SchemaValidator(schema)
    except SchemaError:
        return None
