"""`appliance config` and `appliance key` as a shell user meets them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from live_daemon import command, environment

from appliance.settings_docs import sample
from appliance.settings_schema import Settings


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text("max_num_seqs = 7\napi_key = ['hunter2', 'other']\n")
    return tmp_path


def appliance(home: Path, *arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=home,
        env=environment(home / "models", home, **settings),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_each_value_is_printed_with_where_it_was_set(home: Path) -> None:
    ended = appliance(home, "config", "mine", "--no-enable-prefix-caching", "--seed", "5", port=9000)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = dict(line.split(" = ", 1) for line in ended.stdout.splitlines())
    assert list(lines) == list(Settings.model_fields)
    found = {name: tuple(part.strip() for part in line.split("#")) for name, line in lines.items()}
    file = str(home / "config" / "config.toml")
    assert found["model"] == ('"mine"', "--model")
    assert found["enable_prefix_caching"] == ("false", "--enable-prefix-caching")
    assert found["seed"] == ("5", "--seed")
    assert found["port"] == ("9000", "APPLIANCE_PORT")
    assert found["max_num_seqs"] == ("7", file)
    assert found["block_size"] == ("16", "default")
    assert found["max_model_len"] == ("none", "default")
    assert found["api_key"] == ('["***", "***"]', file)
    assert "hunter2" not in ended.stdout


def test_json(home: Path) -> None:
    ended = appliance(home, "config", "--json")
    rows = json.loads(ended.stdout)
    assert list(rows) == list(Settings.model_fields)
    assert rows["max_num_seqs"] == {"value": 7, "source": str(home / "config" / "config.toml")}
    assert rows["api_key"]["value"] == ["***", "***"]
    assert rows["download_dir"] == {"value": str(home / "models"), "source": "APPLIANCE_DOWNLOAD_DIR"}


def test_the_sample_is_printed_even_where_the_settings_are_wrong(home: Path) -> None:
    ended = appliance(home, "config", "--sample", port="many")
    assert (ended.returncode, ended.stdout) == (0, sample())


def test_flags_of_vllm_are_known(home: Path) -> None:
    ended = appliance(
        home, "config", "--max-seq-len", "99", "--metrics-port", "9", "--trust-remote-code", "--json"
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: --trust-remote-code in the command line is not supported: ")
    ended = appliance(home, "config", "--max-seq-len", "99", "--metrics-port", "9", "--json")
    assert json.loads(ended.stdout)["max_model_len"] == {"value": 99, "source": "--max-seq-len"}
    assert ended.stderr.splitlines() == [
        "--max-seq-len in the command line is called --max-model-len here, and taken as that",
        "--metrics-port in the command line has no effect: metrics are at /metrics on the daemon's own port",
    ]


def test_a_model_may_be_given_as_a_flag_but_not_as_two(home: Path) -> None:
    ended = appliance(home, "config", "--model", "mine", "--json")
    assert json.loads(ended.stdout)["model"]["value"] == "mine"
    ended = appliance(home, "config", "mine", "--model", "yours")
    assert ended.returncode == 2
    assert "as mine and as --model yours" in ended.stderr


def test_a_flag_holds_a_list_as_the_environment_does(home: Path) -> None:
    ended = appliance(home, "config", "--allowed-hosts", "a,b", "--allowed-origins", '["http://c"]', "--json")
    rows = json.loads(ended.stdout)
    assert (rows["allowed_hosts"]["value"], rows["allowed_origins"]["value"]) == (["a", "b"], ["http://c"])
    ended = appliance(home, "config", "--allowed-hosts", "a", "--allowed-hosts", "b", "--json")
    assert json.loads(ended.stdout)["allowed_hosts"]["value"] == ["a", "b"]


def test_an_unknown_variable_is_an_error(home: Path) -> None:
    ended = appliance(home, "list", max_num_seq=5)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        "error: unknown setting APPLIANCE_MAX_NUM_SEQ in the environment; did you mean APPLIANCE_MAX_NUM_SEQS?\n"
    )


def test_keys_are_made_listed_and_revoked(home: Path) -> None:
    made = appliance(home, "key", "new", "laptop")
    key = made.stdout.strip()
    assert (made.returncode, key[:3]) == (0, "ak-")
    assert key not in made.stderr
    file = home / "config" / "api_keys"
    assert key not in file.read_text()
    assert appliance(home, "key", "list").stdout.startswith("laptop  sha256 ")
    elsewhere = appliance(home, "key", "list", "--api-keys-file", str(home / "none"))
    assert (elsewhere.returncode, elsewhere.stdout) == (0, "")
    twice = appliance(home, "key", "new", "laptop")
    assert (twice.returncode, twice.stdout) == (1, "")
    assert "already" in twice.stderr
    assert appliance(home, "key", "revoke", "laptop").stdout == "laptop is revoked\n"
    assert file.read_text() == ""
