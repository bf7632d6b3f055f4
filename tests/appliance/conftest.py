"""Fixtures for the tests of the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from live_daemon import LiveDaemon, live_daemon


@pytest.fixture(scope="session")
def daemon(starter_models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    """One daemon for all tests that leave it as they found it."""
    with live_daemon(starter_models_dir, tmp_path_factory.mktemp("daemon")) as running:
        yield running


@pytest.fixture(scope="session")
def api(daemon: LiveDaemon) -> openai.OpenAI:
    """The real client, which doesn't retry, so that a test sees the first answer."""
    return daemon.openai()
