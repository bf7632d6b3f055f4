"""A client that times every frame of a streamed answer and reads the frames once the clock has stopped."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from appliance.names import ModelError

TIMEOUT = httpx.Timeout(None, connect=5.0)
_ENDS_LATE = {"ignore_eos": True}
_COUNTS = {"stream_options": {"include_usage": True}}
# What is asked for beyond the standard, most wanted first; a server that refuses one is asked for the next.
_WISHES: tuple[dict[str, Any], ...] = (_ENDS_LATE | _COUNTS, {"min_tokens": True} | _COUNTS, _COUNTS, {})
_CALIBRATION_WORDS = 64
_REFUSED = (400, 422)
# One token each, with the space before it, in the vocabularies of the common model families.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city name team minute idea body back parent face"
)
WORDS = _TEXT.split()


class BenchError(ModelError):
    """The server cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer.

    Attributes:
        start: when the request was sent; `times`: when each frame with text came; both in seconds of one clock.
        output_tokens: by the server's count, or else one a frame.
        prompt_tokens: by the server's count; None where it gives none.
    """

    start: float
    times: tuple[float, ...]
    output_tokens: int
    prompt_tokens: int | None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start


class BenchClient:
    """Talks to one server. `connect` comes first.

    Attributes:
        model: the model measured.
        notes: what the server does not do as it was asked, for the reader of the figures.
        tokens_per_word: of a prompt of our words, measured by the server's own count.
    """

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model or ""
        self.notes: list[str] = []
        self.counts_tokens = True
        self.tokens_per_word = 1.0
        self._wish: dict[str, Any] = {}
        self._random = random.Random()
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=TIMEOUT,
                trust_env=False,  # no proxy may come between
                # None is used again: a server may close one that is kept, just as the next request goes out.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            )
        except httpx.InvalidURL as error:
            raise BenchError(f"{url} is not a URL: {error}") from None

    async def __aenter__(self) -> BenchClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def connect(self) -> None:
        """Find the model and what the server takes.

        Raises:
            BenchError: nobody answers, the key is refused, or there is no such model.
        """
        served = await self._served()
        if self.model and served and self.model not in served:
            raise BenchError(f"{self.url} serves {', '.join(served)}, not {self.model}")
        if not self.model and not served:
            raise BenchError(f"{self.url} names no models; say which one with --model")
        self.model = self.model or served[0]
        for wish in _WISHES:
            self._wish = wish
            try:
                await self.complete(self.words(32), 4)
                break
            except _Refused as refused:
                if not wish:
                    raise BenchError(f"{self.url} refuses to complete a text: {refused}") from None
        answer = await self.complete(self.words(_CALIBRATION_WORDS), 4)
        if "ignore_eos" not in self._wish:
            least = "min_tokens" if "min_tokens" in self._wish else "nothing in its place"
            self.notes.append(f"the server does not take ignore_eos; {least} is sent")
        self.counts_tokens = answer.prompt_tokens is not None
        if answer.prompt_tokens is None:
            self.notes.append(
                "the server gives no usage: a frame counts as a token, a word of a prompt as one too"
            )
        else:
            self.tokens_per_word = answer.prompt_tokens / _CALIBRATION_WORDS

    def words(self, count: int) -> str:
        """A text nobody has seen."""
        return " ".join(self._random.choices(WORDS, k=count))

    def prompt(self, tokens: int) -> str:
        """A text nobody has seen, of about so many tokens."""
        return self.words(max(1, round(tokens / self.tokens_per_word)))

    async def complete(self, prompt: str, max_tokens: int) -> Answer:
        """Raises BenchError: there was no answer, or only an error."""
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens}
        body |= {"temperature": 0, "stream": True} | self._wish
        if "min_tokens" in body:
            body["min_tokens"] = max_tokens
        frames: list[tuple[float, bytes]] = []
        rest = b""
        start = time.perf_counter()
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._refuse(response)
                async for piece in response.aiter_raw():
                    now = time.perf_counter()
                    *whole, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
                    frames += [(now, frame) for frame in whole]
        except httpx.TransportError as error:
            raise BenchError(f"{self.url} went away: {error or type(error).__name__}") from None
        return _read(start, frames)

    async def _served(self) -> list[str]:
        try:
            response = await self._http.get("/v1/models", timeout=10.0)
        except (httpx.TransportError, httpx.UnsupportedProtocol) as error:
            raise BenchError(f"nothing answers at {self.url}: {error or type(error).__name__}") from None
        if response.status_code == 404:
            return []
        if response.status_code != 200:
            self._refuse(response)
        try:
            return [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise BenchError(f"what listens at {self.url} does not speak OpenAI's API") from None

    def _refuse(self, response: httpx.Response) -> None:
        message = _message(response)
        if response.status_code in (401, 403):
            raise BenchError(f"{self.url} refuses the key (give one with --api-key): {message}")
        if response.status_code in _REFUSED:
            raise _Refused(message)
        raise BenchError(f"{response.url} answered {response.status_code}: {message}")


class _Refused(BenchError):
    """The request has something that the server does not take."""


def _message(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return response.text[:200] or response.reason_phrase


def _read(start: float, frames: list[tuple[float, bytes]]) -> Answer:
    times = []
    usage: dict[str, int] = {}
    for at, frame in frames:
        data = frame.removeprefix(b"data:").strip()
        if data == b"[DONE]" or not frame.startswith(b"data:"):
            continue
        try:
            chunk = json.loads(data)
        except ValueError:
            raise BenchError(f"the server sent a frame that is not JSON: {data[:80]!r}") from None
        if "error" in chunk:
            error = chunk["error"]
            raise BenchError(str(error["message"] if isinstance(error, dict) else error))
        if any(choice.get("text") for choice in chunk.get("choices", ())):
            times.append(at)
        usage = chunk.get("usage") or usage
    if not times:
        raise BenchError("the server ended an answer without any text")
    return Answer(
        start, tuple(times), usage.get("completion_tokens") or len(times), usage.get("prompt_tokens")
    )
