"""A small client of the daemon's own API, for the terminal chat."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from appliance.cli.console import note
from appliance.names import ModelError

# The code of the daemon's refusal to chat.
NO_TEMPLATE = "no_chat_template"
# A model may think for long about its first token; the daemon has a limit of its own.
TIMEOUT = httpx.Timeout(None, connect=5.0)

# What a model without a chat template writes after a text: it rarely comes to an end by itself.
CONTINUATION_TOKENS = 128

Message = dict[str, str]


class ChatError(ModelError):
    """The daemon refused or ended a request, or went away; the message and the code are its own."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class ChatClient:
    """Talks to one daemon. Closing an answer's iterator ends the request on the server as well.

    Args:
        certificate: the very certificate that the daemon must have; None: any that is valid for its name.
    """

    def __init__(self, base_url: str, api_key: str | None = None, certificate: Path | None = None) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # The daemon is this machine's or one named by its address: no proxy is between it and us.
        self._http = httpx.Client(
            base_url=self.base_url,
            headers=headers,
            timeout=TIMEOUT,
            trust_env=False,
            verify=_only(certificate) if certificate else True,
        )

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def models(self) -> list[str] | None:
        """The names of the models served; None where nobody answers.

        Raises:
            ChatError: somebody answers, but not as such a daemon does (a missing key, another program).
        """
        try:
            answer = self._http.get("/v1/models", timeout=5.0)
        except httpx.TransportError:
            return None
        try:
            return [model["id"] for model in _checked(answer)["data"]]
        except (KeyError, TypeError):
            raise ChatError(f"what listens at {self.base_url} is not an appliance daemon") from None

    def loading(self) -> float | None:
        """The share of the model that the daemon has loaded; None once it is ready."""
        try:
            answer = self._http.get("/ready", timeout=5.0)
        except httpx.TransportError:
            return 0.0
        if answer.status_code == 200:
            return None
        try:
            return answer.json()["loading"] or 0.0
        except (ValueError, KeyError, TypeError):  # somebody else's, who had the port before our daemon
            return 0.0

    def answer(
        self, model: str, temperature: float | None, messages: list[Message]
    ) -> Generator[str, None, None]:
        """The pieces of an answer as they come; of a model that cannot chat, what it writes after the messages.

        Raises:
            ChatError: with the daemon's message.
        """
        body = {"model": model, "temperature": temperature, "stream": True}
        try:
            yield from self._stream("/v1/chat/completions", {**body, "messages": messages})
        except ChatError as error:
            if error.code != NO_TEMPLATE:
                raise
            note(f"{model} was not taught to chat: it goes on with the text")
            prompt = "\n\n".join(message["content"] for message in messages)
            text = {**body, "prompt": prompt, "max_tokens": CONTINUATION_TOKENS}
            yield from self._stream("/v1/completions", text)

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        try:
            with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    _checked(answer)
                yield from _pieces(answer.iter_lines())
        except httpx.TransportError as error:
            raise ChatError(f"the daemon at {self.base_url} went away: {error}") from None


def _only(certificate: Path) -> ssl.SSLContext:
    """Trusts the first certificate in the file and no other, whatever name the daemon is called by.

    Raises:
        ChatError: there is none in it.
    """
    try:
        text = certificate.read_text(encoding="ascii", errors="replace")
        found = re.search(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", text, re.DOTALL)
        context = ssl.create_default_context(cadata=found[0] if found else "")
    except (OSError, ValueError, ssl.SSLError) as error:
        raise ChatError(f"cannot read a certificate from ssl_certfile {certificate}: {error}") from None
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        data = line.removeprefix("data: ")
        if data == line:
            continue
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise ChatError(chunk["error"]["message"])
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            if piece:
                yield piece
    raise ChatError("the daemon ended the answer before it was complete")


def _checked(answer: httpx.Response) -> Any:
    try:
        body = answer.json()
    except ValueError:
        raise ChatError(f"{answer.url} answered {answer.status_code} with something else than JSON") from None
    if answer.status_code != 200:
        error = body.get("error") if isinstance(body, dict) else None
        if not isinstance(error, dict) or not error.get("message"):
            raise ChatError(f"{answer.url} answered {answer.status_code}")
        raise ChatError(error["message"], error.get("code") or "")
    return body
