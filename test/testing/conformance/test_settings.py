"""Settings that could not be asked for are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from torchrl_moe.testing.conformance import Settings


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tolerance": 0.0}, "tolerance must be positive, got 0"),
        ({"tie": -1.0}, "tie must not be negative, got -1"),
        ({"prompts": ()}, r"prompts must be lengths of at least 1, got \(\)"),
        ({"prompts": (3, 0)}, r"prompts must be lengths of at least 1, got \(3, 0\)"),
        ({"answer": 1}, "answer must be at least 2, got 1"),
        ({"long_answer": 3}, "long_answer must be at least 4, got 3"),
        ({"long_prompt": 1}, "long_prompt must be at least 2, got 1"),
        ({"samples": 1}, "samples must be at least 2, got 1"),
        ({"vocabulary": 1}, "vocabulary must be at least 2, got 1"),
    ],
)
def test_what_cannot_be_asked_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Settings(**given)


def test_the_defaults_are_for_float32() -> None:
    assert (Settings().tolerance, Settings().tie) == (1e-4, 1e-5)
