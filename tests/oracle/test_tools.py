"""Checkpoints that the tools write here and now: what they compute is what is read.

Each tool has an interpreter of its own (docs/quantising.md makes them), named by a variable such as ORACLE_AUTOAWQ.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from appliance.quant.hf.checkpoint import HFCheckpoint
from appliance.quant.hf.names import module_name

HERE = Path(__file__).parent
LINEARS = [
    f"layers.{layer}.{name}" for layer in (0, 1) for name in ("q", "k", "v", "o", "gate", "up", "down")
]


def gptq(bits: int, group_size: int, **changes: Any) -> dict[str, Any]:
    return {"bits": bits, "group_size": group_size, "desc_act": False, "sym": True} | changes


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("autoawq", {"version": "gemm", "q_group_size": 128}, "awq-gemm"),
    ("autoawq", {"version": "gemm", "q_group_size": 32}, "awq-gemm"),
    ("autoawq", {"version": "gemv", "q_group_size": 64}, "awq-gemv"),
    ("autoawq", {"version": "gemv_fast", "q_group_size": 128}, "awq-gemv-fast"),
    ("autoawq", {"version": "marlin", "q_group_size": 128, "zero_point": False}, "awq-marlin"),
    ("autogptq", gptq(4, 128), "gptq"),
    ("autogptq", gptq(4, 32, desc_act=True), "gptq"),
    ("autogptq", gptq(4, -1), "gptq"),
    ("autogptq", gptq(2, 32), "gptq"),
    ("autogptq", gptq(3, 64, sym=False), "gptq"),
    ("autogptq", gptq(8, 128), "gptq"),
    ("gptqmodel", gptq(4, 128), "gptq-gptqmodel"),
    ("gptqmodel", gptq(4, 64, desc_act=True, format="gptq_v2"), "gptq-v2"),
    ("gptqmodel", gptq(4, 128, method="awq", format="gemm"), "awq-gemm"),
    ("autoround", {"scheme": "W4A16", "format": "auto_round"}, "gptq"),
    ("llmcompressor", {"scheme": "W4A16"}, "compressed-tensors-pack"),
    ("llmcompressor", {"scheme": "W4A16_ASYM", "actorder": "weight"}, "compressed-tensors-pack"),
    ("llmcompressor", {"scheme": "W8A16"}, "compressed-tensors-pack"),
]


def case_id(value: Any) -> str | None:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else None


def quantized(tool: str, options: dict[str, Any], out: Path) -> Path:
    """The folder that the tool's script filled."""
    variable = f"ORACLE_{tool.upper()}"
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no interpreter that has {tool}; docs/quantising.md makes one")
    script = HERE / f"quantize_{tool}.py"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, str(script), str(out), json.dumps(options)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.oracle
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("tool", "options", "layout"), CASES, ids=case_id)
def test_what_is_read_is_what_the_tool_computes(
    tool: str, options: dict[str, Any], layout: str, tmp_path: Path
) -> None:
    out = quantized(tool, options, tmp_path / tool)
    expected = load_file(out / "weights.safetensors")
    with HFCheckpoint(out / "model") as checkpoint:
        assert checkpoint.tensor_types()[0] == layout
        assert checkpoint.notes == ()
        for name in LINEARS:
            computed = expected.pop(module_name(name, "model.")).float()
            assert torch.equal(checkpoint.read(name).dequantize(), computed), name
    assert not expected
