"""Settings of vLLM that there are none of here: other spellings, settings without a meaning, and refusals.

People come with commands from guides. What is merely called otherwise is taken, what changes nothing is dropped,
both with a note; what asks for something that is not there is refused with what to do instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Old or foreign spellings of settings that exist.
RENAMED = {
    "max_seq_len": "max_model_len",
    "max_context_len": "max_model_len",
    "context_length": "max_model_len",
    "max_batch_size": "max_num_seqs",
    "max_batched_tokens": "max_num_batched_tokens",
    "timeout": "request_timeout",
    "cache_dtype": "kv_cache_dtype",
    "kv_cache_memory": "kv_cache_memory_bytes",
    "ssl_cert_file": "ssl_certfile",
    "ssl_key_file": "ssl_keyfile",
    "cors_origins": "allowed_origins",
}


@dataclass(frozen=True, slots=True)
class Foreign:
    """A setting that only vLLM has.

    Attributes:
        advice: why it is not needed, or what to do instead.
        harmless: the values, as text in lower case, with which it changes nothing; None: any.
        is_switch: as a flag it takes no value.
    """

    advice: str
    harmless: tuple[str, ...] | None = ()
    is_switch: bool = False


_SPECULATION = "drafts are not supported; leave it out, answers are the same without"
_ONE_MODEL = (
    "the daemon serves the weights as they are, without LoRA adapters; merge the adapter into the model "
    "and serve that"
)
_ONE_DEVICE = (
    "a model is computed by one device; leave it at 1, and take a smaller or more strongly quantised "
)
_ONE_DEVICE += "model if this one doesn't fit"

FOREIGN = {
    "max_context_len_to_capture": Foreign("nothing is captured here, so it has no effect", None),
    "max_seq_len_to_capture": Foreign("nothing is captured here, so it has no effect", None),
    "metrics_port": Foreign("metrics are at /metrics on the daemon's own port", None),
    "disable_log_requests": Foreign("requests are never logged", None, is_switch=True),
    "disable_log_stats": Foreign("figures are at /metrics, never in the log", None, is_switch=True),
    "enable_chunked_prefill": Foreign(
        "prompts are always computed in chunks of max_num_batched_tokens", ("true", "1"), is_switch=True
    ),
    "pipeline_parallel_size": Foreign(_ONE_DEVICE, ("1",)),
    "data_parallel_size": Foreign(
        "one daemon runs one engine; start several daemons on ports of their own, behind a proxy", ("1",)
    ),
    "enable_lora": Foreign(_ONE_MODEL, ("false", "0"), is_switch=True),
    "lora_modules": Foreign(_ONE_MODEL),
    "trust_remote_code": Foreign(
        "code that comes with a model is never run; leave it out, the supported families need none",
        ("false", "0"),
        is_switch=True,
    ),
    "speculative_config": Foreign(_SPECULATION),
    "speculative_model": Foreign(_SPECULATION),
    "num_speculative_tokens": Foreign(_SPECULATION, ("0",)),
    "cpu_offload_gb": Foreign(
        "all weights are in the memory of the device that computes; leave it out", ("0", "0.0")
    ),
    "num_gpu_blocks_override": Foreign("set kv_cache_memory_bytes instead, which is in bytes"),
    "preemption_mode": Foreign(
        "requests that must wait are computed again; leave it at recompute", ("recompute",)
    ),
    "load_format": Foreign(
        "files are read by their content; leave it at auto", ("auto", "gguf", "safetensors")
    ),
    "tokenizer": Foreign("the tokeniser is the one in the model's file; leave it out"),
    "revision": Foreign("a model is a file or a name of the catalogue; write the tag as name:tag"),
    "chat_template": Foreign("the chat template is the one in the model's file; leave it out"),
}


def refusal(name: str, value: Any) -> str:
    """Why a foreign setting cannot be had with this value, "" if it can."""
    foreign = FOREIGN[name]
    if foreign.harmless is None or str(value).lower() in foreign.harmless:
        return ""
    return foreign.advice
