"""Checks of the form of routes: rows, dtype, layers without a router, the last token, values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torchrl_moe.testing.conformance.adapter import NotOffered
from torchrl_moe.testing.conformance.findings import Finding

if TYPE_CHECKING:
    from torchrl_moe.testing.conformance.trial import Trial

__all__ = ["dense_layers", "dtype", "last_token", "rows", "values"]


def rows(trial: Trial) -> Finding:
    """One row for each token but the last."""
    off, worst = 0, ""
    for sampled in trial.plain:
        count, tokens = len(trial.judge.routes(sampled)), len(sampled.ids)
        known = int(trial.judge.known(sampled).any(1).sum())
        surplus = max(0, count - tokens)
        if tokens - 1 - known + surplus > off:
            off = tokens - 1 - known + surplus
            worst = f"; {tokens} tokens have {count} rows, {known} of them known"
    return Finding(off, 0, f"rows too few or too many, at worst of {len(trial.plain)} answers{worst}")


def dtype(trial: Trial) -> Finding:
    """The narrowest signed integer that holds -1 and all experts."""
    wanted = trial.judge.layout.numpy_dtype
    for sampled in trial.plain:
        trial.judge.routes(sampled)  # raises if they are invalid
    found = {str(np.asarray(sampled.answer.routed_experts).dtype) for sampled in trial.plain}
    wrong = found - {str(wanted)}
    return Finding(len(wrong), 0, f"wrong types: routes are {', '.join(sorted(found))}, wanted {wanted}")


def dense_layers(trial: Trial) -> Finding:
    """Layers without a router hold -1."""
    layers = list(trial.judge.layout.dense_layers)
    if not layers:
        raise NotOffered("every layer of the model has a router")
    entries = np.concatenate([trial.judge.routes(sampled)[:, layers].ravel() for sampled in trial.plain])
    wrong = entries[entries != -1]
    example = f", such as {int(wrong[0])}" if len(wrong) else ""
    return Finding(len(wrong), 0, f"entries of {len(entries)} in layers {layers} that are not -1{example}")


def last_token(trial: Trial) -> Finding:
    """The last token was never an input: it has no row, or one of -1."""
    filled = 0
    for sampled in trial.plain:
        beyond = trial.judge.routes(sampled)[len(sampled.ids) - 1 :, list(trial.judge.layout.moe_layers)]
        filled += bool((beyond != -1).any())
    return Finding(filled, 0, f"answers of {len(trial.plain)} in which the last token has experts")


def values(trial: Trial) -> Finding:
    """Expert ids exist, and none occurs twice in a row of one layer."""
    layout = trial.judge.layout
    faulty, total, example = 0, 0, ""
    for sampled in trial.plain:
        found = trial.judge.routes(sampled)[:, list(layout.moe_layers)].reshape(-1, layout.top_k)
        ordered = np.sort(found, -1)
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1)
        outside = ((found < -1) | (found >= layout.num_experts)).any(-1)
        bad = twice | outside
        faulty, total = faulty + int(bad.sum()), total + len(bad)
        if bad.any() and not example:
            example = f", such as {found[bad][0].tolist()}"
    return Finding(faulty, 0, f"rows of {total} with an expert outside 0..{layout.num_experts - 1}, or twice{example}")
