"""Regular expressions out of a model folder, which are nobody's friends. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from appliance.quant.errors import UnsupportedFormatError

if TYPE_CHECKING:
    from pydantic_core import SchemaValidator

MAX_PATTERN_CHARS = 512
# More than the layers of any model, and as many as stay compiled.
MAX_PATTERNS = 4096
# Counted repeats and the large Unicode classes make programs that are slow to build; layers' names need neither.
_COSTLY = re.compile(r"\{|\\(?![dwb])[A-Za-z0-9]")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ASCII = {"d": "[0-9]", "w": "[0-9A-Za-z_]", "b": r"(?-u:\b)"}


def matches_start(pattern: str, text: str) -> bool | None:
    """Whether `text` starts with `pattern`, None where that is not known: it is malformed, or beyond what is tried.

    Python's own engine backtracks, for ages on some patterns. Rust's, which pydantic brings, takes linear time.
    """
    validator = _compile(pattern)
    return None if validator is None else validator.isinstance_python(text)


def limit_patterns(patterns: Iterable[str]) -> None:
    """Raises UnsupportedFormatError where there are more patterns than are tried."""
    count = sum(1 for _ in patterns)
    if count > MAX_PATTERNS:
        raise UnsupportedFormatError(f"{count} patterns for names of layers, expected at most {MAX_PATTERNS}")


@lru_cache(maxsize=MAX_PATTERNS)
def _compile(pattern: str) -> SchemaValidator | None:
    # Here, as most models have no patterns.
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    if len(pattern) > MAX_PATTERN_CHARS or _COSTLY.search(pattern):
        return None
    # Names are ASCII; Rust's own classes hold all of Unicode's letters, and are slow to build too.
    ascii_ = _ESCAPE.sub(lambda escape: _ASCII.get(escape[1], escape[0]), pattern)
    try:
        return SchemaValidator(core_schema.str_schema(pattern=f"^(?:{ascii_})", regex_engine="rust-regex"))
    except SchemaError:
        return None
