"""`appliance serve`: the daemon in the foreground."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any

import typer

from appliance.cli.console import note, say
from appliance.cli.options import given, with_settings
from appliance.settings import load_settings

if TYPE_CHECKING:
    from appliance.daemon.state import ServedModel


@with_settings
def serve(**flags: Any) -> None:
    """Serve a model over HTTP until Ctrl-C; a model of the catalogue is pulled if need be."""
    # Until the daemon takes the signals itself; Ctrl-C ends every command with 130 already.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(0))
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stderr)
    settings = load_settings(given(flags))
    _allow_many_connections()
    # Here, because `appliance list` should not wait for a web framework.
    from appliance.daemon import exposure, lifecycle, listener
    from appliance.daemon.worker import WorkerUnavailableError
    from appliance.progress import LoadProgress
    from appliance.pull.ensure import ensure_model

    exposure.check(settings)
    socket_ = listener.bind(settings)
    model = ensure_model(settings)
    name = settings.served_model_name or model.name
    base_url = settings.url(socket_.getsockname()[1])
    note(f"loading {name} from {model.path}")

    def announce(served: ServedModel) -> None:
        say(_greeting(served, base_url))
        sys.stdout.flush()

    try:
        with model.hold(), LoadProgress(name, plain=True) as progress:
            asyncio.run(lifecycle.serve(settings, name, model, socket_, progress.at, announce))
    except WorkerUnavailableError as error:
        note(f"error: {name} could not be loaded: {error}")
        raise typer.Exit(1) from None
    note("stopped")


def _allow_many_connections() -> None:
    """Each takes a file descriptor, of which a process may have as many as its hard limit says if it asks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _greeting(served: ServedModel, base_url: str) -> str:
    info = served.info
    native = f"native {info.native_isa}" if info.native_isa else "without the native library"
    computes = f"backend {info.backend}, {info.gpu or native}"
    question = f'{{"model": "{served.name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return "\n".join(
        (
            f"{served.name} is ready: context {info.max_model_len:,}, {computes}",
            "",
            f"  curl {base_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{question}'",
            f"  appliance run --url {base_url}",
            f'  OpenAI(base_url="{base_url}/v1", api_key="none")',
            "",
            "Ctrl-C stops it.",
        )
    )
