"""Fixtures for the tests of the daemon and of pulling."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from live_daemon import LiveDaemon, live_daemon
from pip_index import Index

from appliance.store import Store


@pytest.fixture(scope="session")
def daemon(starter_models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    """One daemon for all tests that leave it as they found it."""
    with live_daemon(starter_models_dir, tmp_path_factory.mktemp("daemon")) as running:
        yield running


@pytest.fixture(scope="session")
def api(daemon: LiveDaemon) -> openai.OpenAI:
    """The real client, which doesn't retry, so that a test sees the first answer."""
    return daemon.openai()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index of packages; pip sees it and nothing of this machine's settings."""
    for name in list(os.environ):
        if name.startswith("PIP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    served = Index(tmp_path / "index")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", served.url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    yield served
    served.close()


@pytest.fixture
def config_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "config"
    folder.mkdir()
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")
