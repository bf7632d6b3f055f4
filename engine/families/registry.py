"""Which architectures run, and who reads their metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.families.llama import llama_from_gguf
from appliance.engine.spec import DecoderSpec

_GGUF: dict[str, Callable[[Mapping[str, Any], frozenset[str]], DecoderSpec]] = {"llama": llama_from_gguf}


def supported_architectures() -> tuple[str, ...]:
    return tuple(sorted(_GGUF))


def read_spec(metadata: Mapping[str, Any], weight_names: frozenset[str]) -> DecoderSpec:
    """The spec of a GGUF file from its metadata and the canonical names of its weights.

    Raises:
        UnsupportedModelError: the architecture, or a feature the metadata asks for, is not supported.
    """
    architecture = str(metadata.get("general.architecture"))
    if architecture not in _GGUF:
        works = ", ".join(supported_architectures())
        raise UnsupportedModelError(f"architecture {architecture!r} is not supported; supported: {works}")
    return _GGUF[architecture](metadata, weight_names)
