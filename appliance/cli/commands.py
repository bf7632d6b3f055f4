"""The commands of `appliance`. Whatever is heavy is imported by the command that needs it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from appliance import __version__
from appliance.api_keys import KeyFileError
from appliance.cli import keys, models, show
from appliance.cli.bench import bench
from appliance.cli.config import config
from appliance.cli.console import say
from appliance.cli.run import run
from appliance.cli.serve import serve
from appliance.engine.errors import EngineError
from appliance.names import ModelError
from appliance.quant.errors import CheckpointError
from appliance.settings import SettingsError

EXPECTED_ERRORS = (ModelError, SettingsError, KeyFileError, EngineError, CheckpointError, OSError)

app = typer.Typer(
    name="appliance",
    help="Serve quantised language models from this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command("version")
def show_version() -> None:
    """Show the versions that a bug report needs, and which models can be run."""
    from appliance.kernels.native import describe
    from appliance.quant.capabilities import CAPABILITIES

    try:
        torch = version("torch")  # from its metadata: importing it takes seconds
    except PackageNotFoundError:
        torch = "not installed"
    say(f"appliance {__version__}")
    say(f"python {platform.python_version()}")
    say(f"torch {torch}")
    say(describe())
    say(f"architectures: {', '.join(CAPABILITIES.architectures)}")
    say(f"architectures in GGUF: {', '.join(CAPABILITIES.gguf_architectures)}")
    say(f"quantised by: {', '.join(CAPABILITIES.methods)}; GGUF types {', '.join(CAPABILITIES.tensor_types)}")


app.command("serve")(serve)
app.command("run")(run)
app.command("bench")(bench)
app.command("pull")(models.pull)
app.command("list")(models.list_models)
app.command("show")(show.show)
app.command("rm")(models.rm)
app.command("config")(config)
app.add_typer(keys.app, name="key")
