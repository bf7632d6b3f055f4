"""Which architectures run, and who reads their metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.families.llama import llama_from_config, llama_from_gguf
from appliance.engine.spec import DecoderSpec

# By `general.architecture` of a GGUF file, or by a name in `architectures` of a config.json.
_READERS: dict[str, Callable[[Mapping[str, Any], frozenset[str]], DecoderSpec]] = {
    "llama": llama_from_gguf,
    "LlamaForCausalLM": llama_from_config,
}


def supported_architectures() -> tuple[str, ...]:
    return tuple(sorted(_READERS))


def read_spec(architecture: str, metadata: Mapping[str, Any], weight_names: frozenset[str]) -> DecoderSpec:
    """The spec of a model from its metadata (of a GGUF file, or a config.json) and its weights' canonical names.

    Raises:
        UnsupportedModelError: the architecture, or a feature the metadata asks for, is not supported.
        CheckpointError: a key is missing or mistyped.
    """
    if architecture not in _READERS:
        works = ", ".join(supported_architectures())
        raise UnsupportedModelError(f"architecture {architecture!r} is not supported; supported: {works}")
    return _READERS[architecture](metadata, weight_names)
