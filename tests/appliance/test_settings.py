"""Settings: one schema, four sources, and what is said of names and values that cannot be had."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.engine.config import EngineConfig
from appliance.settings import PYTHON, SettingsError, load_settings, resolve
from appliance.settings_docs import reference, sample
from appliance.settings_facts import facts, values
from appliance.settings_schema import Settings
from appliance.settings_vllm import FOREIGN, RENAMED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty configuration folder, and nothing set by whoever runs the tests."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"APPLIANCE_{name.upper()}", raising=False)
    monkeypatch.setenv("APPLIANCE_CONFIG_DIR", str(tmp_path))
    return tmp_path / "config.toml"


def refused(**flags: Any) -> str:
    with pytest.raises(SettingsError) as error:
        load_settings(flags)
    return str(error.value)


def test_flags_go_over_the_environment_over_the_file_over_defaults(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("port = 1\nmax_num_seqs = 1\nblock_size = 32\nallowed_hosts = ['a', 'b']\n")
    monkeypatch.setenv("APPLIANCE_PORT", "2")
    monkeypatch.setenv("APPLIANCE_MAX_NUM_SEQS", "2")
    resolved = resolve({"port": 3, "host": None})
    got = resolved.settings
    assert (got.port, got.max_num_seqs, got.block_size, got.host) == (3, 2, 32, "127.0.0.1")
    assert got.allowed_hosts == ("a", "b")
    assert resolved.origins == {
        "port": "--port",
        "max_num_seqs": "APPLIANCE_MAX_NUM_SEQS",
        "block_size": str(config),
        "allowed_hosts": str(config),
        "config_dir": "APPLIANCE_CONFIG_DIR",
    }


@pytest.mark.parametrize(
    ("text", "keys"),
    [("a", ("a",)), ("a, b,", ("a", "b")), ('["a,b", "c"]', ("a,b", "c")), ("", ())],
)
def test_a_list_in_the_environment(text: str, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPLIANCE_API_KEY", text)
    assert load_settings().api_key == keys


def test_an_empty_value_takes_back_what_the_file_sets(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text(
        "ssl_certfile = '/c'\nssl_keyfile = '/k'\nseed = 7\nport = 9\nhost = '0.0.0.0'\n"
        "model = 'other'\nallowed_hosts = ['a']\ndownload_dir = '/elsewhere'\nblock_size = 32\n"
    )
    for name in tomllib.loads(config.read_text()):
        monkeypatch.setenv(f"APPLIANCE_{name.upper()}", "")
    assert load_settings() == Settings(config_dir=config.parent)


def test_hosts_and_origins_are_written_as_browsers_send_them() -> None:
    got = Settings(
        host="Box.LAN",
        allowed_hosts="FD00:0:0::1, my_box",
        allowed_origins="https://Chat.lan:443/, http://chat.lan:80, http://chat.lan:443, http://[::80]",
    )
    assert (got.host, got.allowed_hosts) == ("box.lan", ("fd00::1", "my_box"))
    assert got.allowed_origins == (
        "https://chat.lan",
        "http://chat.lan",
        "http://chat.lan:443",
        "http://[::80]",
    )


def test_a_byte_order_mark_is_no_part_of_the_file(config: Path) -> None:
    config.write_bytes(b"\xef\xbb\xbfport = 9\r\n")
    assert load_settings().port == 9


@pytest.mark.parametrize("name", ["server", "model"])
def test_a_section_is_refused_as_such(name: str, config: Path) -> None:
    config.write_text(f"[{name}]\nport = 9\n")
    assert refused() == f"{config} has a section [{name}]; settings stand in no section, leave that line out"


def test_a_configuration_folder_of_nobody_is_refused() -> None:
    folder = "~nobody-of-that-name/config"
    assert refused(config_dir=folder).startswith("config_dir in the command line: no home folder is known")


def test_a_home_folder_is_meant_by_a_tilde(config: Path) -> None:
    config.write_text("download_dir = '~/models'\n")
    assert load_settings().download_dir == Path.home() / "models"


def test_unknown_names_come_with_the_nearest_in_the_spelling_of_their_source(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("max_model_length = 5\n")
    assert refused() == f"unknown setting 'max_model_length' in {config}; did you mean 'max_model_len'?"
    config.write_text("")
    message = "unknown setting max_model_length in the call; did you mean max_model_len?"
    with pytest.raises(SettingsError, match=message):
        load_settings({"max_model_length": 5}, PYTHON)
    monkeypatch.setenv("APPLIANCE_MAX_NUM_SEQ", "5")
    assert refused() == (
        "unknown setting APPLIANCE_MAX_NUM_SEQ in the environment; did you mean APPLIANCE_MAX_NUM_SEQS?"
    )


def test_a_file_cannot_say_where_it_is(config: Path) -> None:
    config.write_text("config_dir = '/elsewhere'\n")
    assert refused() == f"config_dir in {config} has no effect there: it says where that file is"


OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("dtype", "half", "what keys and values are kept in is kv_cache_dtype"),
    ("device", "gpu", "expected auto, cpu, cuda, or the number of a GPU as in cuda:0"),
    ("device", "cuda:", "expected auto, cpu, cuda, or the number"),
    ("device", 0, "valid string"),
    ("kv_cache_dtype", "fp8", "int8 is the smallest"),
    ("tensor_parallel_size", 2, "leave tensor_parallel_size at 1"),
    ("tensor_parallel_size", 0, "greater than or equal to 1"),
    ("block_size", 8, "16, 32 or 64"),
    ("backend", "torch", "leave backend at auto"),
    ("activation_precision", "int4", "float32 rounds nothing"),
    ("max_model_len", 15, "greater than or equal to 16"),
    ("max_model_len", 2**31, "less than or equal to"),
    ("max_num_seqs", 0, "greater than or equal to 1"),
    ("max_num_seqs", 1025, "less than or equal to 1024"),
    ("max_num_batched_tokens", 15, "greater than or equal to 16"),
    ("kv_cache_memory_bytes", 0, "greater than or equal to 1"),
    ("kv_cache_memory_bytes", 2**63, "less than or equal to"),
    ("gpu_memory_utilization", 0.96, "less than or equal to 0.95"),
    ("gpu_memory_utilization", 0, "greater than 0"),
    ("gpu_memory_utilization", float("nan"), "finite"),
    ("swap_space", -1, "greater than or equal to 0"),
    ("enable_prefix_caching", "perhaps", "boolean"),
    ("enforce_eager", "perhaps", "boolean"),
    ("num_threads", 0, "greater than or equal to 1"),
    ("num_threads", 1025, "less than or equal to 1024"),
    ("seed", -1, "greater than or equal to 0"),
    ("seed", 2**63, "less than or equal to"),
    ("port", 65536, "less than or equal to 65535"),
    ("port", True, "only switches take"),
    ("swap_space", False, "only switches take"),
    ("request_timeout", 0, "greater than 0"),
    ("request_timeout", float("inf"), "finite"),
    ("drain_timeout", -1, "greater than or equal to 0"),
    ("max_body_bytes", 1023, "greater than or equal to 1024"),
    ("model", 5, "valid string"),
    ("served_model_name", 5, "valid string"),
    ("quantization", 5, "valid string"),
    ("host", 5, "valid string"),
    ("host", "http://127.0.0.1", "without scheme and port"),
    ("host", "localhost:8000", "without scheme and port"),
    ("host", "192.168..1", "without scheme and port"),
    ("host", "x" * 64, "without scheme and port"),
    ("allowed_hosts", 5, "valid tuple"),
    ("allowed_hosts", "box.lan:8000", "without scheme and port"),
    ("allowed_hosts", "http://box.lan", "without scheme and port"),
    ("allowed_hosts", "*", "without scheme and port"),
    ("allowed_hosts", ["box.lan", ""], "without scheme and port"),
    ("download_dir", 5, "path"),
    ("download_dir", "~nobody-of-that-name/models", "no home folder is known"),
    ("api_keys_file", 5, "path"),
    ("allowed_origins", "localhost:3000", "expected one such as https://chat.lan"),
    ("allowed_origins", "https://chat.lan/page", "expected one such as https://chat.lan"),
    ("allowed_origins", '["https://chat.lan"', "expected a list"),
    ("api_key", "two words", "visible ASCII characters without spaces"),
]


@pytest.mark.parametrize(("name", "value", "why"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_named_with_its_source(name: str, value: Any, why: str) -> None:
    message = refused(**{name: value})
    assert message.startswith(f"{name} in the command line: ")
    assert why in message


def test_every_setting_is_refused_somewhere_in_this_table() -> None:
    # Any text is a path; what is wrong with these is found when they are opened.
    opened = {"ssl_certfile", "ssl_keyfile", "config_dir"}
    assert {name for name, _, _ in OUT_OF_RANGE} == set(Settings.model_fields) - opened


def test_a_key_is_never_in_a_message() -> None:
    assert "kitten paw" not in refused(api_key=["kitten paw"])
    assert "kitten" not in repr(Settings(api_key=("kitten",)))


def test_a_certificate_needs_its_key() -> None:
    assert refused(ssl_certfile="/c").startswith("ssl_certfile is set but ssl_keyfile is not")
    assert refused(ssl_keyfile="/k").startswith("ssl_keyfile is set but ssl_certfile is not")


@pytest.mark.parametrize("old", RENAMED)
def test_other_spellings_are_taken_with_a_note(old: str) -> None:
    texts = {
        "kv_cache_dtype": "bfloat16",
        "allowed_origins": "http://a",
        "ssl_certfile": "",
        "ssl_keyfile": "",
    }
    value: Any = texts.get(RENAMED[old], 99)
    resolved = resolve({old: value})
    expected = Settings(**{RENAMED[old]: value})
    assert getattr(resolved.settings, RENAMED[old]) == getattr(expected, RENAMED[old])
    dashed = old.replace("_", "-")
    assert resolved.notes == (
        f"--{dashed} in the command line is called --{RENAMED[old].replace('_', '-')} here, and taken as that",
    )


def test_two_spellings_of_one_setting_are_refused(config: Path) -> None:
    config.write_text("max_model_len = 100\nmax_seq_len = 200\n")
    assert refused() == (
        f"'max_model_len' and 'max_seq_len' in {config} are the same setting; keep 'max_model_len'"
    )


def test_hyphens_in_the_file_are_taken_with_a_note(config: Path) -> None:
    config.write_text("request-timeout = 5\n")
    resolved = resolve()
    assert resolved.settings.request_timeout == 5
    assert resolved.notes == (
        f"'request-timeout' in {config} is called 'request_timeout' here, and taken as that",
    )


@pytest.mark.parametrize("name", [name for name, foreign in FOREIGN.items() if foreign.harmless is None])
def test_what_has_no_meaning_here_is_dropped_with_a_note(name: str, config: Path) -> None:
    config.write_text(f"{name} = 8192\n")
    assert resolve().notes == (f"'{name}' in {config} has no effect: {FOREIGN[name].advice}",)


@pytest.mark.parametrize("name", [name for name, foreign in FOREIGN.items() if foreign.harmless is not None])
def test_what_is_not_there_is_refused_with_advice(name: str, config: Path) -> None:
    for harmless in FOREIGN[name].harmless or ():
        assert len(resolve({name: harmless}).notes) == 1
    config.write_text(f"{name} = 'something'\n")
    assert refused() == f"'{name}' in {config} is not supported: {FOREIGN[name].advice}"


def test_python_values_are_judged_like_text() -> None:
    assert "without LoRA adapters" in refused(enable_lora=True)
    assert "one device" in refused(pipeline_parallel_size=2)
    assert load_settings({"enable_lora": False, "pipeline_parallel_size": 1}) == load_settings()


def test_the_engine_gets_what_concerns_it() -> None:
    given = {
        "max_model_len": 100,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 32,
        "block_size": 32,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 9,
        "gpu_memory_utilization": 0.5,
        "kv_cache_dtype": "bfloat16",
        "swap_space": 2.0,
        "quantization": "awq",
        "seed": 5,
        "num_threads": 2,
        "dtype": "float16",
        "device": "cuda:1",
        "backend": "reference",
        "activation_precision": "bf16",
    }
    assert Settings(**given).engine_config(Path("/m")) == EngineConfig(model_path="/m", **given)
    assert set(given) == set(EngineConfig.__struct_fields__) - {"model_path"}


@pytest.mark.parametrize(
    "given",
    [{"enforce_eager": True}, {"tensor_parallel_size": 1}],
)
def test_what_every_backend_does_anyway_is_accepted_and_changes_nothing(given: dict[str, Any]) -> None:
    assert load_settings(given).engine_config(Path("/m")) == EngineConfig(model_path="/m")


def test_the_documents_are_those_of_the_schema(repo_root: Path) -> None:
    advice = "run `python -m appliance.settings_docs`"
    assert (repo_root / "docs" / "configuration.md").read_text(encoding="utf-8") == reference(), advice
    assert (repo_root / "docs" / "config.toml").read_text(encoding="utf-8") == sample(), advice


def test_every_line_of_the_sample_can_be_uncommented(config: Path) -> None:
    lines = [line[1:] if line[:2].strip("#")[:1].isalpha() else line for line in sample().splitlines()]
    config.write_text("\n".join(lines))
    assert set(tomllib.loads(config.read_text())) == set(Settings.model_fields) - {"config_dir"}
    got = load_settings()
    defaults = Settings(config_dir=config.parent)
    for name, field in Settings.model_fields.items():
        if field.default is not None and not facts(name)["shown"]:
            assert getattr(got, name) == getattr(defaults, name), name


def test_every_setting_is_described() -> None:
    assert all(field.description for field in Settings.model_fields.values())
    shown = {name: values(name) for name in ("port", "block_size", "gpu_memory_utilization", "seed", "model")}
    assert shown == {
        "port": "0 to 65535",
        "block_size": "16, 32, 64 tokens",
        "gpu_memory_utilization": "more than 0 and at most 0.95 of what is free",
        "seed": "0 to 2^63 - 1",
        "model": "text",
    }
