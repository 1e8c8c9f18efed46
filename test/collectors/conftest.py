"""A fake engine and asynchronous collectors over it, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from support.collecting import Questions, chat, policy_of
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.testing import FakeAsyncVLLM


@pytest.fixture
def engine() -> Iterator[FakeAsyncVLLM]:
    with FakeAsyncVLLM(num_replicas=2) as engine:
        yield engine


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
