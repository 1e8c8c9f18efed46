"""Fake engines for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from modules.serving.calls import eventually
from torchrl_moe.testing import FakeAsyncVLLM


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeAsyncVLLM]]:
    """Makes engines; whatever a test did to them, no lease is held at its end."""
    made: list[FakeAsyncVLLM] = []

    def make(*args: Any, **kwargs: Any) -> FakeAsyncVLLM:
        made.append(FakeAsyncVLLM(*args, **kwargs))
        return made[-1]

    yield make
    try:
        for engine in made:
            eventually(lambda engine=engine: all(entry.inflight == 0 for entry in engine.roster))
    finally:
        for engine in made:
            engine.shutdown()
