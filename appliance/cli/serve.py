"""`appliance serve`: the daemon in the foreground."""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from appliance.cli.console import note, say
from appliance.settings import Settings, load_settings

if TYPE_CHECKING:
    from appliance.daemon.state import ServedModel

HELP = {
    "served_model_name": "What clients call the model; its own name if not given.",
    "host": "Address to listen on; one that other machines can reach needs an API key.",
    "port": "Port to listen on; 0 takes a free one.",
    "api_key": "Key that clients must send; better set as APPLIANCE_API_KEY, which `ps` doesn't show.",
    "allowed_hosts": "A further name under which clients may reach the daemon; may be repeated.",
    "max_model_len": "Longest context to serve, in tokens; the model's own if not given.",
    "max_num_seqs": "Most requests in one step.",
    "max_num_batched_tokens": "Most tokens computed in one step.",
    "block_size": "Tokens in a block of KV memory.",
    "enable_prefix_caching": "Reuse the KV memory of prompts that begin alike.",
    "kv_cache_memory_bytes": "Size of the KV memory; planned from free memory if not given.",
    "num_threads": "CPU threads of a step; all cores if not given.",
    "request_timeout": "Seconds after which a request is ended with an error.",
    "drain_timeout": "Seconds that running requests get to finish when the daemon is told to stop.",
    "max_body_bytes": "Largest request body.",
    "download_dir": "Folder that holds the models.",
    "config_dir": "Folder that holds config.toml and models.toml.",
}


def serve(**flags: Any) -> None:
    """Serve a model over HTTP until Ctrl-C; a model of the catalogue is pulled if need be."""
    settings = load_settings(_given(flags))
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stderr)
    # Here, because `appliance list` should not wait for a web framework.
    from appliance.daemon import lifecycle, listener
    from appliance.daemon.worker import WorkerUnavailableError
    from appliance.pull.ensure import ensure_model

    socket_ = listener.bind(settings)
    model = ensure_model(settings)
    name = settings.served_model_name or model.name
    base_url = _base_url(settings.host, socket_)
    note(f"loading {name} from {model.path}")

    def announce(served: ServedModel) -> None:
        say(_greeting(served, base_url))
        sys.stdout.flush()

    try:
        asyncio.run(lifecycle.serve(settings, name, model, socket_, announce))
    except WorkerUnavailableError as error:
        note(f"error: {name} could not be loaded: {error}")
        raise typer.Exit(1) from None
    note("stopped")


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """An option that may be repeated and was not given is an empty list, not None."""
    return {name: value for name, value in flags.items() if value is not None and value != []}


def _base_url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _greeting(served: ServedModel, base_url: str) -> str:
    info = served.info
    native = f"native {info.native_isa}" if info.native_isa else "without the native library"
    question = f'{{"model": "{served.name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return "\n".join(
        (
            f"{served.name} is ready: context {info.max_model_len:,}, backend {info.backend}, {native}",
            "",
            f"  curl {base_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{question}'",
            f"  appliance run --url {base_url}",
            f'  OpenAI(base_url="{base_url}/v1", api_key="none")',
            "",
            "Ctrl-C stops it.",
        )
    )


def _signature() -> inspect.Signature:
    """One option per setting, so that no flag can be missing or differ from the setting's name."""
    argument = typer.Argument(metavar="MODEL", help="A model's name, or a .gguf file.")
    parameters = [_parameter("model", Annotated[str | None, argument])]
    for name, field in Settings.model_fields.items():
        if name != "model":
            parameters.append(_parameter(name, Annotated[_option_type(field), _option(name, field)]))
    return inspect.Signature(parameters)


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(name: str, field: FieldInfo) -> Any:
    flag = name.replace("_", "-")
    names = f"--{flag}/--no-{flag}" if field.annotation is bool else f"--{flag}"
    default = "" if field.default in (None, ()) else f" [default: {field.default}]"
    return typer.Option(names, help=HELP[name] + default, show_default=False)


def _option_type(field: FieldInfo) -> Any:
    if get_origin(field.annotation) is tuple:
        return list[str] | None
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    assert kinds[0] in (str, int, float, bool, Path), f"no option is known for {field.annotation}"
    return kinds[0] | None


serve.__signature__ = _signature()  # type: ignore[attr-defined]
