"""nginx.conf, run for real in front of daemons."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live_daemon import MODEL, Impatient, LiveDaemon, eventually, live_daemon
from programs import DEPLOY, free_port, program, replaced, responds, running

pytestmark = pytest.mark.starter

# Two daemons share few cores here.
ONE_THREAD = {"num_threads": 1}

# What nginx.conf is included from on a real machine. Not as a daemon, and with all of its files in its prefix.
MAIN = """
daemon off;
pid nginx.pid;
error_log stderr;
{user}
events {{}}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    include appliance.conf;
}}
"""


@pytest.fixture(scope="module")
def pair(starter_models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LiveDaemon]]:
    """Two daemons that tests leave as they found them."""
    program("nginx")
    homes = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    with (
        live_daemon(starter_models_dir, homes[0], Impatient, **ONE_THREAD) as first,
        live_daemon(starter_models_dir, homes[1], Impatient, **ONE_THREAD) as second,
    ):
        yield [first, second]


@contextmanager
def nginx(home: Path, ports: list[int], **changes: str) -> Iterator[str]:
    """The URL of an nginx with our configuration, in front of two ports; times in it may be changed."""
    port = free_port()
    edits = {"    listen 8080;": f"    listen 127.0.0.1:{port};"}
    edits |= {f"server 127.0.0.1:800{number}": f"server 127.0.0.1:{ports[number]}" for number in range(2)}
    edits |= {f"{name} 610s;": f"{name} {value};" for name, value in changes.items()}
    (home / "appliance.conf").write_text(replaced((DEPLOY / "nginx.conf").read_text(), edits))
    # Started as root, the workers would become somebody who may not enter our folder.
    (home / "nginx.conf").write_text(MAIN.format(user="user root;" if os.geteuid() == 0 else ""))
    command = [program("nginx"), "-p", str(home), "-c", "nginx.conf", "-e", "stderr"]
    url = f"http://127.0.0.1:{port}"
    with running(command, home / "log", responds(url)):
        yield url


def port_of(daemon: LiveDaemon) -> int:
    return int(daemon.url.rpartition(":")[2])


@pytest.fixture
def front(pair: list[LiveDaemon], tmp_path: Path) -> Iterator[str]:
    with nginx(tmp_path, [port_of(daemon) for daemon in pair]) as url:
        yield url


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Once upon a time", "ignore_eos": True, **fields}


def streamed(url: str, **fields: Any) -> AbstractContextManager[httpx.Response]:
    return httpx.stream("POST", f"{url}/v1/completions", json=body(stream=True, **fields), timeout=20)


def data(answer: httpx.Response) -> Iterator[str]:
    """The stream's lines without pings."""
    return (line for line in answer.iter_lines() if line.startswith("data: "))


def generated(daemons: list[LiveDaemon]) -> float:
    return sum(daemon.metric("appliance_generated_tokens_total") for daemon in daemons)


@contextmanager
def suspended(daemons: list[LiveDaemon]) -> Iterator[None]:
    """Meanwhile, no worker takes a step."""
    workers = [daemon.worker() for daemon in daemons]
    for worker in workers:
        worker.suspend()
    try:
        yield
    finally:
        for worker in workers:
            worker.resume()


def test_a_token_is_with_the_client_before_the_last_one_is_made(front: str, pair: list[LiveDaemon]) -> None:
    before = generated(pair)
    # All of it would fit into a buffer of nginx.
    with streamed(front, max_tokens=16) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = data(answer)
        assert next(lines).startswith("data: {")
        with suspended(pair):
            assert generated(pair) - before < 16
        *_, last = lines
    assert last == "data: [DONE]"
    assert generated(pair) - before == 16


def test_both_daemons_serve_at_the_same_time(front: str, pair: list[LiveDaemon]) -> None:
    def running_now() -> list[float]:
        return [daemon.metric("appliance_requests_running") for daemon in pair]

    with streamed(front, max_tokens=400), streamed(front, max_tokens=400):
        assert eventually(lambda: running_now() == [1, 1], 5.0), running_now()
    # And a client that leaves nginx leaves the daemon.
    assert eventually(lambda: all(daemon.is_idle() for daemon in pair), 2.0)


def test_who_asks_too_often_is_told_so(front: str) -> None:
    with httpx.Client() as asking:
        statuses = [asking.get(f"{front}/v1/models").status_code for _ in range(40)]
        refused = asking.get(f"{front}/v1/models")
    # Ten at once, and what trickles through at 5 a second while the others are asked.
    assert statuses[:10] == [200] * 10
    assert statuses.count(429) >= 20
    assert set(statuses) == {200, 429}
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    with pytest.raises(openai.RateLimitError) as raised:
        client(front).models.list()
    assert raised.value.code == "rate_limit_exceeded"


def test_only_the_api_is_let_through(front: str) -> None:
    assert httpx.get(f"{front}/health").json() == {"status": "ok"}
    assert httpx.get(f"{front}/metrics").status_code == 404
    # An error of the daemon stays as it is.
    with pytest.raises(openai.NotFoundError) as raised:
        client(front).completions.create(model="unknown", prompt="a")
    assert raised.value.code == "model_not_found"


def test_pings_keep_a_long_silence_alive(pair: list[LiveDaemon], tmp_path: Path) -> None:
    with nginx(tmp_path, [port_of(pair[0])] * 2, proxy_read_timeout="1s") as url, ExitStack() as stack:
        with suspended(pair[:1]):
            answer = stack.enter_context(streamed(url, max_tokens=2))
            lines = (line for line in answer.iter_lines() if line)
            # At two a second, this is longer than nginx would wait.
            assert [next(lines) for _ in range(6)] == [": ping"] * 6
        *_, last = lines
    assert last == "data: [DONE]"


def test_when_one_daemon_dies_the_other_one_serves(
    pair: list[LiveDaemon], starter_models_dir: Path, tmp_path: Path
) -> None:
    home = tmp_path / "victim"
    home.mkdir()
    survivor = pair[1]
    with (
        live_daemon(starter_models_dir, home, **ONE_THREAD) as victim,
        nginx(tmp_path, [port_of(victim), port_of(survivor)]) as url,
    ):
        with streamed(url, max_tokens=400) as answer:
            lines = data(answer)
            assert next(lines).startswith("data: {")
            assert eventually(lambda: victim.metric("appliance_requests_running") == 1, 5.0)
            victim.process.kill()
            # What has begun can't be taken over: the connection is cut, which nobody takes for an end.
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        for _ in range(4):
            done = client(url).completions.create(model=MODEL, prompt="Two and two is", max_tokens=2)
            assert done.usage is not None
            assert done.usage.completion_tokens == 2


def test_without_any_daemon_the_error_is_one_of_the_api(tmp_path: Path) -> None:
    with nginx(tmp_path, [free_port(), free_port()]) as url:
        with pytest.raises(openai.InternalServerError) as raised:
            client(url).models.list()
        assert (raised.value.status_code, raised.value.code) == (503, "model_unavailable")
        assert raised.value.response.headers["retry-after"] == "5"
