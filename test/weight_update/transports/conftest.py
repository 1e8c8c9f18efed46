"""Where groups meet on this host, until a test is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchrl_moe.weight_update.transports.gloo import MeetingPlace


@pytest.fixture
def place() -> Iterator[MeetingPlace]:
    made = MeetingPlace()
    yield made
    made.close()
