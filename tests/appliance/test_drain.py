"""SIGTERM: running requests finish or hear why not, nothing new begins, the exit status is 0."""

from __future__ import annotations

import http.client
import json
import signal
import socket
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from live_daemon import MODEL, LiveDaemon, eventually, live_daemon

pytestmark = pytest.mark.starter


def story(daemon: LiveDaemon, **fields: Any) -> Any:
    """A stream that has begun."""
    messages: Any = [{"role": "user", "content": "Tell me a long story."}]
    extra = {"ignore_eos": True}
    api = daemon.openai()
    stream = iter(
        api.chat.completions.create(model=MODEL, messages=messages, stream=True, extra_body=extra, **fields)
    )
    next(stream)
    return stream


def is_refused(daemon: LiveDaemon) -> bool:
    """Whether nobody listens any more."""
    connection = http.client.HTTPConnection(daemon.url.removeprefix("http://"), timeout=5)
    try:
        connection.connect()
    # Reset is who was in the queue when the listener closed.
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    finally:
        connection.close()
    return False


def test_running_requests_finish_and_no_new_ones_begin(starter_models_dir: Path, tmp_path: Path) -> None:
    with live_daemon(starter_models_dir, tmp_path) as daemon:
        worker = daemon.worker()
        kept_alive = http.client.HTTPConnection(daemon.url.removeprefix("http://"), timeout=30)
        kept_alive.request("GET", "/ready")
        assert kept_alive.getresponse().read() == b'{"status":"ready"}'
        stream = story(daemon, max_tokens=48)

        daemon.process.send_signal(signal.SIGTERM)

        assert eventually(lambda: is_refused(daemon), 5.0)
        kept_alive.request("GET", "/ready")
        answer = kept_alive.getresponse()
        assert (answer.status, b"shutting down" in answer.read()) == (503, True)
        kept_alive.request("POST", "/v1/completions", json.dumps({"model": MODEL, "prompt": "Hi"}))
        answer = kept_alive.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "shutting_down")
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert daemon.process.wait(10) == 0
        assert not psutil.pid_exists(worker.pid)


@pytest.mark.parametrize(("drain_timeout", "signals"), [(0.2, 1), (60, 2)])
def test_what_does_not_finish_hears_why(
    starter_models_dir: Path, tmp_path: Path, drain_timeout: float, signals: int
) -> None:
    with live_daemon(starter_models_dir, tmp_path, drain_timeout=drain_timeout) as daemon:
        worker = daemon.worker()
        stream = story(daemon)
        for number in range(signals):
            daemon.process.send_signal((signal.SIGTERM, signal.SIGINT)[number])
            assert eventually(lambda: is_refused(daemon), 5.0)
        with pytest.raises(openai.APIError) as raised:
            list(stream)
        assert raised.value.code == "shutting_down"
        assert daemon.process.wait(10) == 0
        assert not psutil.pid_exists(worker.pid)


def test_a_body_that_never_comes_holds_up_nothing(starter_models_dir: Path, tmp_path: Path) -> None:
    with live_daemon(starter_models_dir, tmp_path, drain_timeout=60) as daemon:
        host, port = daemon.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
            connection.sendall(head + b'{"model": ')
            assert daemon.get("/ready").status_code == 200
            daemon.process.send_signal(signal.SIGTERM)
            with connection.makefile("rb") as answer:
                assert answer.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
                assert b'"code":"shutting_down"' in answer.read()
        assert daemon.process.wait(10) == 0
        assert "Traceback" not in daemon.log


def test_a_signal_while_the_model_loads_ends_cleanly(starter_models_dir: Path, tmp_path: Path) -> None:
    daemon = LiveDaemon(starter_models_dir, tmp_path)
    try:
        children = psutil.Process(daemon.process.pid).children
        assert eventually(lambda: bool(children()), 30.0)
        worker = children()[0]
        assert daemon.stop() == 0
        assert not psutil.pid_exists(worker.pid)
        assert "is ready" not in daemon.greeting
    finally:
        daemon.end()
