"""Repacked weights on disk: found again, and never believed where anything is not as it was."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from weight_caches import (
    LAYOUT,
    NAMES,
    VERSION,
    build,
    cache_home,
    data_of,
    fill,
    is_filled,
    model,
    names,
    opened,
)

from appliance.engine import packed_files
from appliance.engine.packed_files import HEAD_BYTES
from appliance.kernels.checksum import checksum

__all__ = ["cache_home", "model"]


def test_what_was_packed_is_found_beside_a_file(model: Path, tmp_path: Path) -> None:
    assert build(model) == ""
    assert names(tmp_path) == ["m.gguf", "m.gguf.packed"]
    assert is_filled(model)


def test_in_a_folder_it_is_kept_inside(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (folder / name).write_text(name)
    build(folder)
    assert names(folder) == [".packed", "README.md", "config.json", "model.safetensors"]
    assert is_filled(folder)
    (folder / "README.md").write_text("other")
    assert is_filled(folder)
    (folder / "config.json").write_text("other")
    assert not is_filled(folder)


def test_of_a_linked_folder_it_is_kept_with_the_link(tmp_path: Path) -> None:
    folder, link = tmp_path / "theirs", tmp_path / "link"
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")
    link.symlink_to(folder)
    build(link)
    assert names(folder) == ["model.safetensors"]
    assert (tmp_path / "link.packed").exists()
    assert is_filled(link)


def test_what_was_packed_outlives_the_cache(model: Path) -> None:
    with opened(model) as cache:
        data = cache.allocate(100)
        data.fill_(5)
        cache.add("a", LAYOUT, data, None)
        cache.commit()
    assert data.tolist() == [5] * 100
    with opened(model) as cache:
        packed = cache.get("a")
    (model.parent / "m.gguf.packed").unlink()
    assert packed is not None
    assert packed.data.tolist() == [5] * 100


def truncated(packed: Path, by: int = 1) -> None:
    os.truncate(packed, packed.stat().st_size - by)


def longer(packed: Path) -> None:
    with packed.open("ab") as file:
        file.write(b"x")


def flipped(at: int) -> Callable[[Path], None]:
    def flip(packed: Path) -> None:
        found = bytearray(packed.read_bytes())
        found[at] ^= 0x10
        packed.write_bytes(found)

    return flip


def of_another_format(packed: Path) -> None:
    found = bytearray(packed.read_bytes())
    struct.pack_into("<I", found, 8, packed_files.FORMAT_VERSION + 1)
    packed.write_bytes(found)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": truncated,
    "truncated to its head": lambda packed: truncated(packed, packed.stat().st_size - HEAD_BYTES),
    "truncated to less": lambda packed: truncated(packed, packed.stat().st_size - 50),
    "empty": lambda packed: truncated(packed, packed.stat().st_size),
    "longer": longer,
    "of another format": of_another_format,
    "magic": flipped(0),
    "version": flipped(12),
    "content": flipped(20),
    "identity": flipped(60),
    "first byte of data": flipped(HEAD_BYTES),
    "middle of data": flipped(HEAD_BYTES + 3000),
    "table": flipped(-100),
    "last byte": flipped(-1),
    "not a file of this kind": lambda packed: packed.write_bytes(b"\0" * 10000) and None,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_is_packed_again(
    damage: Callable[[Path], None], model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    build(model)
    damage(model.with_name("m.gguf.packed"))
    assert not is_filled(model)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{model}.packed: it")
    assert said.endswith("; the weights are packed again")
    build(model)
    assert is_filled(model)
    assert names(model.parent) == ["m.gguf", "m.gguf.packed"]


def test_every_bit_of_the_data_counts(model: Path) -> None:
    build(model)
    packed = model.with_name("m.gguf.packed")
    sound = packed.read_bytes()
    # The last byte of the first matrix, wherever threads have put it.
    for index in range(len(NAMES)):
        at = sound.index(bytes(data_of(index).tolist())) + len(data_of(index)) - 1
        flipped(at)(packed)
        assert not is_filled(model)
        packed.write_bytes(sound)
    assert is_filled(model)


def test_another_version_of_the_packing_is_packed_again(model: Path) -> None:
    build(model)
    assert not is_filled(model, VERSION + 1)
    build(model, VERSION + 1)
    assert is_filled(model, VERSION + 1)
    assert not is_filled(model)


def test_a_touched_model_is_read_through_once_and_known_again(model: Path) -> None:
    build(model)
    packed = model.with_name("m.gguf.packed")
    before = packed.read_bytes()
    os.utime(model)
    time.sleep(0.02)
    assert is_filled(model)
    after = packed.read_bytes()
    changed = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert changed
    assert max(changed) < HEAD_BYTES
    assert is_filled(model)
    assert packed.read_bytes() == after


def test_a_model_replaced_by_one_of_the_same_size_and_time_is_another(model: Path) -> None:
    build(model)
    stat, content = model.stat(), bytearray(model.read_bytes())
    content[1000] ^= 1
    model.write_bytes(content)
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (model.stat().st_size, model.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert not is_filled(model)
    # And the old bytes back, as another file.
    build(model)
    content[1000] ^= 1
    (model.parent / "new").write_bytes(content)
    os.replace(model.parent / "new", model)
    assert not is_filled(model)


def test_what_has_just_changed_is_not_known_by_its_times(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_files, "SETTLED_S", 1000.0)
    build(model)
    head = model.with_name("m.gguf.packed").read_bytes()[:HEAD_BYTES]
    assert packed_files.identity([model])[0] not in head
    assert is_filled(model)
    monkeypatch.setattr(packed_files, "SETTLED_S", 0.0)
    assert is_filled(model)
    assert packed_files.identity([model])[0] in model.with_name("m.gguf.packed").read_bytes()[:HEAD_BYTES]


def test_a_model_that_changes_while_it_is_packed_is_not_kept(model: Path) -> None:
    with opened(model) as cache:
        fill(cache, 0)
        model.write_bytes(b"others" * 50)
        cache.commit()
        assert "changed" in cache.note
    assert names(model.parent) == ["m.gguf"]


def test_a_load_that_fails_leaves_nothing(model: Path) -> None:
    with opened(model) as cache:
        fill(cache, 0)
        assert len(names(model.parent)) == 2
    assert names(model.parent) == ["m.gguf"]


def test_a_name_that_is_lacking_is_packed_at_the_next_load(model: Path) -> None:
    build(model)
    with opened(model) as cache:
        assert cache.is_filled
        assert cache.get("layers.99") is None
        cache.add("layers.99", LAYOUT, cache.allocate(10), None)
        assert cache.get(NAMES[0]) is not None
        cache.commit()
    assert not is_filled(model)


def test_two_that_pack_at_once_do_not_disturb_each_other(model: Path) -> None:
    with opened(model) as first, opened(model) as second:
        for index in range(len(NAMES)):
            fill(first, index)
            fill(second, index)
        first.commit()
        second.commit()
        assert (first.note, second.note) == ("", "")
    assert names(model.parent) == ["m.gguf", "m.gguf.packed"]
    assert is_filled(model)


def test_remove_takes_everything_that_is_kept_of_a_model(model: Path, cache_home: Path) -> None:
    build(model)
    size = model.with_name("m.gguf.packed").stat().st_size
    elsewhere = packed_files.places(model)[1]
    assert elsewhere.parent == cache_home
    elsewhere.parent.mkdir(parents=True)
    elsewhere.write_bytes(b"12345")
    (tmp := model.with_name("m.gguf.packed.1-2.tmp")).write_bytes(b"678")
    assert packed_files.remove(model) == size + 8
    assert not tmp.exists()
    assert names(model.parent) == ["cache", "m.gguf"]
    assert names(cache_home) == []


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4096, 10_001])
def test_a_checksum_changes_with_every_byte_and_the_length(size: int) -> None:
    data = torch.arange(size + 1).mul(7).to(torch.uint8)
    sums = {checksum(data.data_ptr(), size), checksum(data.data_ptr(), size + 1)}
    places = range(0, size, max(1, size // 50))
    for at in places:
        for bit in (1, 128):
            data[at] ^= bit
            sums.add(checksum(data.data_ptr(), size))
            data[at] ^= bit
    assert len(sums) == 2 + 2 * len(places)
