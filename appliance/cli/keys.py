"""`appliance key new | list | revoke`: the API keys that clients of the daemon use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.api_keys import KeyFile
from appliance.cli.console import note, say
from appliance.settings import load_settings

SHOWN_DIGITS = 12

app = typer.Typer(
    help="Make, list and revoke the API keys of clients.", no_args_is_help=True, rich_markup_mode=None
)
KeysFile = Annotated[
    Path | None, typer.Option("--api-keys-file", help="The file of hashes, if not the configured one.")
]


@app.command()
def new(
    name: Annotated[str | None, typer.Argument(help="What to call the key, e.g. who uses it.")] = None,
    api_keys_file: KeysFile = None,
) -> None:
    """Make a key and print it, this once; only its hash is kept. From the first key on, every client needs one."""
    file = _file(api_keys_file)
    chosen, key = file.new(name)
    say(key)
    note(
        f"this is {chosen}, shown only now; its hash is in {file.path}, `appliance key revoke {chosen}` ends it"
    )


@app.command("list")
def list_keys(api_keys_file: KeysFile = None) -> None:
    """List the names of the keys, with the beginning of each hash."""
    file = _file(api_keys_file)
    entries = file.entries()
    width = max(map(len, entries), default=0)
    for name, value in entries.items():
        say(f"{name.ljust(width)}  sha256 {value[:SHOWN_DIGITS]}…")
    if not entries:
        note(f"there is no key in {file.path}; `appliance key new` makes one")


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The key's name.")], api_keys_file: KeysFile = None
) -> None:
    """End a key. A daemon that is running refuses it from the next request on."""
    _file(api_keys_file).revoke(name)
    say(f"{name} is revoked")


def _file(path: Path | None) -> KeyFile:
    return KeyFile(load_settings({"api_keys_file": path}).keys_file)
