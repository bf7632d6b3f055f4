"""`Engine`: one loaded model and its step loop, driven in-process by the offline API and by a worker for the daemon."""

from __future__ import annotations

import logging
import random

import psutil
import torch

from appliance.engine.blocks import BlockPool
from appliance.engine.config import EngineConfig, EngineInfo
from appliance.engine.errors import ContextLengthError, ParameterError
from appliance.engine.kv_cache import KVCache
from appliance.engine.loading import load_model
from appliance.engine.scheduler import Scheduler, SchedulerLimits
from appliance.engine.stats import EngineStats
from appliance.engine.types import ErrorInfo, Request, Sequence, StepPlan, TokenEvent
from appliance.engine.weights import Progress
from appliance.kernels import native

log = logging.getLogger("appliance.engine")


class Engine:
    """Serves requests with continuous batching.

    Args:
        progress: told how many of the model's weights of how many are read.

    Every request added gets exactly one terminal event, from `step` or from `abort`.

    Raises:
        What `load_model` raises.
    """

    def __init__(self, config: EngineConfig, progress: Progress = lambda _done, _total: None) -> None:
        model = load_model(config, progress)
        caching = config.enable_prefix_caching
        pools = tuple(BlockPool(count, caching=caching) for count in model.memory.num_blocks)
        limits = SchedulerLimits(
            max_num_seqs=config.max_num_seqs,
            token_budget=model.token_budget,
            max_model_len=model.memory.max_model_len,
            eos_token_ids=model.eos_token_ids,
        )
        self.scheduler = Scheduler(KVCache(pools, config.block_size, model.windows), limits)
        self._runner = model.runner
        self._process = psutil.Process()
        self._seeds = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self._steps_total = 0
        self._prompt_tokens_total = 0
        self._generated_tokens_total = 0
        self.info = EngineInfo(
            architecture=model.spec.architecture,
            vocab_size=model.spec.vocab_size,
            max_model_len=model.memory.max_model_len,
            max_num_batched_tokens=limits.token_budget,
            model_context_len=model.spec.context_len,
            num_blocks=sum(model.memory.num_blocks),
            block_size=config.block_size,
            kv_block_bytes=model.kv_block_bytes,
            weight_bytes=model.weight_bytes,
            backend=model.backend.value,
            gpu=model.gpu,
            native_isa=native.isa(),
            notes=model.notes,
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ContextLengthError: the prompt leaves no room for a token.
            ParameterError: the prompt is empty or names an id outside the vocabulary, or the request's id is in use.
        """
        ids, vocab = request.prompt_ids, self.info.vocab_size
        if not ids:
            raise ParameterError("prompt", "the prompt has no tokens; at least one is needed")
        sampling = request.sampling
        named = (
            ("prompt", ids),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", sampling.logit_bias),
        )
        for name, given in named:
            outside = next((token for token in given if not 0 <= token < vocab), None)
            if outside is not None:
                raise ParameterError(name, f"token id {outside} is outside the vocabulary of {vocab} tokens")
        if len(ids) >= self.info.max_model_len:
            raise ContextLengthError(len(ids), self.info.max_model_len)
        if self.scheduler.find(request.id):
            raise ParameterError("id", f"a request with id {request.id!r} is being served already")
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        self._prompt_tokens_total += len(ids)
        self.scheduler.add(Sequence(request, list(ids), seed))

    def abort(self, request_id: str, index: int | None = None) -> list[TokenEvent]:
        """End a request, or one continuation of it, and free its blocks; empty where it has ended already."""
        ending = [seq for seq in self.scheduler.find(request_id) if index in (None, seq.index)]
        return [self.scheduler.end(seq, "abort") for seq in ending]

    def steer(self, request_id: str, choices: list[tuple[int, int]]) -> list[int]:
        """As `Scheduler.steer`. With a steered request there may be nothing to run before it is called."""
        return self.scheduler.steer(request_id, choices)

    def plan(self) -> StepPlan:
        """The next step; call `run` with it before anything else."""
        return self.scheduler.plan()

    def run(self, plan: StepPlan) -> list[TokenEvent]:
        """Run a planned step. If it fails, the requests with rows in it end with an error and the engine goes on.

        Raises:
            torch.AcceleratorError: the GPU failed; whatever this process asks of it will fail from now on.
        """
        try:
            result = self._runner.run(plan)
        except torch.AcceleratorError:
            raise
        except Exception:
            log.exception("a step failed; the requests in it end with an error")
            info = ErrorInfo("step_failed", "the step that computed this request failed; the log says why")
            ids = dict.fromkeys(row.request_id for row in plan.rows)
            events = [self.scheduler.fail(request_id, info) for request_id in ids]
        else:
            events = self.scheduler.commit(plan, result)
        self._steps_total += 1
        self._generated_tokens_total += sum(len(event.token_ids) for event in events)
        return events

    def step(self) -> list[TokenEvent]:
        """Plan and run one step; what it gave birth to, in plan order."""
        return self.run(self.plan())

    def stats(self) -> EngineStats:
        scheduler, kv = self.scheduler, self.scheduler.kv
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_total=sum(pool.num_blocks for pool in kv.pools),
            blocks_used=sum(pool.num_used for pool in kv.pools),
            blocks_cached=sum(pool.num_cached for pool in kv.pools),
            blocks_free=sum(pool.num_free for pool in kv.pools),
            kv_block_bytes=self.info.kv_block_bytes,
            prefix_lookup_tokens_total=kv.lookup_tokens_total,
            prefix_hit_tokens_total=kv.hit_tokens_total,
            preemptions_total=scheduler.preemptions_total,
            steps_total=self._steps_total,
            prompt_tokens_total=self._prompt_tokens_total,
            generated_tokens_total=self._generated_tokens_total,
            rss_bytes=self._process.memory_info().rss,
        )
