"""Numbers as people read them."""

from __future__ import annotations

import pytest

from torchrl_moe.render.tables import number_text, share_text


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (1234567, "1,234,567"), (2.0, "2"), (0.12345, "0.1235"), (1e-9, "1e-09"), (1e20, "1e+20"),
     (float("inf"), "inf"), (float("nan"), "–"), (None, "–"), (False, "False"), (-3.5, "-3.5")],
)  # fmt: skip
def test_a_number(value: float | None, expected: str) -> None:
    assert number_text(value) == expected


def test_a_share() -> None:
    assert [share_text(value) for value in (0.0, 0.5, None, float("nan"))] == ["0.0%", "50.0%", "–", "–"]
