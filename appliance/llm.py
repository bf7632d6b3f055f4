"""The offline API: the same engine in this process, without a server."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from itertools import count
from types import TracebackType
from typing import Any

import msgspec

from appliance.beam_search import Beam, BeamSearch, BeamSearchParams
from appliance.engine.engine import Engine
from appliance.engine.errors import EngineError, ParameterError
from appliance.engine.machine import trim_memory
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import Request, TokenEvent
from appliance.loading import load
from appliance.outputs import BeamSearchOutput, BeamSearchSequence, Collector, RequestOutput
from appliance.prompts import Conversation, Prompt, as_list, conversations, parsed, per_prompt
from appliance.text.chat_template import ChatTemplate
from appliance.text.progress import generation_progress
from appliance.text.stream import TextStream


class LLM:
    """A model loaded into this process; calls from several threads take turns.

    As a context manager it frees everything at the end, `close` does too.

    Args:
        model: a catalogue name (pulled if absent), the name of an installed model, or a path to a .gguf file or a
            model folder.
        settings: any setting by its name, e.g. `max_model_len=2048`.

    Raises:
        SettingsError, ModelError, CheckpointError, EngineError: what is wrong and what to do about it.
    """

    def __init__(self, model: str = "smollm2:135m", **settings: Any) -> None:
        loaded = load(model, settings)
        self.tokenizer = loaded.tokenizer
        self._template = ChatTemplate.of(self.tokenizer)
        self._engine: Engine | None = loaded.engine
        # Also where nobody calls `close` and the last reference goes.
        self._let_go = weakref.finalize(self, loaded.held.close)
        self._pid = os.getpid()
        self._ids = count()
        self._lock = threading.Lock()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the calls of other threads, then let go of the model's weights and KV memory.

        Nothing can be generated afterwards.
        """
        with self._lock:
            self._engine = None
            trim_memory()
            self._let_go()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt; all of them share the engine's batch.

        Args:
            prompts: one prompt or several, each a text, token ids, or a dictionary with `prompt` or
                `prompt_token_ids`.
            sampling_params: for all prompts, or one for each; None: `SamplingParams()`.
            use_tqdm: show progress, if stderr is a terminal.

        Returns:
            One output per prompt, in order.

        Raises:
            ParameterError: a prompt or parameter is unusable (`ContextLengthError` where it is too long); nothing
                has run then.
            EngineError: a step failed, or the model was closed.
        """
        several = as_list(prompts)
        params = per_prompt(sampling_params, len(several))
        jobs = [
            (*parsed(prompt, self.tokenizer), sampling)
            for prompt, sampling in zip(several, params, strict=True)
        ]
        return self._run(jobs, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of messages with `role` and `content`.

        Raises:
            TemplateError: the model has no chat template, or it refuses these messages.
            As `generate`.
        """
        several = conversations(messages)
        params = per_prompt(sampling_params, len(several))
        jobs = []
        for conversation, sampling in zip(several, params, strict=True):
            text = self._template.render(conversation, add_generation_prompt=add_generation_prompt)
            # The template writes the beginning-of-sequence token itself where the model wants one.
            jobs.append((text, self.tokenizer.encode(text, parse_special=True, add_bos=False), sampling))
        return self._run(jobs, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt that a search with so many beams finds.

        Raises:
            As `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise ParameterError("params", f"expected BeamSearchParams, found {type(params).__name__}")
        eos = frozenset(self.tokenizer.eos_token_ids)
        several = [parsed(prompt, self.tokenizer)[1] for prompt in as_list(prompts)]
        searches = [BeamSearch(f"{next(self._ids):08d}", ids, params, eos) for ids in several]
        by_id = {search.request.id: search for search in searches}
        with self._lock:
            engine = self._open_engine()
            try:
                for search in searches:
                    engine.add(search.request)
                going = list(searches)
                while going:
                    for event in engine.step():
                        by_id[event.request_id].take(event)
                    going = [search for search in going if search.advance(engine)]
            finally:
                for request_id in by_id:
                    engine.abort(request_id)
        return [BeamSearchOutput(tuple(map(self._beam, search.best()))) for search in searches]

    def _beam(self, beam: Beam) -> BeamSearchSequence:
        stream = TextStream(self.tokenizer)
        text = stream.push(beam.tokens[beam.num_prompt :]) + stream.finish()
        reason = "stop" if beam.is_ended else "length"
        return BeamSearchSequence(text, beam.tokens, beam.cum_logprob, reason)

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("the model was closed; make a new LLM to go on")
        if os.getpid() != self._pid:
            raise EngineError(
                "this process was forked from the one that loaded the model, and the threads that compute did not "
                "come along; load it in this process, started with multiprocessing's 'spawn' method"
            )
        return self._engine

    def _run(
        self, jobs: Sequence[tuple[str | None, list[int], SamplingParams]], shown: bool
    ) -> list[RequestOutput]:
        collectors: dict[str, Collector] = {}
        with self._lock, generation_progress(len(jobs), shown) as progress:
            engine = self._open_engine()
            try:
                for text, ids, sampling in jobs:
                    self._submit(engine, text, ids, sampling, collectors)
                while engine.has_work:
                    for event in engine.step():
                        self._take(engine, collectors[event.request_id], event)
                        progress(len(event.token_ids), int(event.is_last))
            finally:
                for request_id in collectors:
                    engine.abort(request_id)
        return [collector.output() for collector in collectors.values()]

    def _submit(
        self,
        engine: Engine,
        text: str | None,
        ids: list[int],
        sampling: SamplingParams,
        collectors: dict[str, Collector],
    ) -> None:
        if sampling.num_sequences > sampling.n and sampling.logprobs is None:
            # Choosing the best needs them.
            sampling = msgspec.structs.replace(sampling, logprobs=0)
        request = Request(
            id=f"{next(self._ids):08d}",
            prompt_ids=tuple(ids),
            sampling=sampling,
            arrived_at=time.monotonic(),
            bad_sequences=self.tokenizer.spellings(sampling.bad_words),
        )
        # Known before it is added, so that an interrupt in between leaves nothing behind.
        collectors[request.id] = Collector(request, text, self.tokenizer)
        engine.add(request)

    def _take(self, engine: Engine, collector: Collector, event: TokenEvent) -> None:
        if event.error is not None:
            error = EngineError(event.error.message)
            error.code = event.error.code
            raise error
        if collector.take(event):
            for ended in engine.abort(event.request_id, event.index):
                collector.take(ended)
