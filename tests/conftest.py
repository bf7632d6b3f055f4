"""Fixtures that every layer's tests share."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

STARTER = "smollm2:135m"


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def golden(repo_root: Path) -> Path:
    return repo_root / "tests" / "golden"


@pytest.fixture(scope="session")
def starter_models_dir(repo_root: Path) -> Path:
    """A models' folder that has the starter in it, pulled for real where it is not there yet."""
    from appliance.catalogue import load_catalogue
    from appliance.pull.orchestrate import pull
    from appliance.pull.transfer import SilentProgress
    from appliance.store import Store

    models_dir = repo_root / ".cache" / "models"
    models_dir.mkdir(parents=True, exist_ok=True)
    # Several test runs may share the checkout; a second one waits here instead of being refused.
    with (models_dir.parent / "starter.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pull(STARTER, Store(models_dir), load_catalogue(models_dir / "no-config"), SilentProgress())
    return models_dir


@pytest.fixture(scope="session")
def starter_model(starter_models_dir: Path) -> Path:
    """The path of the starter's GGUF file. Tests that use it carry the mark `starter`."""
    from appliance.store import Store

    return Store(starter_models_dir).get(STARTER).path
