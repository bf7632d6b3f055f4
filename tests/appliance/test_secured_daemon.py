"""A daemon with HTTPS, keys and listed pages, as the real OpenAI client and `appliance run` meet it."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme
from live_daemon import BLOCK_BYTES, MODEL, PRECISION, LiveDaemon, command, environment, live_daemon

pytestmark = pytest.mark.starter

PAGE = "https://chat.lan"
QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class Secured:
    """The daemon, the context that trusts it, and its settings."""

    daemon: LiveDaemon
    context: ssl.SSLContext
    settings: dict[str, Any]
    models_dir: Path
    home: Path

    def openai(self, key: str) -> openai.OpenAI:
        client = httpx.Client(verify=self.context)
        return openai.OpenAI(base_url=f"{self.daemon.url}/v1", api_key=key, max_retries=0, http_client=client)

    def appliance(self, *arguments: str, **changes: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments),
            cwd=self.home,
            env=environment(
                self.models_dir,
                self.home,
                **{"activation_precision": PRECISION, **self.settings, **changes},
            ),
            input="",
            capture_output=True,
            text=True,
            timeout=120,
        )


@pytest.fixture(scope="module")
def secured(starter_models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    home = tmp_path_factory.mktemp("secured")
    issuer = trustme.CA()
    issued = issuer.issue_cert("127.0.0.1", "localhost")
    issued.cert_chain_pems[0].write_to_path(home / "cert.pem")
    issued.private_key_pem.write_to_path(home / "key.pem")
    context = ssl.create_default_context()
    issuer.configure_trust(context)
    settings = {
        "api_key": "first,second",
        "ssl_certfile": home / "cert.pem",
        "ssl_keyfile": home / "key.pem",
        "allowed_origins": PAGE,
        "block_size": 32,
        "kv_cache_dtype": "bfloat16",
        "kv_cache_memory_bytes": 100 * BLOCK_BYTES,
        "max_model_len": 512,
        "swap_space": 2,
        "quantization": "awq",
        "seed": 42,
        "max_body_bytes": 4096,
        "max_context_len_to_capture": 8192,
    }
    with live_daemon(starter_models_dir, home, **settings) as daemon:
        yield Secured(daemon, context, settings, starter_models_dir, home)


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_each_key_opens_and_nothing_else_does(secured: Secured) -> None:
    for key in ("first", "second"):
        assert [model.id for model in secured.openai(key).models.list()] == [MODEL]
    for wrong in ("third", "first,second", "none", "FIRST"):
        with pytest.raises(openai.AuthenticationError) as error:
            secured.openai(wrong).models.list()
        assert error.value.code == "invalid_api_key"
    bare = httpx.get(f"{secured.daemon.url}/v1/models", verify=secured.context)
    assert (bare.status_code, bare.headers["www-authenticate"]) == (401, "Bearer")


def test_a_key_made_while_it_runs_opens_until_it_is_revoked(secured: Secured) -> None:
    made = secured.appliance("key", "new", "laptop")
    assert made.returncode == 0
    client = secured.openai(made.stdout.strip())
    answer = client.completions.create(model=MODEL, prompt="Hi", max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert secured.appliance("key", "list").stdout.startswith("laptop  sha256 ")
    assert secured.appliance("key", "revoke", "laptop").stdout == "laptop is revoked\n"
    with pytest.raises(openai.AuthenticationError):
        client.completions.create(model=MODEL, prompt="Hi", max_tokens=2)
    assert secured.openai("first").models.list().data


def test_streams_come_over_https(secured: Secured) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    stream = secured.openai("first").chat.completions.create(
        model=MODEL, messages=messages, stream=True, temperature=0, max_tokens=16
    )
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_a_client_that_does_not_know_the_certificate_refuses_it(secured: Secured) -> None:
    client = openai.OpenAI(base_url=f"{secured.daemon.url}/v1", api_key="first", max_retries=0)
    with pytest.raises(openai.APIConnectionError) as error:
        client.models.list()
    assert "CERTIFICATE_VERIFY_FAILED" in str(error.value.__cause__)
    with pytest.raises(httpx.TransportError):
        httpx.get(secured.daemon.url.replace("https:", "http:") + "/health")


def test_a_listed_page_may_ask_and_read(secured: Secured) -> None:
    with httpx.Client(base_url=secured.daemon.url, verify=secured.context, timeout=120) as page:
        asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        asked["Access-Control-Request-Headers"] = "authorization,content-type"
        leave = page.options("/v1/chat/completions", headers=asked)
        assert (leave.status_code, leave.headers["access-control-allow-origin"]) == (204, PAGE)
        assert leave.headers["access-control-allow-headers"] == "authorization,content-type"
        headers = {"Origin": PAGE, "Authorization": "Bearer first"}
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1, "stream": True}
        answer = page.post("/v1/completions", headers=headers, json=body)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        refused = page.post("/v1/completions", headers={"Origin": PAGE}, json=body)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
        for other in ("https://evil.example", "http://localhost:3000"):
            leave = page.options("/v1/chat/completions", headers={**asked, "Origin": other})
            assert leave.status_code == 403
            assert "access-control-allow-origin" not in leave.headers


def test_appliance_run_asks_it_with_the_key_and_the_very_certificate(
    secured: Secured, tmp_path: Path
) -> None:
    port = secured.daemon.url.rsplit(":", 1)[1]
    asked = ("run", "--temperature", "0", MODEL, QUESTION)
    ended = secured.appliance(*asked, port=port)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (
        0,
        "The capital of France is Paris.\n",
        1,
    )
    assert "max_context_len_to_capture" in ended.stderr.lower()
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("127.0.0.1").cert_chain_pems[0].write_to_path(other)
    ended = secured.appliance(*asked, "--url", secured.daemon.url, port=port, ssl_certfile=other)
    assert (ended.returncode, ended.stdout) == (1, "")


def test_appliance_run_starts_a_daemon_of_its_own_whatever_is_configured(
    secured: Secured, unused_port: int
) -> None:
    ended = secured.appliance("run", "--temperature", "0", MODEL, QUESTION, port=unused_port, api_key="")
    assert (ended.returncode, ended.stdout) == (0, "The capital of France is Paris.\n")


def test_what_is_not_as_was_asked_for_is_said_once_at_start(secured: Secured) -> None:
    log = secured.daemon.log
    wanted = (
        "WARNING: swap_space asks for 2 GiB",
        "WARNING: quantization asks for awq, but the tensors are GGUF Q",
        "WARNING: APPLIANCE_MAX_CONTEXT_LEN_TO_CAPTURE in the environment has no effect",
    )
    assert [len(re.findall(re.escape(sentence), log)) for sentence in wanted] == [1, 1, 1]
    assert "first,second" not in log


def test_a_body_over_the_limit_is_refused(secured: Secured) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        secured.openai("first").completions.create(model=MODEL, prompt="x" * 4096)
    assert (error.value.status_code, error.value.code) == (413, "request_too_large")
    assert "4096 bytes (max_body_bytes)" in error.value.message


def test_blocks_are_of_the_size_and_type_that_were_set(secured: Secured) -> None:
    headers = {"Authorization": "Bearer first"}
    metrics = httpx.get(f"{secured.daemon.url}/metrics", headers=headers, verify=secured.context).text
    blocks = re.findall(r'^appliance_kv_blocks\{.*?state="\w+".*?\} ([\d.]+)$', metrics, re.MULTILINE)
    # Twice the tokens: twice the size.
    assert sum(map(float, blocks)) == 50
