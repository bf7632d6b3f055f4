"""Serve quantised language models from one box.

The offline API is handed on lazily, so that `import appliance` costs nothing and the daemon stays free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from appliance.async_llm import AsyncLLM as AsyncLLM
    from appliance.beam_search import BeamSearchParams as BeamSearchParams
    from appliance.engine.sampling_params import SamplingParams as SamplingParams
    from appliance.llm import LLM as LLM
    from appliance.outputs import CompletionOutput as CompletionOutput
    from appliance.outputs import RequestOutput as RequestOutput

__version__ = "0.1.0"

_HOMES = {
    "BeamSearchParams": "appliance.beam_search",
    "AsyncLLM": "appliance.async_llm",
    "LLM": "appliance.llm",
    "RequestOutput": "appliance.outputs",
    "CompletionOutput": "appliance.outputs",
    "SamplingParams": "appliance.engine.sampling_params",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'appliance' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
