"""Rows of quantised embeddings in Triton, interpreted, against the canonical form's own values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from appliance.kernels.embedding.gpu import QuantisedRows, embed
from appliance.quant.packing import pack_codes
from appliance.quant.scheme import Codebook, Mode, QuantScheme
from appliance.quant.tensor import QuantTensor

ROWS = 9

SCHEMES = {
    "sym": QuantScheme(4, 32, Mode.SYM),
    "sym of two bits": QuantScheme(2, 16, Mode.SYM),
    "sym of eight bits": QuantScheme(8, 128, Mode.SYM),
    "zero points": QuantScheme(4, 64, Mode.ZP),
    "zero points of three bits": QuantScheme(3, 32, Mode.ZP),
    "affine": QuantScheme(4, 32, Mode.AFFINE),
    "affine of five bits": QuantScheme(5, 32, Mode.AFFINE),
    "super-blocks with biases": QuantScheme(4, 32, Mode.KQUANT, super_size=256),
    "super-blocks without": QuantScheme(6, 16, Mode.KQUANT, super_size=256),
    "code book": QuantScheme(4, 32, Mode.CODEBOOK, codebook=Codebook.IQ4_NL),
    "code book in super-blocks": QuantScheme(4, 32, Mode.CODEBOOK, codebook=Codebook.IQ4_NL, super_size=256),
    "a code book's large groups": QuantScheme(4, 1000, Mode.CODEBOOK, codebook=Codebook.E2M1),
}


def quantised(scheme: QuantScheme, columns: int, dtype: torch.dtype) -> QuantTensor:
    def integers(low: int, high: int, size: int, kind: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, (ROWS, -(-columns // size))).to(kind)

    per_scale, has_subs = scheme.super_size or scheme.group_size, scheme.super_size > 0
    with_biases = scheme.mode is Mode.AFFINE or (scheme.mode is Mode.KQUANT and scheme.bits == 4)
    scales = torch.rand(2, ROWS, -(-columns // per_scale)).to(dtype)
    parts: dict[str, Any] = {}
    if scheme.mode is Mode.ZP:
        parts["zeros"] = integers(0, 1 << scheme.bits, scheme.group_size, torch.uint8)
    if has_subs:
        parts["sub_scales"] = integers(-32, 32, scheme.group_size, torch.int8)
    if with_biases:
        parts["biases"] = -scales[1]
    if with_biases and has_subs:
        parts["sub_biases"] = integers(0, 64, scheme.group_size, torch.int8)
    codes = pack_codes(integers(0, 1 << scheme.bits, 1, torch.uint8), scheme.bits)
    return QuantTensor(codes, scales[0], (ROWS, columns), scheme, **parts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [64, 520])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_rows_are_bit_for_bit_those_of_the_canonical_form(
    scheme: QuantScheme, columns: int, dtype: torch.dtype
) -> None:
    made = quantised(scheme, columns, dtype)
    table = QuantisedRows(
        made.codes,
        scheme.bits,
        scheme.group_size,
        made.scales,
        made.zeros,
        made.biases,
        made.sub_scales,
        made.sub_biases,
        scheme.super_size,
        torch.tensor(scheme.codebook.values) if scheme.codebook else None,
    )
    tokens = torch.tensor([8, 0, 3, 3])
    expected = made.select_rows(tokens).dequantize()
    for factor in (1.0, 33.5):
        out = torch.full((5, columns), float("nan"))
        embed(out[:4], tokens, table, factor)
        assert torch.equal(out[:4], expected * factor)
        assert out[4].isnan().all()
    half = torch.full((4, columns), float("nan"), dtype=torch.float16)
    embed(half, tokens.int(), table, 1.0)
    assert torch.equal(half, expected.half())
