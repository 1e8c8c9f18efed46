"""A fake replica that keeps a log of what it was asked, and does at each step what a test wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torchrl_moe.modules.backends.replica import Completion, ReplicaInfo, Request
from torchrl_moe.testing.fake_engine import FakeReplica

Act = BaseException | Callable[[], Any]
LIFE = ("start", "join", "ready", "disconnect", "shutdown")


class ScriptedReplica(FakeReplica):
    """Its steps are those of :data:`LIFE`, ``submit``, ``abort``, and each command.

    ``script``: step -> an error to raise there, or a function to call, whose answer, if any, is the command's. ``log``
    has each step and what came with it: limits, a message's request ids, the id of each request to abort, arguments.
    """

    def __init__(self, index: int = 0, *, script: Mapping[str, Act] | None = None, **kwargs: Any) -> None:
        super().__init__(index, **kwargs)
        self.script = dict(script or {})
        self.log: list[tuple[str, Any]] = []

    def asked(self, step: str) -> list[Any]:
        """What came with a step, each time."""
        return [what for name, what in list(self.log) if name == step]

    @property
    def life(self) -> list[str]:
        """How it began and ended, so far."""
        return [name for name, _ in self.log if name in LIFE]

    def _act(self, step: str) -> Any:
        act = self.script.get(step)
        if isinstance(act, BaseException):
            raise act
        return None if act is None else act()

    def _step(self, step: str, what: Any = None) -> Any:
        self.log.append((step, what))
        return self._act(step)

    def start(self) -> None:
        self._step("start")

    def join(self) -> None:
        self._step("join")

    def wait_ready(self, timeout: float) -> ReplicaInfo:
        self._step("ready", timeout)
        return super().wait_ready(timeout)

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        self.log.append(("submit", [request.request_id for request in requests]))
        futures = super().submit(requests)
        self._act("submit")  # so that an error comes when some of it is under way
        return futures

    def abort(self, request_ids: Sequence[str]) -> None:
        self.log += [("abort", request_id) for request_id in request_ids]
        self._act("abort")
        super().abort(request_ids)

    def _command(self, name: str, timeout: float, /, **arguments: Any) -> Any:
        answer = self._step(name, arguments["seconds"] if name == "probe" else (timeout, arguments))
        return super()._command(name, timeout, **arguments) if answer is None else answer

    def ask(self, verb: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._stalled and self.is_alive():  # it comes, and is not answered
            self.log.append((verb.__name__, args[0] if args else None))
        return super().ask(verb, *args, **kwargs)

    def disconnect(self) -> None:
        self._step("disconnect")
        super().shutdown()

    def shutdown(self) -> None:
        self._step("shutdown")
        super().shutdown()
