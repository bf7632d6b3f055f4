"""The roofline by data sheets: its figures against published ones, and the documentation against what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from appliance.kernels.linear.gpu_matrix import pack
from appliance.kernels.linear.gpu_split import num_splits
from benchmarks.roofline.__main__ import MODELS, report
from benchmarks.roofline.cost import DENSE, DEVICES, GROUPS_OF_128, Cost, Load, Model, Setting, splits, step

LLAMA, QWEN, MIXTURE = MODELS


def test_the_documentation_has_what_it_prints(repo_root: Path) -> None:
    page = (repo_root / "docs" / "performance.md").read_text(encoding="utf-8")
    assert report() in page, "docs/performance.md is out of date: python -m benchmarks.roofline"


# Published sizes, without the embedding and the norms: a token of each.
@pytest.mark.parametrize(("model", "billions"), [(LLAMA, 8.030 - 0.525), (QWEN, 8.191 - 0.622)])
def test_every_weight_is_read_once(model: Model, billions: float) -> None:
    dense = step(model, Setting(layers=DENSE), Load(1, 0))
    read = sum(cost.memory for cost in dense if cost.flops and cost.name != "attention")
    assert read / 2e9 == pytest.approx(billions, abs=0.002)


def test_a_token_of_a_mixture_reads_its_own_experts_and_many_read_all() -> None:
    few, many = (step(MIXTURE, Setting(layers=DENSE), Load(1, 0, rows)) for rows in (1, 4096))
    # 3.3 billion are active, 30.5 there in all, 0.3 each in the embedding and the head.
    for costs, billions in ((few, 3.35 - 0.31), (many, 30.53 - 0.31)):
        read = sum(cost.memory for cost in costs if cost.flops and cost.name != "attention")
        assert read / 2e9 == pytest.approx(billions, abs=0.01)


def test_keys_and_values() -> None:
    def read(kv_bytes: int, load: Load) -> float:
        costs = step(LLAMA, Setting(kv_bytes=kv_bytes), load)
        return sum(cost.memory for cost in costs if cost.name == "attention")

    # 128 KiB a token.
    assert read(2, Load(3, 1000)) == 3 * 1000 * 128 * 1024
    assert read(1, Load(3, 1000)) == 3 * 1000 * 64 * 1024 * (128 + 4) / 128
    assert Load(2, 5, 5).seen == 2 * (1 + 2 + 3 + 4 + 5)
    assert Load(4, 7).seen == 28


def test_the_floor_is_the_longest_of_memory_products_and_instructions() -> None:
    device = DEVICES[0]
    assert Cost("", memory=936e9).seconds(device) == 1
    assert Cost("", memory=936e9, flops=142e12).seconds(device) == 2
    # 2.75 instructions of a lane for a weight, 17.79 · 10¹² lanes a second.
    assert Cost("", codes={GROUPS_OF_128.compiled: 17.791e12}).seconds(device) == pytest.approx(2.75, 1e-3)
    assert Cost("", passing=device.cache).seconds(device) == 0
    assert Cost("", passing=2 * device.cache).seconds(device) == 2 * device.cache / 936e9


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (4096, 14336), (512, 2048), (128, 64)])
def test_splits_are_those_of_the_kernel(shape: tuple[int, int], bits: int) -> None:
    rows, columns = shape
    codes = torch.zeros(rows, columns * bits // 8, dtype=torch.uint8)
    matrix = pack(codes, torch.ones(rows, -(-columns // 64)), bits=bits, columns=columns, group=64)
    assert splits(rows, columns, bits) == num_splits(*matrix.codes.shape[:2])
