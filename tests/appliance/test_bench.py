"""`appliance bench` against a real daemon, and the arithmetic of its figures."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_daemon import LiveDaemon, command, environment, eventually
from random_model import write_model
from test_run_cli import free_port

from appliance.bench.client import Answer, BenchError, _read
from appliance.bench.measure import decode_speed, percentile, steady_speed

SIZES = ("--rounds", "2", "--output-tokens", "12", "--prefill-tokens", "64", "--prefix-tokens", "128")


class RandomDaemon(LiveDaemon):
    """Serves a small model of random weights and wants a key."""

    def __init__(self, models_dir: Path, home: Path, **settings: Any) -> None:
        self.model = str(write_model(home / "random", hidden=64, layers=2))
        super().__init__(models_dir, home, api_key="secret", **settings)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    home = tmp_path_factory.mktemp("bench")
    daemon = RandomDaemon(home / "models", home)
    try:
        daemon.wait_until_ready()
        yield daemon
    finally:
        daemon.end()


def arguments(daemon: LiveDaemon, *more: str) -> list[str]:
    return command("bench", "--url", daemon.url, "--api-key", "secret", *SIZES, *more)


def bench(home: Path, *line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line, cwd=home, env=environment(home, home), capture_output=True, text=True, timeout=120
    )


def test_figures_agree_with_each_other(served: LiveDaemon, tmp_path: Path) -> None:
    ended = bench(tmp_path, *arguments(served, "--streams", "1,3", "--json", "--csv", "out.csv"))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["tokens_counted_by"], found["notes"]) == ("usage", [])
    figures = found["figures"]
    assert [(figure["name"], figure["streams"], figure["output_tokens"]) for figure in figures] == [
        ("decode", 1, 24),
        ("prefill", 1, 2),
        ("streams", 1, 24),
        ("streams", 3, 72),
        ("prefix unseen", 1, 2),
        ("prefix seen", 1, 2),
    ]
    for figure in figures:
        assert 0 < figure["ttft_p50_s"] <= figure["ttft_p95_s"] <= figure["ttft_p99_s"] < figure["seconds"]
        assert figure["client_cpu_s"] > 0
        assert figure["tokens_per_s"] > 0
    for figure in (figures[0], figures[2], figures[3]):
        assert 0 <= figure["itl_p50_s"] <= figure["itl_p95_s"] <= figure["itl_p99_s"]
    # Prompts of our words are as long as asked for, whatever the vocabulary makes of a word.
    assert 48 <= figures[1]["prompt_tokens"] <= 80
    assert abs(figures[4]["prompt_tokens"] - 144) < 30
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["tokens_per_s"]) for row in rows] == [figure["tokens_per_s"] for figure in figures]


def test_errors_are_one_line(served: LiveDaemon, tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    refused = [
        (command("bench", "--url", nobody), f"error: nothing answers at {nobody}"),
        (command("bench", "--url", served.url), f"error: {served.url} refuses the key"),
        (arguments(served, "--model", "other"), f"error: {served.url} serves "),
    ]
    for line, message in refused:
        ended = bench(tmp_path, *line)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr.startswith(message)
        assert ended.stderr.count("\n") == 1
    assert bench(tmp_path, *arguments(served, "--streams", "1,none")).returncode == 2


def test_an_interrupted_run_keeps_what_it_has(served: LiveDaemon, tmp_path: Path) -> None:
    line = [*arguments(served), "--streams", ",".join(["1"] * 500), "--json"]
    said = tmp_path / "said"
    with said.open("w") as stderr:
        child = subprocess.Popen(
            line, env=environment(tmp_path, tmp_path), stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    assert eventually(lambda: "streams" in said.read_text(), 30.0)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 130
    assert [figure["name"] for figure in json.loads(out)["figures"]][:2] == ["decode", "prefill"]
    assert "Traceback" not in said.read_text()


def test_speeds_of_known_times() -> None:
    slow = Answer(0.0, (1.0, 2.0, 3.0, 4.0), output_tokens=4, prompt_tokens=8)
    # Two tokens a frame, begun later and ended sooner.
    fast = Answer(0.0, (2.0, 2.5, 3.0, 3.5), output_tokens=8, prompt_tokens=8)
    assert (decode_speed(slow), decode_speed(fast)) == (1.0, 4.0)
    # From 2.0 to 3.5: one frame of the slow one, three of two tokens of the fast one.
    assert steady_speed([slow, fast]) == pytest.approx(7 / 1.5)
    assert steady_speed([slow, Answer(4.0, (5.0, 6.0), 2, None)]) is None
    assert [percentile(range(1, 201), p) for p in (50, 95, 99)] == [100, 190, 198]
    assert percentile([3.0], 99) == 3.0


def test_frames_without_text_are_no_tokens() -> None:
    frames = [
        (1.0, b": ping"),
        (2.0, b'data: {"choices": [{"text": ""}]}'),
        (3.0, b'data: {"choices": [{"text": "a"}]}'),
        (4.0, b'data: {"choices": [{"text": "b"}]}'),
    ]
    counted = b'data: {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 7}}'
    assert _read(0.0, frames) == Answer(0.0, (3.0, 4.0), 2, None)
    assert _read(0.0, [*frames, (5.0, counted), (5.0, b"data: [DONE]")]) == Answer(0.0, (3.0, 4.0), 3, 7)
    with pytest.raises(BenchError, match="full"):
        _read(0.0, [(1.0, b'data: {"error": {"message": "full"}}')])
