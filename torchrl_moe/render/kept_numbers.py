"""From how many words tokens were sampled, where sampling left some out."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchrl_moe import _checks
from torchrl_moe.render.legends import legend_above

__all__ = ["KEPT_LABELS", "kept_counts", "kept_figure", "kept_label", "kept_rows"]

KEPT = (1, 4, 16, 64)
KEPT_LABELS = ("1 word", "2 to 4 words", "5 to 16 words", "17 to 64 words", "more words", "all but some", "all words")


def kept_label(size: int) -> str:
    """Return the words for a size of ``KeptTokens``: n words, ``-n`` for all but n, 0 for all.

    >>> [kept_label(size) for size in (1, 2, 4, 5, 100, -3, 0)]
    ['1 word', '2 to 4 words', '2 to 4 words', '5 to 16 words', 'more words', 'all but some', 'all words']
    """
    if size <= 0:
        return KEPT_LABELS[-1 if size == 0 else -2]
    return KEPT_LABELS[bisect_right(KEPT, size - 1)]


def kept_rows(sizes: Any) -> list[tuple[str, str]]:
    """Return how many tokens have sizes of each label, as rows of a table; integers of any shape, see above."""
    counts: Counter[str] = Counter()
    for size, count in zip(*np.unique(np.asarray(sizes), return_counts=True), strict=True):
        counts[kept_label(int(size))] += int(count)
    return [(label, f"{counts[label]:,}") for label in KEPT_LABELS if counts[label]]


def kept_counts(sizes: Any, sampled: Any, vocabulary: int) -> Any:
    """Return how many words each sampled token was sampled from: int64 ``[N]``.

    Args:
        sizes: integers of any shape, ``KeptTokens.sizes``: n words, ``-n`` for all but n, 0 for all.
        sampled: bool of the same shape: the tokens that count, ``("masks", "all_assistant_mask")``.
        vocabulary: words that there are.

    Raises:
        ValueError: two shapes, or a size beyond the vocabulary.

    >>> kept_counts(np.array([0, 2, -1, 0]), np.array([False, True, True, True]), vocabulary=9)
    array([2, 8, 9])
    """
    sizes, sampled = np.asarray(sizes), np.asarray(sampled).astype(bool)
    _checks.check_same_shape({"sizes": sizes, "sampled": sampled})
    _checks.check_integer("sizes", sizes)
    counts = sizes[sampled].astype(np.int64)
    if counts.size and abs(counts).max() > vocabulary:
        raise ValueError(f"a token was sampled from {abs(counts).max()} words, and there are {vocabulary}")
    return np.where(counts > 0, counts, vocabulary + counts)


def kept_figure(counts: Mapping[str, Any], vocabulary: int, title: str = "") -> Any:
    """Draw what share of the tokens was sampled from how many words, on a log scale from 1 to the vocabulary.

    Args:
        counts: by label (``"top_p=0.9"``, say), numbers of words of any shape, see :func:`kept_counts`.
        vocabulary: words that there are.
        title: of the figure.

    Returns:
        A matplotlib figure.

    Raises:
        ImportError: matplotlib is missing; the message names the extra.
        ValueError: a count is not in 1..vocabulary.
    """
    from torchrl_moe.render.figures import NotebookFigure

    flat = {label: np.asarray(values).reshape(-1) for label, values in counts.items()}
    for label, values in flat.items():
        if values.size and not 1 <= values.min() <= values.max() <= vocabulary:
            raise ValueError(f"{label}: counts must be in 1..{vocabulary}, got {values.min()}..{values.max()}")
    edges = _edges(vocabulary)
    figure = NotebookFigure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, values in flat.items():
        shares = np.histogram(values, edges)[0] / max(1, len(values))
        median = f", median {int(np.median(values))}" if len(values) else ""
        axes.stairs(shares, edges, label=f"{label}, {len(values)} tokens{median}")
    axes.axvline(vocabulary, linestyle=":", color="grey", label=f"the vocabulary, {vocabulary}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="words that a token was sampled from", ylabel="share of tokens")
    axes.grid(alpha=0.3)
    legend_above(axes, title or "kept words per token")
    return figure


def _edges(vocabulary: int) -> Any:
    """Return edges of bins between whole numbers, each about twice as wide as the one before."""
    powers = [2**power for power in range(max(1, vocabulary).bit_length())]
    return np.array([*(power - 0.5 for power in powers), vocabulary + 0.5])
