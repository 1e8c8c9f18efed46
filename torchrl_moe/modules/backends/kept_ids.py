"""The words that sampling left for each token of an answer, as flat arrays, on their way from a worker to a rollout.

A worker names words token by token; a *step* is what it says of one: ``[position, *ids]``, or nothing where no word was
left out. The ids are those that were kept, or, where these would be more, those that were removed, as ``~id``.

Letters: G tokens of an answer, M ids of all its tokens together, R requests of a batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KeptIds", "name_kept"]


@dataclass(frozen=True, slots=True)
class KeptIds:
    """See :class:`~torchrl_moe.data.KeptTokens`, whose fields these become.

    Shapes:
        - ids: int32 ``[M]``
        - sizes: int32 ``[G]``: n ids that were kept, or -n that were removed; 0: no word was left out
    """

    ids: NDArray[np.int32]
    sizes: NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.ids.nbytes + self.sizes.nbytes

    @classmethod
    def of_steps(cls, steps: Sequence[NDArray[np.int32]], tokens: int) -> KeptIds | None:
        """Return what the steps of an answer of so many tokens say; ``None`` if no word was ever left out.

        >>> steps = [np.array([0, 5, 7]), np.array([]), np.array([2, ~3])]
        >>> KeptIds.of_steps(steps, 4)
        KeptIds(ids=array([5, 7, 3], dtype=int32), sizes=array([ 2,  0, -1,  0], dtype=int32))
        """
        said = [step for step in steps if len(step) and step[0] < tokens]
        if not said:
            return None
        sizes = np.zeros(tokens, np.int32)
        for step in said:
            sizes[step[0]] = len(step) - 1 if step[1] >= 0 else 1 - len(step)
        ids = np.concatenate([step[1:] for step in said]).astype(np.int32, copy=False)
        return cls(np.where(ids < 0, ~ids, ids), sizes)

    def first(self, tokens: int) -> KeptIds:
        """Return those of the first tokens."""
        sizes = self.sizes[:tokens]
        return KeptIds(self.ids[: int(np.abs(sizes).sum())], sizes)

    @classmethod
    def join(cls, parts: Sequence[KeptIds | None], tokens: Sequence[int]) -> KeptIds | None:
        """Return those of an answer in parts of so many tokens; ``None`` if no part has any."""
        if not any(part is not None for part in parts):
            return None
        filled = [
            cls(np.empty(0, np.int32), np.zeros(count, np.int32)) if part is None else part
            for part, count in zip(parts, tokens, strict=True)
        ]
        return cls(np.concatenate([part.ids for part in filled]), np.concatenate([part.sizes for part in filled]))


def name_kept(log_probs: Tensor, positions: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int64]] | None:
    """Return the steps of a batch, one after another, and where each begins; ``None`` if all words were kept.

    Args:
        log_probs: ``[R, V]``, -inf for words that were left out.
        positions: of the token of each request in its answer.

    Returns:
        ``[N]``, and ``[R + 1]``.
    """
    kept = log_probs > float("-inf")
    counts = kept.sum(-1)
    vocabulary = log_probs.shape[-1]
    shorter = 2 * counts <= vocabulary
    named = (kept == shorter[:, None]) & (counts < vocabulary)[:, None]
    rows, ids = (part.cpu().numpy() for part in named.nonzero(as_tuple=True))
    if not len(rows):
        return None
    ids = np.where(shorter.cpu().numpy()[rows], ids, ~ids).astype(np.int32)
    sizes = np.bincount(rows, minlength=len(log_probs))
    offsets = np.concatenate([[0], np.cumsum(sizes + (sizes > 0))])
    steps = np.empty(offsets[-1], np.int32)
    is_position = np.zeros(len(steps), bool)
    is_position[offsets[:-1][sizes > 0]] = True
    steps[is_position] = np.asarray(positions, np.int32)[sizes > 0]
    steps[~is_position] = ids
    return steps, offsets
