"""Splitting a batch by tokens, so that each part fits into memory."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["micro_batches"]


def micro_batches(lengths: Sequence[int], max_tokens: int | None) -> list[list[int]]:
    """Return the samples of each part: padded to its longest sample, a part has at most ``max_tokens`` tokens.

    Samples of like length stand together, longest first, so that few pads are computed. A sample that is longer than
    ``max_tokens`` is a part of its own.

    Args:
        lengths: tokens of each sample.
        max_tokens: of a part; ``None``: all samples are one part.

    Raises:
        ValueError: ``max_tokens`` is below 1.

    >>> micro_batches([5, 9, 4, 8], max_tokens=18)
    [[1, 3], [0, 2]]
    """
    if max_tokens is None:
        return [list(range(len(lengths)))] if lengths else []
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):  # stable: ties keep their order
        longest = lengths[parts[-1][0]] if parts else 0
        if parts and longest * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts
