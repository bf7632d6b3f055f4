"""How gpt-oss stores the weights of its experts, from headers. No torch.

`blocks` uint8 [N, K / 32, 16] holds codes of 4 bits (OCP microscaling formats, FP4 E2M1), the low nibble first,
`scales` uint8 [N, K / 32] exponents.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from appliance.quant import fields
from appliance.quant.errors import CheckpointError, located
from appliance.quant.hf.module import Advice, Layout, Module
from appliance.quant.hf.quant_config import QuantConfig
from appliance.quant.scheme import Codebook, Mode, QuantScheme

FORMAT = "mxfp4"
_GROUP = 32
# As transformers computes it.
_SCHEME = QuantScheme(4, _GROUP, Mode.CODEBOOK, "bfloat16", Codebook.E2M1)


def check(config: QuantConfig) -> None:
    """Nothing to refuse but a mistyped list.

    Raises:
        CheckpointError: it is mistyped.
    """
    with located(config.source):
        _not_converted(config)


def advise(config: QuantConfig, module: str) -> Advice:
    """Only experts are quantised; of the rest, some are named."""
    named = _not_converted(config)
    if any(fnmatchcase(module, name) or fnmatchcase(module, name + ".*") for name in named):
        return Advice(quantized=False)
    return Advice()


def layout(module: Module, _config: QuantConfig) -> Layout | None:
    if "blocks" not in module.tensors:
        return None
    rows, columns = module.shape
    if columns % _GROUP:
        raise CheckpointError(
            f"{module.file}: {module.name} has {columns} inputs, expected a multiple of {_GROUP}"
        )
    module.expect("blocks", ("U8",), (rows, columns // _GROUP, _GROUP // 2))
    module.expect("scales", ("U8",), (rows, columns // _GROUP))
    return Layout(FORMAT, _SCHEME, ("blocks", "scales"))


def _not_converted(config: QuantConfig) -> list[str]:
    key = "modules_to_not_convert"
    return [] if config.raw.get(key) is None else fields.strings(config.raw, key)
