"""Linear layers that are not quantised. No torch."""

from __future__ import annotations

from appliance.quant.hf.module import DENSE_DTYPES, Advice, Layout, Module
from appliance.quant.hf.quant_config import QuantConfig

FORMAT = "dense"


def check(_config: QuantConfig) -> None:
    """Nothing announced, nothing to refuse."""


def advise(_config: QuantConfig, _module: str) -> Advice:
    return Advice()


def layout(module: Module, _config: QuantConfig) -> Layout | None:
    info = module.tensors.get("weight")
    if info is None or (info.dtype not in DENSE_DTYPES):
        return None
    module.expect("weight", DENSE_DTYPES, module.shape)
    return Layout(FORMAT, None, ("weight",))
