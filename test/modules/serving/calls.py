"""Calls to a service over fake replicas, and waiting for what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torchrl_moe.modules.backends.replica import Request
from torchrl_moe.modules.serving.roster import Roster
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.testing import FakeAsyncVLLM
from waiting import until

HOUR = 3600.0


def ask(engine: GenerationService, prompts: Any = "hi", max_tokens: int = 4, **kwargs: Any) -> Any:
    return engine.generate(prompts, {"max_tokens": max_tokens, "logprobs": 0}, use_tqdm=False, **kwargs)


def submitted(engine: FakeAsyncVLLM) -> list[Request]:
    return [request for replica in engine.replicas for request in replica.submitted]


def slow_if(*prompts: str) -> Callable[[Request], float]:
    return lambda request: HOUR if request.prompt in prompts else 0.0


def until_running(engine: GenerationService, counts: list[int]) -> None:
    """Wait until so many requests run on each replica: they count as in flight a moment before."""
    until(lambda: [row["running"] for row in engine.stats()] == counts)


def in_thread(function: Callable[[], Any]) -> Any:
    """A future of what a function does in a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


@contextmanager
def listening(roster: Roster, listener: Callable[[], None]) -> Iterator[None]:
    """Hear of changes for as long as the context lasts."""
    roster.add_listener(listener)
    try:
        yield
    finally:
        roster.remove_listener(listener)
