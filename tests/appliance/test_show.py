"""`appliance show`: what it prints of a model of each format, word for word."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from appliance.cli.commands import app
from appliance.names import ModelError
from appliance.pull import local
from appliance.pull.transfer import SilentProgress, sha256_of_model
from appliance.quant.errors import CheckpointError
from appliance.store import Store

AWQ = """\
path          {path}
size          149,548 bytes
architecture  LlamaForCausalLM
weights       awq-gemm, 4 bits in groups of 64: 7 matrices, 79,488 bytes
              f16: 2 matrices, 65,536 bytes
dense         embed, head
norms, biases 768 bytes
"""
ACT_ORDER = """\
path          {path}
size          156,712 bytes
architecture  LlamaForCausalLM
weights       gptq-gptqmodel, 4 bits in groups of 64, act-order: 7 matrices, 83,584 bytes
              bf16: 2 matrices, 65,536 bytes
dense         embed, head
norms, biases 768 bytes
"""
WHOLE_ROWS = """\
path          {path}
size          153,514 bytes
architecture  LlamaForCausalLM
weights       gptq-gptqmodel, 4 bits in one group a row: 7 matrices, 80,384 bytes
              bf16: 2 matrices, 65,536 bytes
dense         embed, head
norms, biases 768 bytes
"""
COMPRESSED = """\
path          {path}
size          151,274 bytes
architecture  LlamaForCausalLM
weights       compressed-tensors-pack, 4 bits in groups of 64: 7 matrices, 79,600 bytes
              f16: 2 matrices, 65,536 bytes
dense         embed, head
norms, biases 768 bytes
"""
FP8 = """\
path          {path}
size          220,059 bytes
architecture  LlamaForCausalLM
weights       compressed-tensors-fp8, 8 bits in one group a row: 7 matrices, 149,504 bytes
              f16: 2 matrices, 65,536 bytes
dense         embed, head
norms, biases 768 bytes
"""
K_QUANTS = """\
path          {path}/mini-q4_k_m.gguf
size          276,192 bytes
architecture  llama
weights       Q4_K, 4.5 bits a weight in blocks of 256: 6 matrices, 175,104 bytes
              Q6_K, 6.5625 bits a weight in blocks of 256: 3 matrices, 94,080 bytes
norms, biases 3,072 bytes
"""
DENSE = """\
path          {path}
size          {size:,} bytes
architecture  LlamaForCausalLM
weights       f16: 9 matrices, 360,448 bytes
dense         embed, head, layers.0.q, layers.0.k, layers.0.v, layers.0.o and 3 others
norms, biases 768 bytes
"""
ACTIVATIONS = "note: config.json asks for quantised activations: only the weights are quantised here\n"


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `show` with models and settings of its own."""
    monkeypatch.setenv("APPLIANCE_DOWNLOAD_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("APPLIANCE_CONFIG_DIR", str(tmp_path / "config"))

    def run(*args: object) -> Any:
        return CliRunner().invoke(app, ["show", *map(str, args)])

    return run


def dense_folder(golden: Path, folder: Path) -> Path:
    """A model that nothing has quantised: float16 weights under the names of one that was."""
    shutil.copytree(golden / "ct_fp8_dynamic", folder)
    config = json.loads((folder / "config.json").read_bytes())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    weights = {name: tensor.half() for name, tensor in tensors.items() if not name.endswith("_scale")}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "expected", "notes"),
    [
        ("awq_gemm_g64", AWQ, ""),
        ("gptqmodel_w4_g64_sym_desc", ACT_ORDER, ""),
        ("gptqmodel_w4_gneg1_asym_desc", WHOLE_ROWS, ""),
        ("ct_w4a16_g64_asym_gptq", COMPRESSED, ""),
        ("ct_fp8_dynamic", FP8, ACTIVATIONS),
        ("gguf_q4_k_m", K_QUANTS, ""),
    ],
)
def test_a_model_of_each_format(show: Any, golden: Path, name: str, expected: str, notes: str) -> None:
    done = show(golden / name)
    assert (done.exit_code, done.stdout) == (0, expected.format(path=golden / name))
    assert done.stderr == notes


def test_a_model_that_is_not_quantised(show: Any, golden: Path, tmp_path: Path) -> None:
    folder = dense_folder(golden, tmp_path / "dense model")
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert show(f"{folder}/").stdout == DENSE.format(path=folder, size=size)


def test_a_link_and_a_mix_of_formats(show: Any, golden: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(golden / "ct_w4a16_g64_asym_gptq", tmp_path / "mixed")
    tensors = load_file(folder / "model.safetensors")
    up = "model.layers.0.mlp.up_proj."
    for suffix in ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"):
        del tensors[up + suffix]
    save_file({**tensors, up + "weight": torch.ones(256, 128)}, folder / "model.safetensors")
    (tmp_path / "link").symlink_to(folder)
    done = show(tmp_path / "link")
    assert done.stdout.splitlines()[3:7] == [
        "weights       f32: 1 matrix, 131,072 bytes",
        "              f16: 2 matrices, 65,536 bytes",
        "              compressed-tensors-pack, 4 bits in groups of 64: 6 matrices, 61,920 bytes",
        "dense         embed, head, layers.0.up",
    ]
    assert done.stderr == (
        "note: config.json says that model.layers.0.mlp.up_proj is quantised, its tensors say it is dense: "
        "the tensors decide\n"
    )


def test_json_has_the_same_in_numbers(show: Any, golden: Path) -> None:
    folder = golden / "ct_fp8_dynamic"
    done = show(folder, "--json")
    assert done.stderr == ""
    assert json.loads(done.stdout) == {
        "path": str(folder),
        "size": 220059,
        "architecture": "LlamaForCausalLM",
        "weights": [
            {
                "format": "compressed-tensors-fp8",
                "detail": "8 bits in one group a row",
                "matrices": 7,
                "weights": 147456,
                "bytes": 149504,
            },
            {"format": "f16", "detail": "", "matrices": 2, "weights": 32768, "bytes": 65536},
        ],
        "dense": ["embed", "head"],
        "vector_bytes": 768,
        "notes": ["config.json asks for quantised activations: only the weights are quantised here"],
    }


def test_weights_are_not_read(show: Any, golden: Path, tmp_path: Path) -> None:
    """Headers say it all: a file that is all there by its size is never asked for its weights."""
    folder = shutil.copytree(golden / "awq_gemm_g64", tmp_path / "model")
    with (folder / "model.safetensors").open("r+b") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
        file.seek(header)
        file.write(b"\xff" * (folder / "model.safetensors").stat().st_size)
        file.truncate((golden / "awq_gemm_g64" / "model.safetensors").stat().st_size)
    assert show(folder).stdout == AWQ.format(path=folder)


def test_verify_reads_every_byte_of_a_copy(show: Any, golden: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "models")
    installed = local.copy(str(golden / "awq_gemm_g64"), "mine", store, SilentProgress()).model
    done = show("mine", "--verify")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "verified      every byte, by its sha256"

    with (installed.path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert show("mine").exit_code == 0
    done = show("mine", "--verify")
    assert isinstance(done.exception, ModelError)
    found = sha256_of_model(installed.path)
    assert f"mine:latest is damaged: its sha256 is {found}, expected {installed.manifest.sha256}" in str(
        done.exception
    )


def test_verify_says_what_there_is_nothing_to_compare_with(show: Any, golden: Path, tmp_path: Path) -> None:
    folder = golden / "awq_gemm_g64"
    local.link(str(folder), "linked", Store(tmp_path / "models"))
    expected = f"verified      sha256 is {sha256_of_model(folder)}; nothing is known to compare it with"
    for model in ("linked", folder):
        assert show(model, "--verify").stdout.splitlines()[-1] == expected


def test_a_model_that_cannot_be_read_is_an_error(show: Any, golden: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(golden / "awq_gemm_g64", tmp_path / "model")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])
    done = show(folder)
    assert isinstance(done.exception, CheckpointError)
    assert f"{folder / 'model.safetensors'} is truncated" in str(done.exception)
    assert done.stdout == ""
