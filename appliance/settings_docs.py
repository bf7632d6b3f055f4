"""The documentation of the settings, made from the schema.

`python -m appliance.settings_docs` writes `docs/configuration.md` and `docs/config.toml`.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from appliance.settings_facts import facts, values
from appliance.settings_schema import SECTIONS, Settings
from appliance.settings_vllm import FOREIGN, RENAMED

WIDTH = 110

_HEAD = """\
# Settings

<!-- Made from the schema by `python -m appliance.settings_docs`: change it there. -->

One name everywhere: `max_num_seqs` in `config.toml`, `APPLIANCE_MAX_NUM_SEQS` in the environment,
`--max-num-seqs` on the command line, `LLM(max_num_seqs=…)` in Python. Defaults give way to the file, the file to
the environment, the environment to flags. A name that is not known is an error that names the nearest one; so is
any unknown variable that begins with `APPLIANCE_`.

The file is `config.toml` in `config_dir`; [config.toml](config.toml) is one with every setting, and
`appliance config --sample` prints it. `appliance config` prints each value and where it was set (keys are masked),
with `--json` for programs. A list is written `a,b` or `["a", "b"]` in the environment; an empty value takes back
one that the file has set.
"""

_GPU = """\
## GPU

With `backend` and `device` at auto, a start looks for an NVIDIA GPU, compiles a first kernel and runs it. Where there
is a GPU that cannot be used, one line says why and what to do, and the CPU computes. With `backend = "gpu"` or a GPU
in `device`, that line is why the start is refused.

A GPU needs compute capability 8.0 (Ampere) or later, torch built for CUDA and a driver for that CUDA, Triton (which
such a torch brings), a C compiler and Python's headers (`apt install gcc python3-dev`). What Triton compiles is kept
in `~/.triton/cache`, or where TRITON_CACHE_DIR says.

KV memory is planned from what is free on the GPU. Other programs that hold more than a tenth of it are named at
start, and all of them where the KV memory does not fit.

Without a GPU, `TRITON_INTERPRET=1` and `backend = "gpu"` run the same kernels on the CPU, in float16 and far too
slowly for use.
"""

_SAFETY = """\
## Safety

**Keys.** `api_key` holds one or several. Better, `appliance key new NAME` makes a key, prints it once and keeps its
SHA-256 in `api_keys_file`; `appliance key list` names them, `appliance key revoke NAME` ends one. A daemon that is
running follows the file: no restart. Once there is a key, or a file for keys, every request needs one but
`/health` and `/ready`, `/metrics` included. Keys are compared by their hashes, all of them each time, so the time
that a refusal takes says nothing about them. A file that is damaged while the daemon runs lets none of its keys in.

**Addresses.** The daemon listens on 127.0.0.1. Where other machines can reach `host`, it starts only with a key.

**HTTPS.** With `ssl_certfile` and `ssl_keyfile`. They are read at start; a new certificate needs a restart.

**Names.** Only requests to a known name are answered (`allowed_hosts`), so that no web page can point a name of its
own at your daemon.

**Web pages.** A page may read answers (CORS) if its origin is in `allowed_origins`, written as scheme, name and
port. Pages on loopback are no exception: whoever runs a chat page at http://localhost:3000 that asks the daemon
from the browser lists it. `*` allows all pages, and needs a key, since any page could use the daemon otherwise.
Preflights are answered without a key, as browsers send none. A request of a page that is not listed is refused
before it reaches a route, unless the page is of one of the daemon's own names: then it is answered, but the browser
keeps the answer from the page.
"""


def reference() -> str:
    """`docs/configuration.md`."""
    parts = [_HEAD]
    for section in SECTIONS:
        parts.append(f"## {_title(section)}\n\n{section.__doc__}\n\n{_table(section)}")
    parts += [_GPU, _SAFETY, _foreign()]
    return "\n".join(parts)


def sample() -> str:
    """`docs/config.toml`: every setting, commented out at its default."""
    lines = [
        "# Settings of appliance; copy to ~/.config/appliance/config.toml and uncomment what you change."
    ]
    for section in SECTIONS:
        lines += ["", f"## {_title(section)}: {section.__doc__}"]
        for name in _names(section):
            if name == "config_dir":
                continue
            lines.append("")
            lines += textwrap.wrap(_prose(name), WIDTH, initial_indent="# ", subsequent_indent="# ")
            lines.append(f"#{name} = {_example(name)}")
    return "\n".join(lines) + "\n"


def toml(value: Any) -> str:
    """A setting's value as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, Path)):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, tuple):
        return f"[{', '.join(toml(item) for item in value)}]"
    return str(value)


def _title(section: type[BaseModel]) -> str:
    return section.__name__.removesuffix("Settings")


def _names(section: type[BaseModel]) -> list[str]:
    return [name for name in Settings.model_fields if name in section.model_fields]


def _table(section: type[BaseModel]) -> str:
    rows = ["| setting | values | default | what |", "|-|-|-|-|"]
    for name in _names(section):
        cells = (f"`{name}`", values(name), _default(name), Settings.model_fields[name].description)
        rows.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(rows) + "\n"


def _default(name: str) -> str:
    default = Settings.model_fields[name].default
    if default in (None, ()):
        return str(facts(name)["absent"])
    return f"`{facts(name)['shown'] or toml(default)}`"


def _prose(name: str) -> str:
    what = f"{Settings.model_fields[name].description} Values: {values(name)}."
    absent = facts(name)["absent"]
    return f"{what} Without it: {absent}." if absent else what


def _example(name: str) -> str:
    default = Settings.model_fields[name].default
    return toml(facts(name)["example"] if default is None else facts(name)["shown"] or default)


def _foreign() -> str:
    renamed = [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    others = []
    for name, foreign in FOREIGN.items():
        verdict = "no effect" if foreign.harmless is None else "refused"
        if foreign.harmless:
            verdict = f"refused unless {' or '.join(foreign.harmless[:1])}"
        others.append(f"| `{name}` | {verdict} | {foreign.advice} |")
    return "\n".join(
        (
            "## Coming from vLLM",
            "",
            "The names above are vLLM's where it has them. Other spellings are taken, with a note on stderr:",
            "",
            "| written | taken as |",
            "|-|-|",
            *renamed,
            "",
            "What there is no such thing of here is dropped with a note where it changes nothing, and refused where it",
            "asks for something:",
            "",
            "| setting | here | why, and what instead |",
            "|-|-|-|",
            *others,
            "",
        )
    )


def main(folder: Path) -> None:
    (folder / "configuration.md").write_text(reference(), encoding="utf-8")
    (folder / "config.toml").write_text(sample(), encoding="utf-8")


if __name__ == "__main__":
    main(Path("docs"))
