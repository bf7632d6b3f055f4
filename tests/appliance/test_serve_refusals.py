"""`appliance serve` that cannot serve says why in one line and exits with 1."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_daemon import command, environment

pytestmark = pytest.mark.starter


def serve(models_dir: Path, home: Path, *arguments: str, **settings: Any) -> tuple[int, str]:
    """Exit status and stderr."""
    ended = subprocess.run(
        command("serve", *arguments),
        cwd=home,
        env=environment(models_dir, home, **settings),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout == ""
    return ended.returncode, ended.stderr


def test_a_taken_port_is_known_before_the_model_is_touched(starter_models_dir: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, said = serve(starter_models_dir, tmp_path, "--port", str(port))
    assert code == 1
    assert said == (
        f"error: port {port} on 127.0.0.1 is taken by process {os.getpid()} ({psutil.Process().name()}); "
        f"choose another one: --port {port + 1}\n"
    )


def test_a_public_address_needs_a_key(starter_models_dir: Path, tmp_path: Path) -> None:
    code, said = serve(starter_models_dir, tmp_path, "--host", "0.0.0.0", "--port", "0")
    assert code == 1
    assert said.startswith("error: host is 0.0.0.0")
    assert "APPLIANCE_API_KEY" in said


def test_a_setting_out_of_range_is_named(starter_models_dir: Path, tmp_path: Path) -> None:
    code, said = serve(starter_models_dir, tmp_path, "--block-size", "7")
    assert code == 1
    assert said.startswith("error: block_size in the command line: ")


def test_an_unknown_model_is_not_waited_for(starter_models_dir: Path, tmp_path: Path) -> None:
    code, said = serve(starter_models_dir, tmp_path, "smolm2", "--port", "0")
    assert code == 1
    assert said.startswith("error: no model called 'smolm2' in the catalogue; did you mean smollm2")


def test_a_truncated_file_names_the_tensor(
    starter_models_dir: Path, starter_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    with starter_model.open("rb") as whole:
        broken.write_bytes(whole.read(20_000_000))
    code, said = serve(starter_models_dir, tmp_path, "./broken.gguf", "--port", "0")
    assert code == 1
    last = said.splitlines()[-1]
    assert last.startswith("error: ")
    assert "is truncated: 'token_embd.weight' lacks 11866688 of its 30081024 bytes" in last
    assert "Traceback" not in said
