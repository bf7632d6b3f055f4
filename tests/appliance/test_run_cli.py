"""`appliance run` as a shell user meets it."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_daemon import FREED_WITHIN_S, MODEL, PRECISION, LiveDaemon, command, environment, eventually

from appliance.llm import LLM, SamplingParams

pytestmark = pytest.mark.starter

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris.\n"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(models_dir: Path, home: Path, *arguments: str, piped: str = "", **settings: Any) -> Any:
    return subprocess.run(
        command("run", "--temperature", "0", *arguments),
        cwd=home,
        env=environment(models_dir, home, **{"activation_precision": PRECISION, **settings}),
        input=piped,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_question_is_answered_by_the_running_daemon(
    daemon: LiveDaemon, starter_models_dir: Path, tmp_path: Path
) -> None:
    port = daemon.url.rsplit(":", 1)[1]
    ended = run(starter_models_dir, tmp_path, MODEL, QUESTION, port=port)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, ANSWER, "")


def test_what_is_piped_in_is_the_question(
    daemon: LiveDaemon, starter_models_dir: Path, tmp_path: Path
) -> None:
    ended = run(starter_models_dir, tmp_path, "--url", daemon.url, piped=f"{QUESTION}\n")
    assert (ended.returncode, ended.stdout) == (0, ANSWER)


def test_a_model_that_was_not_taught_to_chat_goes_on_with_the_text(
    starter_models_dir: Path, golden: Path, tmp_path: Path
) -> None:
    path = golden / "gguf_q4_0" / "mini-q4_0.gguf"
    ended = run(starter_models_dir, tmp_path, str(path), "the one", port=free_port())
    assert (ended.returncode, ended.stderr.count("goes on with the text")) == (0, 1)
    llm = LLM(model=str(path), activation_precision=PRECISION)
    expected = llm.generate("the one", SamplingParams(temperature=0, max_tokens=128))
    assert ended.stdout == expected[0].outputs[0].text + "\n"


def test_errors_go_to_stderr_and_set_the_status(
    daemon: LiveDaemon, starter_models_dir: Path, tmp_path: Path
) -> None:
    other = run(starter_models_dir, tmp_path, "llama:8b", "Hi", "--url", daemon.url)
    assert (other.returncode, other.stdout) == (1, "")
    assert other.stderr == f"error: the daemon at {daemon.url} serves {MODEL}, not llama:8b\n"
    nobody = f"http://127.0.0.1:{free_port()}"
    nothing = run(starter_models_dir, tmp_path, MODEL, "Hi", "--url", nobody)
    assert (nothing.returncode, nothing.stderr) == (1, f"error: nothing answers at {nobody}\n")
    long = run(starter_models_dir, tmp_path, "--url", daemon.url, piped="word " * 600)
    assert long.returncode == 1
    assert "a context of 512 tokens" in long.stderr
    assert run(starter_models_dir, tmp_path, "--url", daemon.url).returncode == 2


def test_a_question_without_a_model_is_told_from_one(starter_models_dir: Path, tmp_path: Path) -> None:
    ended = run(starter_models_dir, tmp_path, "What is a prime?")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: 'What is a prime?' is not a model name")
    assert ended.stderr.endswith("; to ask something, write `appliance run MODEL QUESTION`\n")


def test_without_a_daemon_it_starts_one_and_ends_it(starter_models_dir: Path, tmp_path: Path) -> None:
    before = set(psutil.pids())
    ended = run(starter_models_dir, tmp_path, MODEL, QUESTION, port=free_port())
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, ANSWER, "")
    left = [process for process in psutil.process_iter(["pid", "cmdline"]) if process.pid not in before]
    assert not [p for p in left if "appliance" in " ".join(p.info["cmdline"] or ())]


class Terminal:
    """A person at a terminal."""

    def __init__(self, arguments: list[str], environ: dict[str, str], home: Path, kind: str = "dumb") -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            arguments,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=home,
            env={**environ, "TERM": kind},
            start_new_session=True,
            preexec_fn=lambda: os.set_blocking(0, True),
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, within_s: float = 60.0) -> None:
        """Read on until `text` has been seen; what was seen before no longer counts."""
        deadline = time.monotonic() + within_s
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"no {text!r} in {self.seen!r}"
            if select.select([self._master], [], [], left)[0]:
                self.seen += os.read(self._master, 4096).decode(errors="replace")
        self.seen = self.seen.split(text, 1)[1]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_a_conversation(daemon: LiveDaemon, starter_models_dir: Path, tmp_path: Path) -> None:
    arguments = command("run", "--temperature", "0", "--url", daemon.url)
    environ = environment(starter_models_dir, tmp_path, activation_precision=PRECISION)
    terminal = Terminal(arguments, environ, tmp_path)
    try:
        terminal.wait_for(">>> ")
        terminal.type(f"{QUESTION}\n")
        terminal.wait_for("Paris.")
        terminal.wait_for(">>> ")
        before = daemon.metric("appliance_prompt_tokens_total")
        terminal.type("And of Italy?\n")
        terminal.wait_for(">>> ")
        # The second prompt holds the first question and its answer too.
        assert daemon.metric("appliance_prompt_tokens_total") - before > 50
        terminal.type("/clear\n")
        terminal.wait_for(">>> ")
        terminal.type("Write a poem of one hundred lines.\n")
        assert eventually(lambda: daemon.metric("appliance_requests_running") == 1, 10.0)
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.wait_for(">>> ")
        assert eventually(daemon.is_idle, FREED_WITHIN_S)
        terminal.type("/bye\n")
        assert terminal.process.wait(10) == 0
    finally:
        terminal.close()
