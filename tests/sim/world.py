"""`World`: a scheduler with everything around it, step by step, as the engine drives it."""

from __future__ import annotations

from collections import deque

from appliance.engine.scheduler import Scheduler
from appliance.engine.types import ErrorInfo, PlanRow, Sequence, StepPlan, TokenEvent
from sim.checks import Figures, Watch
from sim.client import Client
from sim.memory import Memory, Runner, StepBroke, WatchedCache
from sim.model import Text
from sim.traffic import Action, Arrive, Break, Cancel, Settings, Spoil, Traffic

BROKEN = ErrorInfo("step_failed", "the simulated step failed")


class World:
    """Runs traffic through a scheduler, asserting all that must hold.

    Attributes:
        step: the one that is running, or ran last.
        notes: every action so far, with the step before which it happened.
    """

    def __init__(self, settings: Settings, traffic: Traffic) -> None:
        self.settings = settings
        self.traffic = traffic
        self.figures = Figures()
        self.step = 0
        self.notes: list[tuple[int, Action]] = []
        self.clients: dict[str, Client] = {}
        self._memory = Memory(settings.block_size)
        pools = tuple(
            self._memory.make_pool(group, "device", count, caching=settings.caching)
            for group, count in enumerate(settings.num_blocks)
        )
        self._kv = WatchedCache(pools, settings.block_size, settings.windows)
        self.scheduler = Scheduler(self._kv, settings.limits)
        self._runner = Runner(self._memory, pools, settings.windows)
        self._watch = Watch(self.scheduler, settings, self.figures)
        self._texts: deque[list[int]] = deque(maxlen=5)
        self._spoilt: set[str] = set()
        self._breaks = False

    def run(self, steps: int) -> None:
        """Run so many steps, and then until all that has arrived is over."""
        for _ in range(steps):
            alive = [client.alive() for client in self.clients.values()]
            for action in self.traffic.actions(self.step, alive, self._texts):
                self.notes.append((self.step, action))
                self._act(action)
                self._settle()
            self._run_step()
        self._drain()
        figures = self.figures
        figures.cached_tokens = self._kv.hit_tokens_total
        assert figures.mean_tokens < 256 or figures.waste <= 0.04, (
            f"{figures.waste:.1%} of the blocks is wasted"
        )

    def _drain(self) -> None:
        """Run without new traffic until everything has ended, which takes a step a token, and what clients think."""
        thinking = 1 + max((client.arrival.steering_delay for client in self.clients.values()), default=0)
        continuations = sum(client.num_continuations for client in self.clients.values())
        most = self.step + (1 + continuations) * self.settings.limits.max_model_len * thinking
        while self.clients:
            assert self.step < most, f"requests {list(self.clients)} do not end"
            self._run_step()
        self._watch.check_empty()

    def _run_step(self) -> None:
        for client in [client for client in self.clients.values() if client.search]:
            self._steer(client)
            self._settle()
        if self.scheduler.has_work:
            self._watch.before()
            plan = self.scheduler.plan()
            self._watch.check()
            self._watch.after(plan)
            for event in self._compute(plan):
                self.clients[event.request_id].take(event)
                if event.error is not None:
                    self._runner.check_forgotten(event.request_id)
                    self.figures.failures += 1
            self._settle()
            self.figures.copies += len(plan.copies)
            targets = {copy.target for copy in plan.copies}
            self.figures.chained_copies += sum(copy.source in targets for copy in plan.copies)
            self.figures.tokens += plan.n_tokens
        if not self.clients:
            self._watch.check_empty()
        self._breaks = False
        self.step += 1
        self.figures.steps += 1

    def _compute(self, plan: StepPlan) -> list[TokenEvent]:
        try:
            result = self._runner.run(plan, self._text, self._spoilt, breaks=self._breaks)
        except StepBroke:
            ids = dict.fromkeys(row.request_id for row in plan.rows)
            return [self.scheduler.fail(request_id, BROKEN) for request_id in ids]
        self._watch.computed(plan)
        return self.scheduler.commit(plan, result)

    def _text(self, row: PlanRow) -> Text:
        return self.clients[row.request_id].text(row.index)

    def _act(self, action: Action) -> None:
        match action:
            case Arrive(request=request, seed=seed):
                self.clients[request.id] = Client(action, self.settings)
                self.scheduler.add(Sequence(request, list(request.prompt_ids), seed))
                self.figures.requests += 1
            case Cancel(request_id=request_id, index=index) if request_id in self.clients:
                self._cancel(self.clients[request_id], index)
                self.figures.cancels += 1
            case Spoil(request_id=request_id):
                self._spoilt.add(request_id)
            case Break():
                self._breaks = True

    def _cancel(self, client: Client, index: int | None) -> None:
        for seq in self.scheduler.find(client.request.id):
            if index in (None, seq.index):
                client.take_abort(self.scheduler.end(seq, "abort"))
        assert index is not None or client.is_over, f"request {client.request.id} was cancelled and lives"

    def _steer(self, client: Client) -> None:
        assert client.search is not None
        if not client.search.is_ready():
            return
        if client.search.advance(self.scheduler):
            self.figures.steerings += 1
        else:
            self._cancel(client, None)

    def _settle(self) -> None:
        """After anything that was done: what is lost is poisoned, what is over is forgotten, all invariants hold."""
        self._memory.settle()
        self._watch.check()
        for client in [client for client in self.clients.values() if client.is_over]:
            assert not self.scheduler.find(client.request.id), (
                f"request {client.request.id} is over and lives"
            )
            if not client.search:
                self._texts.append(client.text(0).tokens)
            del self.clients[client.request.id]
