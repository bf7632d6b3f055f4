"""Which architectures run, and who reads their metadata."""

from __future__ import annotations

from collections.abc import Callable

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.families.common import Metadata, WeightNames, config_spec, gguf_spec
from appliance.engine.families.gemma import (
    gemma2_from_config,
    gemma2_from_gguf,
    gemma3_from_config,
    gemma3_from_gguf,
)
from appliance.engine.families.gpt_oss import gpt_oss_from_config, gpt_oss_from_gguf
from appliance.engine.families.granite import granite_from_config, granite_from_gguf
from appliance.engine.families.mistral import mistral_from_config
from appliance.engine.families.mixtral import llama_from_gguf, mixtral_from_config
from appliance.engine.families.phi3 import phi3_from_config, phi3_from_gguf
from appliance.engine.families.qwen import qwen_from_config
from appliance.engine.families.qwen3_moe import qwen3_moe_from_config, qwen3_moe_from_gguf
from appliance.engine.families.smollm3 import smollm3_from_config, smollm3_from_gguf
from appliance.engine.spec import DecoderSpec

# By a name in `architectures` of a config.json, or by `general.architecture` of a GGUF file.
_READERS: dict[str, Callable[[Metadata, WeightNames], DecoderSpec]] = {
    "LlamaForCausalLM": config_spec,
    "MistralForCausalLM": mistral_from_config,
    "Qwen2ForCausalLM": qwen_from_config,
    "Qwen3ForCausalLM": qwen_from_config,
    "Gemma2ForCausalLM": gemma2_from_config,
    "Gemma3ForCausalLM": gemma3_from_config,
    "Gemma3ForConditionalGeneration": gemma3_from_config,
    "Phi3ForCausalLM": phi3_from_config,
    "GraniteForCausalLM": granite_from_config,
    "Olmo2ForCausalLM": config_spec,
    "SmolLM3ForCausalLM": smollm3_from_config,
    "Qwen3MoeForCausalLM": qwen3_moe_from_config,
    "MixtralForCausalLM": mixtral_from_config,
    "GptOssForCausalLM": gpt_oss_from_config,
    "llama": llama_from_gguf,
    "qwen2": gguf_spec,
    "qwen3": gguf_spec,
    "gemma2": gemma2_from_gguf,
    "gemma3": gemma3_from_gguf,
    "phi3": phi3_from_gguf,
    "granite": granite_from_gguf,
    "olmo2": gguf_spec,
    "smollm3": smollm3_from_gguf,
    "qwen3moe": qwen3_moe_from_gguf,
    "gpt-oss": gpt_oss_from_gguf,
}


def supported_architectures() -> tuple[str, ...]:
    return tuple(sorted(_READERS))


def read_spec(architecture: str, metadata: Metadata, weight_names: WeightNames) -> DecoderSpec:
    """The spec of a model from its metadata (of a GGUF file, or a config.json) and its weights' canonical names.

    Raises:
        UnsupportedModelError: the architecture, or a feature the metadata asks for, is not supported.
        CheckpointError: a key is missing or mistyped.
    """
    if architecture not in _READERS:
        works = ", ".join(supported_architectures())
        raise UnsupportedModelError(f"architecture {architecture!r} is not supported; supported: {works}")
    return _READERS[architecture](metadata, weight_names)
