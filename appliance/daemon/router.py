"""Which worker serves which model."""

from __future__ import annotations

from appliance.daemon.events import EventStream
from appliance.daemon.worker import WorkerHandle
from appliance.engine.types import ErrorInfo, Request


class UnknownModelError(LookupError):
    """No model of that name is served; the message lists the ones that are."""

    code = "model_not_found"

    def __init__(self, name: str, served: list[str]) -> None:
        super().__init__(f"no model {name!r:.100} here; served: {', '.join(served) or 'none'}")
        self.name = name


class EngineRouter:
    """One way to every engine, however many there are."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerHandle] = {}

    def add(self, model: str, worker: WorkerHandle) -> None:
        self._workers[model] = worker

    def worker(self, model: str) -> WorkerHandle:
        try:
            return self._workers[model]
        except KeyError:
            raise UnknownModelError(model, sorted(self._workers)) from None

    def workers(self) -> dict[str, WorkerHandle]:
        """All of them, by the names of their models."""
        return dict(self._workers)

    def submit(self, model: str, request: Request) -> EventStream:
        """Start a request; its stream ends with exactly one terminal event.

        Raises:
            UnknownModelError: no such model.
            WorkerUnavailableError: its worker takes no requests.
        """
        return self.worker(model).submit(request)

    def abort(self, model: str, request_id: str, error: ErrorInfo | None = None) -> None:
        """Free what a request holds and end it, with `error` if given; harmless if it has ended."""
        self.worker(model).abort(request_id, error)

    def abort_one(self, model: str, request_id: str, index: int) -> None:
        """End one continuation of a request; the others go on."""
        self.worker(model).abort_one(request_id, index)

    def fail_all(self, error: ErrorInfo) -> None:
        for worker in self._workers.values():
            worker.fail_all(error)

    async def stop(self) -> None:
        for worker in self._workers.values():
            await worker.stop()
