"""The choice of tiles by measurement: real products, by a clock whose times are made up."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from random_weights import random_gpu_weight

from appliance.kernels.linear import gpu_tuning
from appliance.kernels.linear.gpu import candidates, tile_for
from appliance.kernels.linear.gpu_matrix import GpuMatrix
from appliance.kernels.linear.gpu_tuning import Tuning
from appliance.quant.gpu_packed import pack_for_gpu

DEVICE = torch.device("cpu")


def matrix_of(name: str = "zp4", rows: int = 20, columns: int = 128) -> GpuMatrix:
    packed = pack_for_gpu(random_gpu_weight(name, rows, columns, 32))
    assert packed is not None
    return packed


class FakeClock:
    """Runs what it times, and says that the one of the given number takes least."""

    def __init__(self, fastest: int) -> None:
        self.fastest, self.calls = fastest, 0

    def __call__(self, run: Callable[[], object]) -> float:
        result = run()
        assert isinstance(result, torch.Tensor)
        assert result.isfinite().all()
        self.calls += 1
        return 0.5 if self.calls - 1 == self.fastest else 1.0


def never(_run: Callable[[], object]) -> float:
    raise AssertionError("measured again")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a matrix such as `matrix_of`, that the third tile for one row is the fastest."""
    folder = tmp_path_factory.mktemp("measured")
    Tuning(folder, DEVICE, torch.float16).tune([matrix_of()], [1], clock=FakeClock(2))
    (path,) = folder.iterdir()
    return path


@pytest.fixture
def kept(measured: Path, tmp_path: Path) -> Path:
    """A copy of it to damage, in a folder of its own."""
    return Path(shutil.copy(measured, tmp_path))


def chosen(folder: Path, matrix: GpuMatrix, dtype: torch.dtype = torch.float16) -> int:
    """Which candidate for one row: 0 is the usual one."""
    return candidates(matrix, 1).index(Tuning(folder, DEVICE, dtype).tile_for(matrix, 1))


def test_the_fastest_is_chosen_and_nobody_measures_it_again(tmp_path: Path) -> None:
    matrix, same, other = matrix_of(), matrix_of(), matrix_of("affine4")
    clock, steps = FakeClock(2), []
    tuning = Tuning(tmp_path / "new", DEVICE, torch.float16)
    assert tuning.tile_for(matrix, 1) == tile_for(matrix, 1)
    tuning.tune([matrix, same], [1, 5, 12], clock=clock, progress=lambda *step: steps.append(step))
    # One row is measured as eight are, twelve are as sixteen; both matrices are of one kind.
    assert clock.calls == len(candidates(matrix, 8)) + len(candidates(matrix, 16))
    assert steps == [(1, 2), (2, 2)]
    read = Tuning(tmp_path / "new", DEVICE, torch.float16)
    read.tune([matrix, same], [8, 16], clock=never)
    for each in (tuning, read):
        assert each.tile_for(same, 3) == candidates(matrix, 3)[2]
        assert each.tile_for(matrix, 9) == tile_for(matrix, 9)
        assert each.tile_for(matrix, 17) == tile_for(matrix, 17)
        assert each.tile_for(other, 3) == tile_for(other, 3)


def test_other_types_and_shapes_are_measured_of_their_own(kept: Path) -> None:
    assert chosen(kept.parent, matrix_of()) == 2
    assert chosen(kept.parent, matrix_of(), torch.bfloat16) == 0
    for different in (matrix_of(rows=21), matrix_of(columns=160), matrix_of("sym4")):
        assert chosen(kept.parent, different) == 0


def test_what_is_measured_later_is_kept_with_what_was_before(tmp_path: Path, measured: Path) -> None:
    matrix, other = matrix_of(), matrix_of("sym4")
    before = Tuning(tmp_path, DEVICE, torch.float16)
    shutil.copy(measured, tmp_path)
    before.tune([other], [1], clock=FakeClock(1))
    assert chosen(tmp_path, matrix) == 2
    assert chosen(tmp_path, other) == 1


def rewrite(path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    """Change what is said, with the checksum that belongs to it."""
    said = json.loads(path.read_bytes().partition(b"\n")[2])
    change(said)
    body = json.dumps(said).encode()
    path.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def test_damaged_files_are_measured_again(kept: Path) -> None:
    whole = kept.read_bytes()
    turned = whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:]
    for damaged in (b"", b"\n", whole[:70], whole[:-1], turned, whole + b" ", b"\xff" * 99):
        kept.write_bytes(damaged)
        assert chosen(kept.parent, matrix_of()) == 0
    Tuning(kept.parent, DEVICE, torch.float16).tune([matrix_of()], [1], clock=FakeClock(2))
    assert kept.read_bytes() == whole


@pytest.mark.parametrize(
    "tile", [[7, 64, 2, 4, False], [8, 64, 2], [8], "8", None, {}, [[1], 2, 3, 4, 5]], ids=str
)
def test_only_tiles_that_there_are(kept: Path, tile: object) -> None:
    rewrite(kept, lambda said: said["tiles"].update(dict.fromkeys(said["tiles"], tile)))
    assert chosen(kept.parent, matrix_of()) == 0


@pytest.mark.parametrize("what", ["device", "torch", "triton", "kernels"])
def test_those_of_another_device_or_version_are_not_taken(kept: Path, what: str) -> None:
    rewrite(kept, lambda said: said["made_by"].update({what: "another"}))
    assert chosen(kept.parent, matrix_of()) == 0


def test_each_device_has_a_file(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_by = gpu_tuning._made_by(DEVICE)
    monkeypatch.setattr(gpu_tuning, "_made_by", lambda _: {**made_by, "device": "another"})
    assert chosen(kept.parent, matrix_of()) == 0
    Tuning(kept.parent, DEVICE, torch.float16).tune([matrix_of()], [1], clock=FakeClock(1))
    assert chosen(kept.parent, matrix_of()) == 1
    monkeypatch.undo()
    assert chosen(kept.parent, matrix_of()) == 2


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    matrix = matrix_of()
    (tmp_path / "file").touch()
    tuning = Tuning(tmp_path / "file", DEVICE, torch.float16)
    tuning.tune([matrix], [1], clock=FakeClock(1))
    assert tuning.tile_for(matrix, 1) == candidates(matrix, 1)[1]
    assert "not kept" in tuning.note


def test_without_a_device_nothing_is_measured(tmp_path: Path) -> None:
    tuning = Tuning(tmp_path, DEVICE, torch.float16)
    tuning.tune([matrix_of()], [1])
    assert tuning.tile_for(matrix_of(), 1) == tile_for(matrix_of(), 1)
    assert not list(tmp_path.iterdir())
