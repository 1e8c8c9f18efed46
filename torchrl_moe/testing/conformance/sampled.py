"""An answer together with its prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchrl_moe.testing.conformance.adapter import Answer, NotOffered, Sampling
from torchrl_moe.testing.conformance.findings import DoesNotHold

__all__ = ["Sampled"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """An answer, and its prompt."""

    prompt: tuple[int, ...]
    sampling: Sampling
    answer: Answer

    @property
    def tokens(self) -> list[int]:
        """The answer's ids ``[G]``."""
        return [int(token) for token in self.answer.token_ids]

    @property
    def ids(self) -> Tensor:
        """Prompt and answer, int64 ``[T]``."""
        return torch.tensor([*self.prompt, *self.tokens])

    def with_routes(self, routes: Any) -> Sampled:
        """Return the same with other routes."""
        return replace(self, answer=replace(self.answer, routed_experts=routes))

    def check_log_probs(self) -> None:
        """Raise as :attr:`log_probs` does."""
        self.log_probs  # noqa: B018

    @property
    def log_probs(self) -> Tensor:
        """Log-probs of the answer's tokens, float32 ``[G]``.

        Raises:
            NotOffered: there are none.
            DoesNotHold: there are more or fewer than tokens.
        """
        if self.answer.log_probs is None:
            raise NotOffered("answers have no log-probs")
        values = torch.tensor([float(value) for value in self.answer.log_probs])
        if len(values) != len(self.tokens):
            raise DoesNotHold(f"{len(values)} log-probs for {len(self.tokens)} tokens")
        return values

    @property
    def versions(self) -> list[int]:
        """Versions of the answer's tokens; errors as of :attr:`log_probs`."""
        if self.answer.versions is None:
            raise NotOffered("answers have no versions")
        values = [int(value) for value in self.answer.versions]
        if len(values) != len(self.tokens):
            raise DoesNotHold(f"{len(values)} versions for {len(self.tokens)} tokens")
        return values
