"""Model folders of the user's own: linked, copied, changed, gone, removed, and run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from appliance import LLM, SamplingParams
from appliance.names import ModelName
from appliance.pull import local
from appliance.pull.transfer import PullError, SilentProgress, sha256_of_model
from appliance.store import Store, StoreError
from appliance.text.chat_template import TemplateError

FILES = ["config.json", "generation_config.json", "model.safetensors", "quantize_config.json"]
GREEDY = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


@pytest.fixture
def folder(tmp_path: Path, golden: Path) -> Path:
    """A folder with a blank in its name, which has a folder in it, too."""
    folder = Path(shutil.copytree(golden / "gptqmodel_w4_g64_sym_desc", tmp_path / "My Model"))
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.pth").write_bytes(bytes(1000))
    return folder


class Meddler(SilentProgress):
    """Does something where a stage begins."""

    def __init__(self, stage: str, action: Callable[[], object]) -> None:
        self._stage, self._action = stage, action

    def begin(self, what: str, total: int) -> None:
        super().begin(what, total)
        if what == self._stage:
            self._action()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_link_leaves_the_users_files_when_it_is_removed(store: Store, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(folder)
    pulled = local.link(f"{tmp_path / 'alias'}/", None, store)
    assert pulled.model.name == "alias:latest"
    assert pulled.model.manifest.format == "safetensors gptq-gptqmodel"
    assert (pulled.model.manifest.linked, pulled.model.manifest.context) == (True, 512)
    assert pulled.model.manifest.size == sum((folder / name).stat().st_size for name in FILES)
    assert not local.link(str(folder), "alias", store).is_new
    assert store.remove("alias").freed_bytes < 2000
    assert names(folder) == [*FILES[:3], "original", FILES[3]]
    assert names(folder / "original") == ["consolidated.pth"]


def test_a_link_whose_folder_is_gone_says_so_and_can_be_replaced(store: Store, folder: Path) -> None:
    local.link(str(folder), "mine", store)
    moved = folder.rename(folder.with_name("moved"))
    with pytest.raises(StoreError, match=f"mine:latest is damaged: its link to {folder} is broken"):
        store.get("mine")
    assert local.link(str(moved), "mine", store).is_new
    assert store.get("mine").path.resolve() == moved


def test_a_copy_is_of_the_models_files_and_notices_changes(store: Store, folder: Path) -> None:
    installed = local.copy(str(folder), "mine", store, SilentProgress()).model
    assert names(installed.path) == FILES
    assert installed.manifest.sha256 == sha256_of_model(folder) == sha256_of_model(installed.path)
    assert not local.copy(str(folder), "mine", store, SilentProgress()).is_new
    (installed.path / "config.json").write_text("{}")
    with pytest.raises(StoreError, match=r"mine:latest is damaged: .* bytes, expected"):
        store.get("mine")
    assert local.copy(str(folder), "mine", store, SilentProgress()).is_new


def test_repacked_weights_in_a_folder_are_no_part_of_the_model(store: Store, folder: Path) -> None:
    (folder / ".packed").write_bytes(b"repacked")
    (folder / ".packed.1-2.tmp").write_bytes(b"half")
    installed = local.copy(str(folder), "mine", store, SilentProgress()).model
    assert names(installed.path) == FILES
    (installed.path / ".packed").write_bytes(b"repacked")
    assert store.list().damaged == ()
    assert sha256_of_model(installed.path) == installed.manifest.sha256


def test_an_interrupted_copy_leaves_nothing(store: Store, folder: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        local.copy(str(folder), "mine", store, Meddler("copying model.safetensors", interrupt))
    assert store.names() == ()
    assert not store.partial_dir(ModelName("mine", "latest")).exists()
    assert local.copy(str(folder), "mine", store, SilentProgress()).is_new


def test_a_folder_that_changes_while_it_is_copied_is_refused_or_whole(store: Store, folder: Path) -> None:
    weights = folder / "model.safetensors"

    def cut() -> None:
        weights.write_bytes(weights.read_bytes()[:-1])

    def add() -> None:
        (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 64}')

    whole = weights.read_bytes()
    with pytest.raises(PullError, match=r"model\.safetensors came with"):
        local.copy(str(folder), "mine", store, Meddler("copying model.safetensors", cut))
    assert store.names() == ()
    weights.write_bytes(whole)
    installed = local.copy(str(folder), "mine", store, Meddler("copying config.json", add)).model
    assert store.get("mine").manifest.sha256 == sha256_of_model(installed.path)


def runnable(golden: Path, folder: Path) -> Path:
    shutil.copy(golden / "gguf_f16" / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def test_a_folder_generates_until_any_of_its_configurations_ends_it(golden: Path, folder: Path) -> None:
    llm = LLM(model=f"{runnable(golden, folder)}/")
    (output,) = llm.generate(["Hello w"], GREEDY)[0].outputs
    assert (len(output.token_ids), output.finish_reason) == (8, "length")
    expected = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).decode(output.token_ids)
    assert output.text == expected
    with pytest.raises(TemplateError, match="this model has no chat template"):
        llm.chat([{"role": "user", "content": "Hello"}])

    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"eos_token_id": [output.token_ids[2]]}))
    (ended,) = LLM(model=str(folder)).generate(["Hello w"], GREEDY)[0].outputs
    assert ended.token_ids == output.token_ids[: len(ended.token_ids)]
    assert (len(ended.token_ids), ended.finish_reason) == (2, "stop")
