"""Answers generated in several parts: how turns are joined, and what a row says about its parts.

Joining keeps what an earlier turn knew of a token; a later turn fills only the gaps.

A later turn's prompt repeats the earlier turn's tokens. The engine prefills them again, perhaps with newer weights, so
its routes and log-probs of that prefix are not those the tokens were sampled with: the first writer wins.
"""

from __future__ import annotations

import torch
from torch import Tensor

RESUMES = ("none", "forced", "live")
"""How later parts of an answer may read the earlier ones again, best first."""


def shared_prefix(earlier_ids: Tensor, later_ids: Tensor) -> int:
    """Return the length of ``earlier_ids`` if ``later_ids`` begins with all of it, else 0.

    A later sequence that was rendered or cut differently shares nothing, even if its first tokens match: all its tokens
    are new.

    >>> shared_prefix(torch.tensor([1, 2]), torch.tensor([1, 2, 3]))
    2
    >>> shared_prefix(torch.tensor([1, 4]), torch.tensor([1, 2]))
    0
    """
    # All or nothing: once a token differs, what comes before it was not written by this conversation.
    length = len(earlier_ids)
    return length if torch.equal(earlier_ids, later_ids[:length]) else 0


def first_writer_wins(earlier: Tensor, later: Tensor) -> Tensor:
    """Return ``later`` ``[T1, ...]`` with its first rows from ``earlier`` ``[T0, ...]`` wherever that has a value.

    Unset is NaN in floating tensors, and -1 in integer ones.

    >>> first_writer_wins(torch.tensor([5, -1]), torch.tensor([7, 8, 9]))
    tensor([5, 8, 9])
    """
    rows = len(earlier)
    known = ~earlier.isnan() if earlier.is_floating_point() else earlier != -1
    return torch.cat([torch.where(known, earlier, later[:rows]), later[rows:]])


def num_segments(versions: Tensor) -> int:
    """Return the number of parts, each generated with other weights, from versions ``[T]``: -1 where nothing was.

    >>> num_segments(torch.tensor([-1, -1, 3, 3, 4, 6]))
    3
    """
    # A part ends where the next known version is another one.
    known = versions[versions >= 0]
    return int((known[1:] != known[:-1]).sum()) + 1 if len(known) else 0


def worst_resume(*hows: str) -> str:
    """Return the worst way in which parts were read again: ``"live"``, else ``"forced"``, else ``"none"``.

    >>> worst_resume("none", "forced")
    'forced'
    """
    return max(hows, key=RESUMES.index)
