"""Each family in 4 bits: as the dense model that holds what the codes stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from packed_families import GOLDEN, pack_family
from safetensors.torch import load_file
from small_models import DENSE_FAMILIES, Part, SmallModel

from appliance.quant.report import report


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_packed_layers_give_the_logits_of_dense_ones(family: str, tmp_path: Path) -> None:
    packed, dense = pack_family(family, tmp_path)
    kinds = {layer.format for layer in report(packed).layers if not layer.is_dense}
    assert kinds == {"compressed-tensors-pack"}
    ids = tuple(load_file(GOLDEN / f"arch_{family}" / "expected.safetensors")["input_ids"][0].tolist())
    got, expected = (SmallModel(folder).run([Part(0, ids)])[0] for folder in (packed, dense))
    assert torch.equal(got, expected)
    assert not torch.equal(got, SmallModel(GOLDEN / f"arch_{family}").run([Part(0, ids)])[0])
