"""Regular expressions that come with a checkpoint, and so from anywhere. No torch."""

from __future__ import annotations

from functools import lru_cache

from pydantic_core import SchemaError, SchemaValidator, core_schema

from appliance.quant.errors import UnsupportedFormatError


def starts_with(pattern: str, name: str) -> bool:
    """Whether the pattern matches from the start of the name, as `re.match` does, but in linear time.

    Python's engine takes exponential time for some patterns; the one here (Rust's regex crate, which pydantic brings)
    never does, and so has neither look-around nor back references.

    Raises:
        UnsupportedFormatError: the pattern is none, is huge, or needs what is not there.
    """
    return _compiled(pattern).isinstance_python(name)


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> SchemaValidator:
    try:
        return SchemaValidator(core_schema.str_schema(pattern=f"^(?:{pattern})", regex_engine="rust-regex"))
    except SchemaError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UnsupportedFormatError(
            f"regular expression {pattern[:200]!r} is not understood ({reason})"
        ) from None
