"""Senders that are shut down when their test is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.weights import Connect, Fleet, fleets, senders


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes a sender for an engine."""
    with senders() as make:
        yield make


@pytest.fixture
def fleet(connect: Connect) -> Fleet:
    """Makes an engine of so many fake replicas, and a sender for it."""
    return fleets(connect)
