"""How an engine is asked, and what counts as equal."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Settings"]

LEAST = {"answer": 2, "long_prompt": 2, "long_answer": 4, "samples": 2, "vocabulary": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the requests to an engine, and tolerances.

    The defaults are for float32 on both sides, which proves the mapping. In bfloat16 the scores of routers and words
    differ by rounding alone: set the two tolerances that your model needs.

    Raises:
        ValueError: an invalid setting.
    """

    tolerance: float = 1e-4
    """Of log-probs."""
    tie: float = 1e-5
    """Experts whose router scores differ by no more than this are tied: either choice is right."""
    prompts: tuple[int, ...] = (1, 5, 17, 40)
    """Tokens of the prompts of plain answers."""
    answer: int = 12
    """Tokens of a plain answer."""
    long_prompt: int = 300
    """Tokens of a prompt that is prefilled in several chunks, and cached: several times
    the tokens of an engine step, and of a cache block."""
    long_answer: int = 150
    """Tokens of an answer that is interrupted."""
    samples: int = 3
    """Answers to one prompt, for ``n > 1``."""
    vocabulary: int = 256
    """Prompts have ids below this, or below the model's vocabulary if that is smaller, special ids left out."""
    seed: int = 0
    """Seed of prompts and of altered weights."""
    patience: float = 120.0
    """Seconds that a call of ``generate`` or ``resume`` may take."""

    def __post_init__(self) -> None:
        if not self.tolerance > 0:
            raise ValueError(f"tolerance must be positive, got {self.tolerance:g}")
        if not self.tie >= 0:
            raise ValueError(f"tie must not be negative, got {self.tie:g}")
        if not self.prompts or min(self.prompts) < 1:
            raise ValueError(f"prompts must be lengths of at least 1, got {self.prompts}")
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
