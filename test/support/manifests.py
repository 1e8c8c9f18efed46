"""How often manifests are made, and where: each is read, or published."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest

from torchrl_moe.store import Manifest


def note_made(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[threading.Thread]]:
    """Return by version the threads in which this process makes manifests from now on."""
    made: dict[int, list[threading.Thread]] = defaultdict(list)
    plain = Manifest.__init__

    def note(self: Manifest, version: int, *rest: Any) -> None:
        made[version].append(threading.current_thread())
        plain(self, version, *rest)

    monkeypatch.setattr(Manifest, "__init__", note)
    return made
