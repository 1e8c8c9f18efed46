"""Fake engines for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.services import RestartingService
from support.waiting import until
from torchrl_moe.modules.serving import fleet as fleet_module
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
            until(lambda engine=engine: all(entry.inflight == 0 for entry in engine.replica_table))
    finally:
        for engine in made:
            engine.shutdown()


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RestartingService]]:
    """Makes services whose replicas are restarted; at the end no lease is held, no place taken, and all is ended."""
    monkeypatch.setattr(fleet_module, "TICK_SECONDS", 0.02)  # an idle replica's death is seen at the next look
    monkeypatch.setattr(fleet_module, "JOIN_SECONDS", 0.5)
    monkeypatch.setattr(fleet_module, "PEER_SECONDS", 0.5)
    made: list[RestartingService] = []

    def make(*args: Any, **kwargs: Any) -> RestartingService:
        made.append(RestartingService(*args, **kwargs))
        return made[-1]

    yield make
    try:
        for service in made:
            until(lambda service=service: all(entry.inflight == 0 for entry in service.replica_table))
            until(lambda service=service: service.admission.taken == service.admission.waiting == 0)
            assert not service._dispatcher._open
    finally:
        for service in made:
            service.shutdown()
    assert not [replica for service in made for line in service.made for replica in line if replica.is_alive()]
