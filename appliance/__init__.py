"""Serve quantised language models from one box.

The offline API is handed on lazily, so that `import appliance` costs nothing and the daemon stays free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from appliance.engine.types import SamplingParams as SamplingParams
    from appliance.llm import LLM as LLM
    from appliance.llm import CompletionOutput as CompletionOutput
    from appliance.llm import RequestOutput as RequestOutput

__version__ = "0.1.0"

_HOMES = {
    "LLM": "appliance.llm",
    "RequestOutput": "appliance.llm",
    "CompletionOutput": "appliance.llm",
    "SamplingParams": "appliance.engine.types",
}

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'appliance' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
