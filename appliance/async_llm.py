"""The offline API for asyncio: the engine runs in a thread of this process, answers come as deltas."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from itertools import count
from types import TracebackType
from typing import IO, Any

from appliance.engine.engine import Engine
from appliance.engine.errors import EngineError, ParameterError
from appliance.engine.machine import trim_memory
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import Request, TokenEvent
from appliance.loading import load
from appliance.prompts import Prompt, parsed, per_prompt
from appliance.text.continuation import Continuation, Delta


class AsyncLLM:
    """A model loaded into this process, for use by many tasks at once. An async context manager; `close` ends it.

    Args:
        model, settings: as for `LLM`. Loading blocks; call `AsyncLLM` in a thread where that matters.
    """

    def __init__(self, model: str = "smollm2:135m", **settings: Any) -> None:
        loaded = load(model, settings)
        self.tokenizer = loaded.tokenizer
        self._loop = _EngineLoop(loaded.engine, loaded.held)
        # Where nobody calls `close`: with the last reference, or before the interpreter ends under the thread's feet.
        weakref.finalize(self, self._loop.close)
        self._ids = count()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the engine's thread; requests that still run end with an error."""
        await asyncio.to_thread(self._loop.close)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Continue a prompt. Leaving the iteration, or cancelling the task, frees what the request holds.

        Args:
            prompt: a text, token ids, or a dictionary with `prompt` or `prompt_token_ids`.
            request_id: for `abort`; must not be in use. None: one is made.

        Raises:
            ParameterError: the prompt or a parameter is unusable.
            EngineError: a step failed, or the model was closed.
        """
        (sampling,) = per_prompt(sampling_params, 1)
        if sampling.num_sequences > sampling.n:
            raise ParameterError("best_of", "best_of cannot be streamed: the best are known only at the end")
        request = Request(
            id=request_id or f"async-{next(self._ids)}",
            prompt_ids=tuple(parsed(prompt, self.tokenizer)[1]),
            sampling=sampling,
            arrived_at=time.monotonic(),
            bad_sequences=self.tokenizer.spellings(sampling.bad_words),
        )
        continuations = [Continuation(index, self.tokenizer, sampling) for index in range(sampling.n)]
        num_going = len(continuations)
        async with contextlib.aclosing(self._loop.events(request)) as events:
            async for event in events:
                if event.error is not None:
                    raise EngineError(event.error.message)
                delta = continuations[event.index].take(event)
                if delta is None:  # it was stopped here, and the engine did not know yet
                    continue
                if delta.finish_reason is not None:
                    num_going -= 1
                    if event.finish_reason is None:
                        self._loop.abort(request.id, event.index)
                yield delta
                if num_going == 0:
                    return

    def abort(self, request_id: str) -> None:
        """End a request; its iterator ends with finish reason "abort"."""
        self._loop.abort(request_id, None)


_News = TokenEvent | EngineError
_Deliver = Callable[[_News], None]


class _EngineLoop:
    """The thread that owns an engine. It takes commands between steps and waits for one while there is no work.

    Args:
        held: closed when the thread has ended.
    """

    def __init__(self, engine: Engine, held: IO[bytes]) -> None:
        self._engine = engine
        self._held = held
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._deliver: dict[str, _Deliver] = {}
        # All that wait for events, those whose request the thread has not seen yet too.
        self._waiting: set[_Deliver] = set()
        self._lock = threading.Lock()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="appliance-engine", daemon=True)
        self._thread.start()

    async def events(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Submit a request; its events until the last one. Closing the iterator aborts it.

        Raises:
            EngineError: the request was refused, or the thread ends.
        """
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[_News]()

        def deliver(news: _News) -> None:
            try:
                loop.call_soon_threadsafe(inbox.put_nowait, news)
            except RuntimeError:  # the event loop has ended, so nobody will leave the iteration
                self.abort(request.id, None, deliver)

        with self._lock:
            # A process that was forked has no thread.
            if self._has_ended or not self._thread.is_alive():
                raise EngineError("the model was closed; make a new AsyncLLM to go on")
            self._waiting.add(deliver)
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
            with self._lock:
                self._waiting.discard(deliver)
            self.abort(request.id, None, deliver)

    def abort(self, request_id: str, index: int | None, owner: _Deliver | None = None) -> None:
        """End a request or one of its continuations; with `owner`, only if it is the one who submitted it."""
        self._commands.put(lambda: self._abort(request_id, index, owner))

    def close(self) -> None:
        """Let the thread end after this step, and wait for it."""
        self._commands.put(None)
        if self._thread is not threading.current_thread():  # which may be where the last reference goes
            self._thread.join()

    def _run(self) -> None:
        verdict = "the engine failed; the traceback says why"
        try:
            self._serve()
            verdict = "the model was closed while the request ran"
        finally:
            with self._lock:
                self._has_ended = True
                waiting = list(self._waiting)
            for deliver in waiting:
                deliver(EngineError(verdict))
            del self._engine  # its memory does not wait for whoever still has the AsyncLLM
            trim_memory()
            self._held.close()

    def _serve(self) -> None:
        while True:
            while not (self._engine.has_work and self._commands.empty()):
                command = self._commands.get()
                if command is None:
                    return
                command()
            for event in self._engine.step():
                self._hand_on(event)

    def _add(self, request: Request, deliver: _Deliver) -> None:
        try:
            self._engine.add(request)
        except EngineError as error:
            deliver(error)
        else:
            self._deliver[request.id] = deliver

    def _abort(self, request_id: str, index: int | None, owner: _Deliver | None) -> None:
        if owner is None or self._deliver.get(request_id) is owner:
            for event in self._engine.abort(request_id, index):
                self._hand_on(event)

    def _hand_on(self, event: TokenEvent) -> None:
        deliver = self._deliver.pop(event.request_id) if event.is_last else self._deliver[event.request_id]
        deliver(event)
