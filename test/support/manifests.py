"""How often manifests are made: each is read, or published."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from torchrl_moe.weight_update.store import Manifest


def count_made(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Return a count, by version, that goes up whenever this process makes a manifest."""
    made: Counter[int] = Counter()
    plain = Manifest.__init__

    def count(self: Manifest, version: int, *rest: Any) -> None:
        made[version] += 1
        plain(self, version, *rest)

    monkeypatch.setattr(Manifest, "__init__", count)
    return made
