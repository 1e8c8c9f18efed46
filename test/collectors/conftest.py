"""Engines, asynchronous collectors and a Ctrl-C, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.collecting import collectors_over
from support.interrupts import Interrupt, interrupts
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.testing import FakeAsyncVLLM


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fake one of two replicas, or of the module's ``REPLICAS``; or the real one that the test's marker describes."""
    if request.node.get_closest_marker("engine"):
        yield request.getfixturevalue("engine")
    else:
        with FakeAsyncVLLM(num_replicas=getattr(request.module, "REPLICAS", 2)) as fake:
            yield fake


@pytest.fixture
def collect(request: pytest.FixtureRequest) -> Iterator[Callable[..., AsyncLLMCollector]]:
    """Makes collectors of groups of 2 over questions, of the test's ``engine`` unless it gives a policy."""
    with collectors_over(lambda: request.getfixturevalue("engine")) as make:
        yield make


@pytest.fixture
def interrupt() -> Iterator[Interrupt]:
    """Sends a Ctrl-C to this thread once a condition holds."""
    with interrupts() as once:
        yield once
