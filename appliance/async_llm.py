"""The offline API for asyncio: the engine runs in a thread of this process, answers come as deltas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any

from appliance.engine.engine import Engine
from appliance.engine.errors import EngineError
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import ErrorInfo, PositionLogprobs, Request, TokenEvent
from appliance.pull.ensure import ensure_model
from appliance.settings import PYTHON, load_settings
from appliance.text.continuation import Continuation
from appliance.text.tokenizer import Tokenizer

log = logging.getLogger("appliance")


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one continuation; the last one carries `finish_reason`.

    Attributes:
        text: text that may begin a stop string comes later than its tokens.
        logprobs: of `token_ids`, where asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: str | None
    stop_reason: str | int | None


class AsyncLLM:
    """A model loaded into this process, for use by many tasks at once. An async context manager; `close` ends it.

    Args:
        model, settings: as for `LLM`. Loading blocks; call `AsyncLLM` in a thread where that matters.
    """

    def __init__(self, model: str = "smollm2:135m", **settings: Any) -> None:
        resolved = load_settings({"model": model, **settings}, PYTHON)
        path = ensure_model(resolved).path
        self.tokenizer = Tokenizer.from_gguf(path)
        engine = Engine(resolved.engine_config(path))
        for note in engine.info.notes:
            log.warning("%s", note)
        self._loop = _EngineLoop(engine)
        self._ids = count()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the engine's thread; requests that still run end with an error."""
        await asyncio.to_thread(self._loop.stop)

    async def generate(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[Delta]:
        """Continue a prompt. Leaving the iteration, or cancelling the task, frees what the request holds.

        Args:
            prompt: a text, or token ids.
            request_id: for `abort`; must not be in use. None: one is made.

        Raises:
            ParameterError: the prompt or a parameter is unusable.
            EngineError: a step failed, or the model was closed.
        """
        ids = self.tokenizer.encode(prompt, parse_special=True) if isinstance(prompt, str) else list(prompt)
        request = Request(
            id=request_id or f"async-{next(self._ids)}",
            prompt_ids=tuple(ids),
            sampling=sampling_params,
            arrived_at=time.monotonic(),
            bad_sequences=self.tokenizer.spellings(sampling_params.bad_words),
        )
        going = {
            index: Continuation(index, self.tokenizer, sampling_params)
            for index in range(sampling_params.num_sequences)
        }
        async with contextlib.aclosing(self._loop.events(request)) as events:
            async for event in events:
                if event.error is not None:
                    raise EngineError(event.error.message)
                continuation = going.get(event.index)
                if continuation is None:
                    continue
                delta = _take(continuation, event)
                if delta.finish_reason is not None:
                    del going[event.index]
                    self._loop.abort(request.id, event.index)
                if delta.text or delta.token_ids or delta.finish_reason:
                    yield delta
                if not going:
                    return

    def abort(self, request_id: str) -> None:
        """End a request; its iterator ends with finish reason "abort"."""
        self._loop.abort(request_id, None)


def _take(continuation: Continuation, event: TokenEvent) -> Delta:
    known = len(continuation.token_ids)
    text = continuation.take(event)
    return Delta(
        index=continuation.index,
        text=text,
        token_ids=tuple(continuation.token_ids[known:]),
        logprobs=tuple(continuation.logprobs[known:]),
        finish_reason=continuation.finish_reason,
        stop_reason=continuation.stop_reason,
    )


Deliver = Callable[[TokenEvent | EngineError], None]


class _EngineLoop:
    """The thread that owns an engine. It takes commands between steps and waits for one while there is no work."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._deliver: dict[str, Deliver] = {}
        self._thread = threading.Thread(target=self._run, name="appliance-engine", daemon=True)
        self._thread.start()

    async def events(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Submit a request; its events until the last one. Closing the iterator aborts it.

        Raises:
            EngineError: the request was refused.
        """
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[TokenEvent | EngineError]()

        def deliver(news: TokenEvent | EngineError) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(inbox.put_nowait, news)

        if not self._thread.is_alive():
            raise EngineError("the model was closed; make a new AsyncLLM to go on")
        self._commands.put(lambda: self._add(request, deliver))
        try:
            while True:
                news = await inbox.get()
                if isinstance(news, EngineError):
                    raise news
                yield news
                if news.is_last:
                    return
        finally:
            self.abort(request.id, None, deliver)

    def abort(self, request_id: str, index: int | None, owner: Deliver | None = None) -> None:
        """End a request or one of its continuations; with `owner`, only if it is the one who submitted it."""
        self._commands.put(lambda: self._abort(request_id, index, owner))

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            while not (self._engine.has_work and self._commands.empty()):
                command = self._commands.get()
                if command is None:
                    self._end_all()
                    return
                command()
            for event in self._engine.step():
                self._hand_on(event)

    def _add(self, request: Request, deliver: Deliver) -> None:
        try:
            self._engine.add(request)
        except EngineError as error:
            deliver(error)
        else:
            self._deliver[request.id] = deliver

    def _abort(self, request_id: str, index: int | None, owner: Deliver | None) -> None:
        if owner is None or self._deliver.get(request_id) is owner:
            for event in self._engine.abort(request_id, index):
                self._hand_on(event)

    def _hand_on(self, event: TokenEvent) -> None:
        deliver = self._deliver.pop(event.request_id) if event.is_last else self._deliver[event.request_id]
        deliver(event)

    def _end_all(self) -> None:
        error = ErrorInfo("closed", "the model was closed while the request ran")
        for request_id, deliver in self._deliver.items():
            deliver(TokenEvent(request_id=request_id, finish_reason="error", is_last=True, error=error))
