from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.engine.packed_files import places
from appliance.model_files import ModelFilesError, looks_like_path, size_of
from appliance.names import ModelName, ModelNameError
from appliance.store import Store, StoreError

Damage = Callable[[Path], object]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


def put(store: Store, name: str, content: bytes = b"weights", link: Path | None = None) -> Path:
    """Install a model by way of the public `commit`; returns its folder."""
    full = ModelName.parse(name)
    staging = store.partial_dir(full) / "staging"
    staging.mkdir(parents=True)
    if link is None:
        (staging / "model.gguf").write_bytes(content)
    else:
        (staging / "model.gguf").symlink_to(link)
    manifest = {
        "name": name,
        "file": "model.gguf",
        "size": len(content),
        "source": "a test",
        "architecture": "LlamaForCausalLM",
        "format": "GGUF F16",
        "created": "2025-01-01T00:00:00+00:00",
        "linked": link is not None,
    }
    (staging / "manifest.json").write_text(json.dumps(manifest))
    assert store.commit(full, staging).name == name
    return store.folder(full)


def test_an_installed_model_is_listed_and_found(store: Store) -> None:
    put(store, "b:1")
    put(store, "a:latest")
    listing = store.list()
    assert [model.name for model in listing.models] == ["a:latest", "b:1"]
    assert listing.damaged == ()
    assert store.get("B").path == store.models_dir / "b" / "1" / "model.gguf"
    assert store.get("a").manifest.format == "GGUF F16"


def test_an_absent_folder_is_an_empty_store(store: Store) -> None:
    assert store.list().models == ()
    with pytest.raises(StoreError, match=f"nothing is in {store.models_dir}"):
        store.get("a")


def test_a_model_that_is_not_installed_is_answered_with_near_ones(store: Store) -> None:
    put(store, "smollm2:135m")
    with pytest.raises(StoreError, match=r"'smolm2'.*did you mean smollm2:135m\?.*installed: smollm2:135m"):
        store.get("smolm2")


def test_a_name_with_several_tags_needs_one(store: Store) -> None:
    put(store, "a:1")
    put(store, "a:2")
    with pytest.raises(StoreError, match="may mean a:1, a:2"):
        store.get("a")
    put(store, "a:latest", b"newest")
    assert store.get("a").name == "a:latest"


@pytest.mark.parametrize("name", ["../../etc", "a:../../b", "..", ".partial"])
def test_no_name_leaves_the_store(store: Store, name: str) -> None:
    for action in (store.get, store.remove):
        with pytest.raises(ModelNameError):
            action(name)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda folder: (folder / "manifest.json").write_text("{"), "Input data was truncated"),
        (
            lambda folder: (folder / "manifest.json").write_text('{"name": "bad:1"}'),
            "missing required field `file`",
        ),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff"), "is damaged"),
        (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json"),
        (lambda folder: (folder / "model.gguf").unlink(), "is missing"),
        (lambda folder: (folder / "model.gguf").write_bytes(b"less"), "has 4 bytes, expected 7"),
        (lambda folder: folder.rename(folder.with_name("2")), "is of 'bad:1'"),
        (
            lambda folder: (folder / "manifest.json").write_text(
                (folder / "manifest.json").read_text().replace("model.gguf", "../../good/1/model.gguf")
            ),
            "and file '../../good/1/model.gguf'",
        ),
    ],
)
def test_a_damaged_model_is_one_clear_error_and_hides_no_other(
    store: Store, damage: Damage, complaint: str
) -> None:
    put(store, "good:1")
    damage(put(store, "bad:1"))
    listing = store.list()
    assert [model.name for model in listing.models] == ["good:1"]
    (sentence,) = listing.damaged
    assert complaint in sentence
    assert "`appliance rm bad:" in sentence
    with pytest.raises(StoreError, match="is damaged"):
        store.get("bad")
    store.remove("bad")
    assert store.list().damaged == ()


def test_commit_replaces_what_was_there(store: Store) -> None:
    put(store, "a:1", b"old")
    put(store, "a:1", b"newer")
    assert store.get("a").path.read_bytes() == b"newer"


def test_remove_takes_the_model_and_its_partial_and_nothing_else(store: Store) -> None:
    folder = put(store, "a:1", b"x" * 1000)
    put(store, "a:2")
    partial = store.partial_dir(ModelName("a", "1"))
    partial.mkdir(exist_ok=True)
    (partial / "source.whl").write_bytes(b"y" * 500)
    manifest_bytes = (folder / "manifest.json").stat().st_size
    removed = store.remove("a:1")
    assert (removed.name, removed.freed_bytes) == ("a:1", 1500 + manifest_bytes)
    assert not folder.exists()
    assert not partial.exists()
    assert [model.name for model in store.list().models] == ["a:2"]
    store.remove("a")
    assert not folder.parent.exists()


def test_remove_takes_the_repacked_weights_wherever_they_are(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    put(store, "a:1")
    beside, elsewhere = places(store.get("a:1").path)
    size = store.get("a:1").manifest.size
    before = sum(file.stat().st_size for file in beside.parent.iterdir())
    elsewhere.parent.mkdir(parents=True)
    for place, content in ((beside, b"12345"), (elsewhere, b"678")):
        place.write_bytes(content)
    # They are no part of the model.
    assert store.list().damaged == ()
    assert size_of(store.get("a:1").path) == size
    assert store.remove("a:1").freed_bytes == before + 8
    assert not elsewhere.exists()
    assert not beside.exists()


def test_remove_takes_the_rest_of_a_pull_that_never_finished(store: Store) -> None:
    partial = store.partial_dir(ModelName("a", "1"))
    partial.mkdir(parents=True)
    (partial / "source.whl").write_bytes(b"y" * 500)
    assert store.remove("a").freed_bytes == 500
    assert not partial.exists()
    with pytest.raises(StoreError, match="no model called 'a'"):
        store.remove("a")


def test_remove_leaves_a_linked_file_alone(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"weights")
    folder = put(store, "mine:latest", link=file)
    assert store.get("mine").path.read_bytes() == b"weights"
    assert store.remove("mine").freed_bytes < 400
    assert not folder.exists()
    assert file.read_bytes() == b"weights"


def test_a_broken_link_is_named(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"weights")
    put(store, "mine:latest", link=file)
    file.unlink()
    with pytest.raises(StoreError, match=f"its link to {file} is broken"):
        store.get("mine")


def test_resolve_takes_names_files_and_folders(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a:1")
    folder = tmp_path / "own"
    folder.mkdir()
    file = folder / "My-Model.Q4_1.gguf"
    file.write_bytes(b"weights")
    monkeypatch.chdir(tmp_path)
    assert store.resolve("a").name == "a:1"
    for text in (str(file), str(folder), "./own", "own/My-Model.Q4_1.gguf"):
        found = store.resolve(text)
        assert (found.name, found.path) == ("my-model.q4_1", file)
    monkeypatch.chdir(folder)
    assert store.resolve("My-Model.Q4_1.gguf").path == file
    assert store.resolve(".").path == file


def test_resolve_explains_what_it_cannot_use(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none").mkdir()
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).write_bytes(b"")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelFilesError, match=r"should hold one .gguf file, found none"):
        store.resolve("./none")
    with pytest.raises(ModelFilesError, match=r"found 2 \(a.gguf, b.gguf\), .*; name the file itself"):
        store.resolve("./two")
    with pytest.raises(ModelFilesError, match=r"notes.txt is no .gguf file, and no folder with config.json"):
        store.resolve("./notes.txt")
    with pytest.raises(ModelFilesError, match=r"cannot read .*/absent.gguf: no such file or folder"):
        store.resolve("absent.gguf")
    with pytest.raises(StoreError, match=r"for the folder of that name here, write \./none"):
        store.resolve("none")


@pytest.mark.parametrize(
    ("text", "is_path"),
    [
        ("a", False),
        ("a:b", False),
        ("qwen2.5", False),
        ("./a", True),
        ("a/b", True),
        (".", True),
        ("x.GGUF", True),
    ],
)
def test_paths_are_told_from_names(text: str, is_path: bool) -> None:
    assert looks_like_path(text) is is_path


def test_a_second_process_is_refused_until_the_first_is_gone(store: Store) -> None:
    hold = (
        "import sys; from pathlib import Path; from appliance.store import Store; "
        "from appliance.names import ModelName\n"
        f"with Store(Path({str(store.models_dir)!r})).locked(ModelName('a', '1')):\n"
        "    print('held', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        refused = pytest.raises(StoreError, match=f"a:1 is being changed by process {holder.pid}")
        with refused, store.locked(ModelName("a", "1")):
            pass
        with store.locked(ModelName("a", "2")):
            pass  # another model is free
    finally:
        holder.kill()  # no time to clean up
        holder.communicate()
    with store.locked(ModelName("a", "1")):
        pass


def test_a_model_in_use_is_not_removed(store: Store) -> None:
    put(store, "a:1")
    with store.get("a").hold(), store.get("a").hold():
        with pytest.raises(StoreError, match="a:1 is in use; end the daemon or program"):
            store.remove("a")
        assert store.get("a").path.read_bytes() == b"weights"
    assert store.remove("a").name == "a:1"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    store = Store(tmp_path / "models")
    with (
        pytest.raises(StoreError, match=r"cannot write to .*--download-dir"),
        store.locked(ModelName("a", "1")),
    ):
        pass
