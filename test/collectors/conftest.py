"""Asynchronous collectors and a Ctrl-C, for the tests of this folder."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from support.collecting import Questions, chat, policy_of
from support.waiting import in_thread, until
from torchrl_moe.collectors import AsyncLLMCollector


@pytest.fixture
def collect(request: pytest.FixtureRequest) -> Iterator[Callable[..., AsyncLLMCollector]]:
    """Makes collectors of groups of 2 over questions, of the test's ``engine`` unless it gives a policy."""
    with ExitStack() as stack:

        def make(env: Any = None, **kwargs: Any) -> AsyncLLMCollector:
            if "policy" not in kwargs:
                kwargs["policy"] = policy_of(request.getfixturevalue("engine"))
            kwargs = {"dataloader": Questions(), "group_size": 2, **kwargs}
            collector = AsyncLLMCollector(chat(kwargs["group_size"]) if env is None else env, **kwargs)
            stack.callback(collector.shutdown)
            return collector

        yield make


@pytest.fixture
def interrupt() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Sends a Ctrl-C to this thread once a condition holds, also where a shell has it ignored, in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    senders: list[Any] = []
    main = threading.main_thread().ident
    assert main is not None

    def once(condition: Callable[[], Any]) -> None:
        senders.append(in_thread(lambda: until(condition) and signal.pthread_kill(main, signal.SIGINT)))

    yield once
    for sender in senders:
        sender.result(60)
    signal.signal(signal.SIGINT, before)
