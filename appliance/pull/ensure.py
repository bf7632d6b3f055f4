"""The model that was asked for: found on this machine, or pulled first."""

from __future__ import annotations

import sys

from appliance.model_files import looks_like_path
from appliance.pull.progress import PullProgress
from appliance.settings import Settings
from appliance.store import ModelPath, Store, StoreError


def ensure_model(settings: Settings) -> ModelPath:
    """`settings.model`, which may be a path; what only the catalogue has is pulled, with progress on stderr.

    Raises:
        ModelError: there is no such model, or it cannot be fetched.
    """
    store = Store(settings.download_dir)
    try:
        return store.resolve(settings.model)
    except StoreError:
        if looks_like_path(settings.model):
            raise
    # Here, because reading GGUF needs numpy, which a model that is there does not.
    from appliance.catalogue import load_catalogue
    from appliance.pull import orchestrate

    catalogue = load_catalogue(settings.config_dir)
    name = catalogue.find(settings.model).name
    sys.stderr.write(f"{name} is not installed: pulling it\n")
    with PullProgress() as progress:
        return orchestrate.pull(name, store, catalogue, progress).model
