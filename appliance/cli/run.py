"""`appliance run`: a chat in the terminal, or one answer."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from appliance.cli.console import note
from appliance.settings import LOOPBACK_HOSTS, Settings, load_settings

if TYPE_CHECKING:
    from appliance.cli.chat import ChatClient, Message

    Ask = Callable[[list[Message]], Generator[str, None, None]]

INTERRUPTED = 130
READER_GONE = 141
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="A model's name, or a path to one.")]
Question = Annotated[str | None, typer.Argument(metavar="QUESTION", help="Answer this and exit.")]
Url = Annotated[str | None, typer.Option("--url", help="The daemon to ask, if not the configured one.")]
System = Annotated[str | None, typer.Option("--system", help="How the model shall behave.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 is the likeliest answer.")]
HELP = "Ctrl-C ends an answer, /clear forgets what was said, /bye or Ctrl-D leaves."


def run(
    model: Model = None,
    question: Question = None,
    url: Url = None,
    system: System = None,
    temperature: Temperature = None,
) -> None:
    """Chat with a model. Asks the running daemon, or starts one for as long as this lasts.

    What is piped in is the question, or is appended to it.
    """
    _check_name(model, question)
    settings = load_settings({"model": model})
    prompt = _prompt(question)
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    try:
        with _connected(settings, model, url) as (client, name):
            ask = partial(client.answer, name, temperature)
            if prompt is None:
                note(f"{name}. {HELP}")
                _converse(ask, history)
            else:
                _print_answer(ask([*history, {"role": "user", "content": prompt}]))
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read our output has enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(READER_GONE) from None


def _check_name(model: str | None, question: str | None) -> None:
    """Whoever leaves out the model has their question taken for one."""
    from appliance.model_files import looks_like_path
    from appliance.names import ModelName, ModelNameError

    if model is None or question is not None or looks_like_path(model):
        return
    try:
        ModelName.parse(model)
    except ModelNameError as error:
        raise ModelNameError(f"{error}; to ask something, write `appliance run MODEL QUESTION`") from None


def _prompt(question: str | None) -> str | None:
    """The question with what was piped in, or None for a conversation."""
    if sys.stdin.isatty():
        return question
    piped = sys.stdin.read().strip()
    if not piped and not question:
        raise typer.BadParameter("nothing was piped in and no question given")
    return "\n\n".join(part for part in (question, piped) if part)


@contextlib.contextmanager
def _connected(settings: Settings, model: str | None, url: str | None) -> Iterator[tuple[ChatClient, str]]:
    """A client and the name of the model to ask for."""
    # Here, because `appliance list` should not wait for an HTTP client.
    from appliance.cli.chat import ChatClient, ChatError
    from appliance.cli.own_daemon import own_daemon
    from appliance.pull.ensure import ensure_model

    key = next(iter(settings.api_key), None)
    with ChatClient(url or settings.url(), key, _own_certificate(settings, url)) as client:
        served = _served(client, must_answer=url is not None)
        wanted = _canonical(settings, model) if model else None
        if served and (wanted is None or wanted in served):
            yield client, wanted or served[0]
            return
        if served and url:
            raise ChatError(f"the daemon at {client.base_url} serves {', '.join(served)}, not {wanted}")
        if served:
            note(f"the daemon at {client.base_url} serves {', '.join(served)}; starting one for {wanted}")
    name = ensure_model(settings).name
    if sys.stderr.isatty():
        note(f"loading {name}")
    with own_daemon(settings) as own:
        yield own, settings.served_model_name or name


def _own_certificate(settings: Settings, url: str | None) -> Path | None:
    """The configured certificate, where it is our own daemon that is asked."""
    ours = url is None or urlsplit(url).hostname in (*LOOPBACK_HOSTS, settings.host)
    return settings.ssl_certfile if ours else None


def _served(client: ChatClient, must_answer: bool) -> list[str]:
    from appliance.cli.chat import ChatError

    try:
        served = client.models()
    except ChatError as error:
        if must_answer:
            raise
        note(f"{error}; starting a daemon of our own")
        return []
    if served is None and must_answer:
        raise ChatError(f"nothing answers at {client.base_url}")
    return served or []


def _canonical(settings: Settings, model: str) -> str:
    """The name under which a daemon would serve `model`; as given where it is not known here."""
    from appliance.names import ModelError
    from appliance.store import Store

    try:
        return Store(settings.download_dir).resolve(model).name
    except ModelError:
        return model


def _print_answer(pieces: Iterator[str]) -> None:
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def _converse(ask: Ask, history: list[Message]) -> None:
    from appliance.cli.chat import ChatError

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a line editor
    start = list(history)
    while True:
        line = _read_line()
        if line is None or line == "/bye":
            return
        if line == "/clear":
            history[:] = start
        elif line.startswith("/"):
            note(HELP)
        elif line:
            history.append({"role": "user", "content": line})
            try:
                history.append({"role": "assistant", "content": _answer(ask(history))})
            except ChatError as error:
                history.pop()
                note(f"error: {error}")


def _read_line() -> str | None:
    """A line of the user's, "" where Ctrl-C threw it away, None where there are no more."""
    try:
        return input(">>> ").strip()
    except EOFError:
        sys.stdout.write("\n")
        return None
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return ""


def _answer(pieces: Generator[str, None, None]) -> str:
    """Print an answer as it comes; Ctrl-C ends it where it is, and what was said counts."""
    said = ""
    try:
        for piece in pieces:
            said += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    finally:
        pieces.close()
        sys.stdout.write("\n")
    return said
