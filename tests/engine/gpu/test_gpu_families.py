"""Each family in 4 bits through the GPU's executor, interpreted: the reference's logits, however they are computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from packed_families import GOLDEN, pack_family, write
from safetensors.torch import load_file
from small_models import DENSE_FAMILIES, Part, SmallModel, load_executor

from appliance.engine.errors import UnsupportedModelError
from appliance.kernels.linear.gpu_grouped import ExpertMatrices

# Of the largest logit; activations, keys and values are rounded to float16 some dozen times on the way.
TOLERANCE = 2**-7
FAMILIES = (*DENSE_FAMILIES, "mixtral", "qwen3_moe", "gpt_oss")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_in_chunks_decoded_preempted_and_in_company(family: str, tmp_path: Path) -> None:
    packed, _ = pack_family(family, tmp_path)
    ids, other = (
        tuple(row.tolist())
        for row in load_file(GOLDEN / f"arch_{family}" / "expected.safetensors")["input_ids"][:2]
    )
    model = SmallModel(packed, backend="gpu", kv_dtype="float16")
    (whole,) = model.run([Part(0, ids)])
    expected = SmallModel(packed).run([Part(0, ids)])[0]
    assert (whole - expected).abs().max() < TOLERANCE * expected.abs().max()
    begun, _ = model.run([Part(1, ids[:9]), Part(2, other[:11])])
    # Its blocks were taken; what it had is computed anew in others, at once with what came next.
    again, _ = model.run([Part(3, ids[:18]), Part(2, other[11:13], 11)])
    decoded, _ = model.run([Part(3, ids[18:19], 18), Part(2, other[13:14], 13)])
    found = torch.cat([again, decoded])
    assert torch.equal(begun, whole[:9])
    assert torch.equal(found, whole[:19])


def test_experts_that_are_not_alike_are_dense_and_others_stay_packed(tmp_path: Path) -> None:
    executor = load_executor(pack_family("qwen3_moe", tmp_path)[0], "gpu", kv_dtype="float16")
    kinds = [isinstance(each.matrices, ExpertMatrices) for each in executor._weights.experts.values()]
    assert kinds == [True, True, False, False]
    assert executor.weight_bytes > 0


def test_act_order_of_a_down_projection_is_that_of_gates_and_ups() -> None:
    folder = GOLDEN / "gptqmodel_w4_g64_sym_desc"
    executor = load_executor(folder, "gpu", kv_dtype="float16")
    inputs = {
        name: linear.parts[0].inputs
        for (name, *_), linear in executor._weights.linears.items()
        if "." in name
    }
    assert inputs["layers.0.down"] is None
    assert inputs["layers.0.o"] is not None
    model = SmallModel(folder, backend="gpu", kv_dtype="float16")
    (got,), (expected,) = (each.run([Part(0, (5, 9, 2, 77))]) for each in (model, SmallModel(folder)))
    assert (got - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_dense_weights_that_float16_cannot_hold_are_named(tmp_path: Path) -> None:
    source = GOLDEN / "arch_llama"
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 7e4
    folder = write(tmp_path / "large", json.loads((source / "config.json").read_text()), tensors)
    with pytest.raises(UnsupportedModelError, match="set dtype to bfloat16"):
        load_executor(folder, "gpu", kv_dtype="float16")
