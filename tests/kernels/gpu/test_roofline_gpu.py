"""The roofline by data sheets: its figures against published ones, and the documentation against what it prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

from appliance.engine.decoder import build_program
from appliance.engine.executors.gpu_batch import build_gpu_batch
from appliance.engine.executors.gpu_executor import GpuExecutor
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import PlanRow
from appliance.kernels.kv_layout import KVGroup, KVLayout
from appliance.kernels.linear.gpu_dense import splits_for
from appliance.kernels.linear.gpu_matrix import pack
from appliance.kernels.linear.gpu_split import num_splits
from benchmarks.device_check.llama import config_of, spec_of
from benchmarks.device_check.model import RandomWeights
from benchmarks.device_check.sizes import TINY
from benchmarks.roofline.__main__ import MODELS, report
from benchmarks.roofline.cost import (
    DENSE,
    DEVICES,
    GROUPS_OF_128,
    INT8,
    Cost,
    Load,
    Model,
    Setting,
    splits,
    step,
)

LLAMA, QWEN, MIXTURE = MODELS


def test_the_documentation_has_what_it_prints(repo_root: Path) -> None:
    page = (repo_root / "docs" / "performance.md").read_text(encoding="utf-8")
    assert report() in page, "docs/performance.md is out of date: python -m benchmarks.roofline --update"


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
    # 2.66 instructions of a lane for a weight, 17.79 · 10¹² lanes a second.
    assert Cost("", codes={GROUPS_OF_128.compiled: 17.791e12}).seconds(device) == pytest.approx(2.66, 1e-3)
    assert Cost("", passing=device.cache).seconds(device) == 0
    assert Cost("", passing=2 * device.cache).seconds(device) == 2 * device.cache / 936e9


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (4096, 14336), (512, 2048), (128, 64)])
def test_splits_are_those_of_the_kernels(shape: tuple[int, int]) -> None:
    rows, columns = shape
    for scheme, bits in ((GROUPS_OF_128, 4), (INT8, 8)):
        codes = torch.zeros(rows, columns * bits // 8, dtype=torch.uint8)
        matrix = pack(codes, torch.ones(rows, -(-columns // 64)), bits=bits, columns=columns, group=64)
        assert splits(rows, columns, scheme.block) == num_splits(*matrix.codes.shape[:2])
    assert splits(rows, columns, DENSE.block) == splits_for(rows, columns)


class Launches(TorchDispatchMode):
    """Counts operations of torch that compute, and kernels of Triton."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count = 0
        run = interpreter.GridExecutor.__call__

        def counted(grid: object, *args: object, **options: object) -> object:
            self.count += 1
            with _disable_current_modes():
                return run(grid, *args, **options)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        moves_nothing = ("empty", "new_empty", "view", "alias", "select", "slice", "to")
        self.count += function.overloadpacket.__name__ not in moves_nothing
        return function(*args, **(kwargs or {}))


def test_launches_are_those_of_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    # So many columns that one product is split.
    sizes = replace(TINY, intermediate=2048)
    spec, cpu, half = spec_of(sizes), torch.device("cpu"), torch.float16
    program, group = build_program(spec), KVGroup((0,), spec.num_kv_heads, spec.head_dim, half)
    executor = GpuExecutor(
        program,
        spec,
        RandomWeights(spec, half, cpu),
        KVLayout((group,), 16),
        device=cpu,
        dtype=half,
        progress=lambda _done, _all: None,
    )
    executor.attach_pools([4], 64)
    row = PlanRow("r", (1,), 20, ((2, 1),), True, SamplingParams(), (0,))
    batch, wanted = build_gpu_batch([row], 16, cpu), torch.tensor([0])
    with Launches(monkeypatch) as launches:
        executor.head(executor.launch(batch)[wanted])
    costs = step(Model("", config_of(sizes)), Setting(), Load(1, 21))
    assert max(cost.launches for cost in costs if cost.name == "down") == 2
    # The rows whose logits are wanted are taken out of all.
    assert launches.count == sum(cost.launches for cost in costs) + 1
