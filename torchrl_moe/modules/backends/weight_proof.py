"""What shows that an engine computes with the trainer's weights: both give a prompt's tokens the same log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchrl_moe._errors import WeightSyncError

__all__ = ["compare_log_probs"]


def compare_log_probs(got: Sequence[float], expected: Sequence[float], tolerance: float) -> None:
    """Compare the engine's log-probs of a prompt's tokens with the trainer's.

    Raises:
        WeightSyncError: their numbers differ, or they differ by more than the tolerance; the largest difference is
            named.

    Example:
        >>> compare_log_probs([-1.0, -2.0], [-1.0, -2.5], tolerance=1e-3)
        Traceback (most recent call last):
        ...
        torchrl_moe._errors.WeightSyncError: the new weights' log-probs differ from the trainer's by up to 5.0e-01 \
(at token 2: -2 and -2.5), allowed: 1.0e-03
    """
    if len(got) != len(expected):
        raise WeightSyncError(f"the canary has {len(expected)} log-probs for a prompt of {len(got) + 1} tokens")
    differences = [abs(ours - theirs) for ours, theirs in zip(got, expected, strict=True)]
    if all(difference <= tolerance for difference in differences):  # also false of NaN
        return
    place = max(range(len(got)), key=lambda i: math.inf if math.isnan(differences[i]) else differences[i])
    raise WeightSyncError(
        f"the new weights' log-probs differ from the trainer's by up to {differences[place]:.1e} "
        f"(at token {place + 1}: {got[place]:.6g} and {expected[place]:.6g}), allowed: {tolerance:.1e}"
    )
