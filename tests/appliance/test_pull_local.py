from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from appliance.model_files import ModelFilesError
from appliance.names import ModelNameError
from appliance.pull import local
from appliance.pull.transfer import DiskFullError, PullError, SilentProgress, require_space
from appliance.store import Store


class Recorder:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.done: list[int] = []

    def begin(self, what: str, total: int) -> None:
        self.stages.append((what, total))

    def at(self, done: int) -> None:
        self.done.append(done)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


@pytest.fixture
def model(tmp_path: Path, golden: Path) -> Path:
    """A folder of the user's with one real GGUF file, and something else, in it."""
    folder = tmp_path / "My Models"
    folder.mkdir()
    shutil.copy(golden / "gguf_q4_1" / "mini-q4_1.gguf", folder)
    (folder / "README.md").write_text("mine")
    return folder / "mini-q4_1.gguf"


def make_gguf(path: Path, architecture: str = "llama", **metadata: int) -> Path:
    """A small GGUF file by the reference writer, whose one tensor is Q5_0 or F32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        writer.add_uint32(key.replace("__", "."), value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_link_is_what_the_file_says_it_is(store: Store, model: Path) -> None:
    pulled = local.link(str(model), None, store)
    manifest = pulled.model.manifest
    assert pulled.is_new
    assert pulled.model.name == "mini-q4_1:latest"
    assert pulled.model.path.is_symlink()
    assert pulled.model.path.resolve() == model
    assert (manifest.architecture, manifest.format) == ("LlamaForCausalLM", "GGUF Q4_1")
    assert (manifest.size, manifest.linked, manifest.sha256) == (118112, True, "")
    assert manifest.source == str(model)
    assert store.get("mini-q4_1").path == pulled.model.path


def test_a_folder_with_one_file_and_a_name_of_ones_own(store: Store, model: Path) -> None:
    assert local.link(str(model.parent), "Mine:v2", store).model.name == "mine:v2"


def test_a_copy_is_whole_and_on_its_own(store: Store, model: Path) -> None:
    content = model.read_bytes()
    progress = Recorder()
    pulled = local.copy(str(model), "mine", store, progress)
    assert progress.stages == [("copying", len(content))]
    assert progress.done[-1] == len(content)
    assert pulled.model.manifest.sha256 == hashlib.sha256(content).hexdigest()
    model.unlink()
    assert pulled.model.path.read_bytes() == content
    assert sorted(path.name for path in pulled.model.path.parent.iterdir()) == ["manifest.json", "model.gguf"]
    assert not store.partial_dir(local.ModelName("mine", "latest")).exists()


def test_pulling_the_same_file_again_changes_nothing(store: Store, model: Path) -> None:
    local.link(str(model), "linked", store)
    local.copy(str(model), "copied", store, SilentProgress())
    assert not local.link(str(model), "linked", store).is_new
    assert not local.copy(str(model), "copied", store, SilentProgress()).is_new
    assert not local.link(str(model), "copied", store).is_new


def test_a_link_becomes_a_copy(store: Store, model: Path) -> None:
    local.link(str(model), "mine", store)
    pulled = local.copy(str(model), "mine", store, SilentProgress())
    assert pulled.is_new
    assert not pulled.model.path.is_symlink()
    assert pulled.model.path.read_bytes() == model.read_bytes()


def test_a_name_in_use_is_refused_and_stays(store: Store, model: Path, golden: Path) -> None:
    other = golden / "gguf_q4_0" / "mini-q4_0.gguf"
    local.link(str(model), "mine", store)
    with pytest.raises(PullError, match=f"mine:latest is already installed, from {model}; .*--name"):
        local.link(str(other), "mine", store)
    with pytest.raises(PullError, match="mine:latest is already installed"):
        local.copy(str(other), "mine", store, SilentProgress())
    assert store.get("mine").path.resolve() == model


def test_a_damaged_model_makes_way(store: Store, model: Path) -> None:
    local.copy(str(model), "mine", store, SilentProgress()).model.path.unlink()
    assert local.copy(str(model), "mine", store, SilentProgress()).is_new
    assert store.get("mine").path.read_bytes() == model.read_bytes()


def test_another_architecture_is_refused_by_name(store: Store, tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "x.gguf", "mamba")
    with pytest.raises(PullError, match=r"architecture 'mamba' is not supported; what works: .*gemma3"):
        local.link(str(path), None, store)
    assert store.names() == ()


def test_a_part_of_a_split_model_is_refused(store: Store, tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "x-00001-of-00003.gguf", split__count=3)
    with pytest.raises(PullError, match="one of 3 parts; merge them"):
        local.link(str(path), None, store)


def test_an_unreadable_tensor_type_is_refused_by_name(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType.IQ3_S
    writer.add_tensor("token_embd.weight", np.zeros((4, 110), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        PullError, match=r"'token_embd.weight' has type IQ3_S; what works here: F32, F16, BF16, Q4_0"
    ):
        local.link(str(path), None, store)


def test_what_is_offered_is_what_is_read_and_run() -> None:
    from appliance.engine.families import supported_architectures
    from appliance.quant.capabilities import CAPABILITIES
    from appliance.quant.gguf import readers

    assert set(CAPABILITIES.tensor_types) == set(readers.READERS)
    offered = {*CAPABILITIES.architectures, *CAPABILITIES.gguf_architectures}
    assert offered == set(supported_architectures())


@pytest.mark.parametrize("keep", [0, 3, 40, 3000, 118111])
def test_a_truncated_file_is_refused(store: Store, model: Path, keep: int) -> None:
    model.write_bytes(model.read_bytes()[:keep])
    with pytest.raises(PullError, match=r"mini-q4_1.gguf cannot be used: "):
        local.copy(str(model), None, store, SilentProgress())
    assert store.names() == ()


def test_what_is_not_gguf_is_refused(store: Store, model: Path) -> None:
    model.write_bytes(b"PK\x03\x04" + bytes(200))
    with pytest.raises(PullError, match=r"cannot be used: .*GGUF"):
        local.link(str(model), None, store)


def test_a_path_that_is_not_there(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="no such file or folder"):
        local.link(str(tmp_path / "absent.gguf"), None, store)


def test_a_bad_name_is_refused_before_anything_is_made(store: Store, model: Path) -> None:
    with pytest.raises(ModelNameError):
        local.link(str(model), "../mine", store)
    assert not store.models_dir.exists()


def test_room_is_checked_where_the_folder_will_be(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    require_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(DiskFullError, match=r"not enough room in .*/not/yet: .* are needed, .* are free"):
        require_space(tmp_path / "not" / "yet", free)
