"""Small caches of repacked weights, and whether they are what they should be."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from appliance.engine import packed_files
from appliance.engine.packed_files import model_files
from appliance.engine.weight_cache import WeightCache

LAYOUT = {
    "rows": 48,
    "group": 32,
    "codes": "U4",
    "constant": 8.0,
    "table": [0, 1],
    "has_table": True,
    "super": None,
}
NAMES = tuple(f"layers.{index}" for index in range(5))
VERSION = 7


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    # Files of tests are new; what is new is believed at once here.
    monkeypatch.setattr(packed_files, "SETTLED_S", 0.0)
    return home / "appliance" / "packed"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(range(256)) * 40)
    return path


def opened(model: Path, version: int = VERSION) -> WeightCache:
    return WeightCache.open(model, model_files(model), version, threads=2)


def data_of(index: int) -> torch.Tensor:
    """What is packed; sizes that are no multiples of anything."""
    return torch.arange(1000 + 37 * index).mul(index + 3).to(torch.uint8)


def fill(cache: WeightCache, index: int) -> None:
    data = cache.allocate(len(data_of(index)))
    assert data.data_ptr() % 64 == 0
    assert not data.any()
    data.copy_(data_of(index))
    inputs = torch.arange(index * 11, dtype=torch.int32) - 1 if index % 2 else None
    cache.add(NAMES[index], LAYOUT, data, inputs)


def build(model: Path, version: int = VERSION) -> str:
    """Pack everything, several at once; the note."""
    with opened(model, version) as cache:
        assert not cache.is_filled
        assert cache.get(NAMES[0]) is None
        threads = [threading.Thread(target=fill, args=(cache, index)) for index in range(len(NAMES))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cache.commit()
        return cache.note


def is_filled(model: Path, version: int = VERSION) -> bool:
    """Whether everything is there; asserts that it is then what it should be."""
    with opened(model, version) as cache:
        for index, name in enumerate(NAMES if cache.is_filled else ()):
            packed = cache.get(name)
            assert packed is not None
            assert packed.layout == LAYOUT
            assert torch.equal(packed.data, data_of(index))
            assert packed.data.data_ptr() % 64 == 0
            assert (packed.inputs is None) == (index % 2 == 0)
            if packed.inputs is not None:
                assert packed.inputs.tolist() == [n - 1 for n in range(index * 11)]
        return cache.is_filled


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
