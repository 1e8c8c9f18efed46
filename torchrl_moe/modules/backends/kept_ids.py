"""The words that sampling left for each token of an answer, as flat arrays, on their way from a worker to a rollout.

A worker reports words token by token; a *step* is its report on one token: ``[position, *ids]``, empty where no word
was left out. The ids are those that were kept or, where fewer were removed, the removed ones, as ``~id``.

Letters: G tokens of an answer, M ids of all its tokens together, R requests of a batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchrl_moe._errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KeptIds", "leaves_words_out", "name_kept"]

NOTHING = np.empty(0, np.int32)
KEEPS_ALL: Mapping[str, tuple[Any, ...]] = {
    "top_k": (None, 0, -1),
    "top_p": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "min_tokens": (None, 0),
    "bad_words": (None, [], ()),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
}
"""Sampling parameters that leave words out -> values with which they do not."""


def leaves_words_out(value_of: Callable[[str], Any]) -> str | None:
    """Return a sampling parameter that may leave words out of what a token is drawn from; ``None`` if there is none.

    Args:
        value_of: the value of a parameter, by its name.

    >>> leaves_words_out({"top_p": 0.95}.get), leaves_words_out({"top_p": 1.0, "top_k": -1}.get)
    ('top_p', None)
    """
    return next((name for name, values in KEEPS_ALL.items() if value_of(name) not in values), None)


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
        """Join the steps of an answer of ``tokens`` tokens; ``None`` if no word was left out of any.

        Raises:
            EngineError: a token comes twice or out of order, or has no words at all.

        >>> steps = [np.array([0, 5, 7]), np.array([]), np.array([2, ~3])]
        >>> KeptIds.of_steps(steps, 4)
        KeptIds(ids=array([5, 7, 3], dtype=int32), sizes=array([ 2,  0, -1,  0], dtype=int32))
        """
        said = [step for step in steps if len(step) and step[0] < tokens]
        places = [int(step[0]) for step in said]
        if any(one >= later for one, later in pairwise(places)) or any(len(step) == 1 for step in said):
            raise EngineError(
                f"the engine reported kept words for the tokens {places}: positions must ascend, and each needs a word"
            )
        if not said:
            return None
        sizes = np.zeros(tokens, np.int32)
        for step in said:
            sizes[step[0]] = len(step) - 1 if step[1] >= 0 else 1 - len(step)
        ids = np.concatenate([step[1:] for step in said]).astype(np.int32, copy=False)
        return cls(np.where(ids < 0, ~ids, ids), sizes)

    @classmethod
    def of_masks(cls, masks: Sequence[Sequence[int]], tokens: int) -> KeptIds | None:
        """Join the words of each of ``tokens`` tokens, ``~id`` if they are those that were removed; empty: all kept.

        Raises:
            EngineError: some were left out, and there are not as many masks as tokens.

        >>> KeptIds.of_masks([[5, 7], [], [~3]], 3)
        KeptIds(ids=array([5, 7, 3], dtype=int32), sizes=array([ 2,  0, -1], dtype=int32))
        """
        if not any(len(mask) for mask in masks):
            return None
        if len(masks) != tokens:
            raise EngineError(f"the engine reported the kept words of {len(masks)} tokens, of an answer of {tokens}")
        steps = [np.array([place, *mask], np.int32) for place, mask in enumerate(masks) if len(mask)]
        return cls.of_steps(steps, tokens)

    def first(self, tokens: int) -> KeptIds:
        """Return the words of the first ``tokens`` tokens."""
        sizes = self.sizes[:tokens]
        return KeptIds(self.ids[: int(np.abs(sizes).sum())], sizes)

    @classmethod
    def join(cls, parts: Sequence[KeptIds | None], tokens: Sequence[int]) -> KeptIds | None:
        """Join the parts of an answer, each with its number of tokens; ``None`` if no word was left out of any part."""
        if not any(part is not None for part in parts):
            return None
        filled = [
            cls(np.empty(0, np.int32), np.zeros(count, np.int32)) if part is None else part
            for part, count in zip(parts, tokens, strict=True)
        ]
        return cls(np.concatenate([part.ids for part in filled]), np.concatenate([part.sizes for part in filled]))


def name_kept(log_probs: Tensor, positions: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int64]] | None:
    """Return the steps of a batch, concatenated, and their offsets; ``None`` if all words were kept.

    Args:
        log_probs: ``[R, V]``, -inf for words that were left out.
        positions: of the token of each request in its answer.

    Returns:
        ``[N]``, and ``[R + 1]``.
    """
    kept = (log_probs > float("-inf")).cpu().numpy()
    vocabulary = kept.shape[1]
    steps = []
    for row, count, position in zip(kept, np.count_nonzero(kept, axis=1).tolist(), positions, strict=True):
        if count == vocabulary:
            steps.append(NOTHING)
            continue
        ids = np.flatnonzero(row) if 2 * count <= vocabulary else ~np.flatnonzero(~row)
        steps.append(np.concatenate([[position], ids]).astype(np.int32))
    offsets = np.cumsum([0, *map(len, steps)])
    return (np.concatenate(steps), offsets) if offsets[-1] else None
