"""Splitting a batch by tokens, so that each part fits into memory."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import TensorDictBase, lazy_stack

from torchrl_moe.trainers.rank_group import Ranks

__all__ = ["in_rows", "micro_batches", "micro_batches_of_ranks"]


def in_rows(batch: TensorDictBase) -> TensorDictBase:
    """Return a batch, ``[B]``, whose parts share its rows: what is written to one of them is in the other.

    Parts of a dense TensorDict would be copies. A lazy stack is such a batch already, and keeps its rows.
    """
    return lazy_stack(list(batch.unbind(0)))


def micro_batches(lengths: Sequence[int], max_tokens: int | None, at_least: int = 0) -> list[list[int]]:
    """Return the samples of each part: padded to its longest sample, a part has at most ``max_tokens`` tokens.

    Samples of similar length are grouped, longest first, to keep padding low. A sample that is longer than
    ``max_tokens`` is a part of its own.

    Args:
        lengths: tokens of each sample.
        max_tokens: of a part; ``None``: all samples are one part.
        at_least: least number of parts; those with most samples are halved, and when each has one sample, empty parts
            are added.

    Raises:
        ValueError: ``max_tokens`` is below 1.

    >>> micro_batches([5, 9, 4, 8], max_tokens=18)
    [[1, 3], [0, 2]]
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    whole = [list(range(len(lengths)))] if lengths else []
    parts = whole if max_tokens is None else _packed(lengths, max_tokens)
    while len(parts) < at_least:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]), default=0)
        samples = parts[largest] if parts else []
        if len(samples) < 2:
            return parts + [[]] * (at_least - len(parts))
        half = len(samples) // 2
        parts[largest : largest + 1] = [samples[:half], samples[half:]]
    return parts


def _packed(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):  # stable: ties keep their order
        longest = lengths[parts[-1][0]] if parts else 0
        if parts and longest * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def micro_batches_of_ranks(lengths: Sequence[int], max_tokens: int | None, ranks: Ranks) -> list[list[int]]:
    """Return the samples of each part, as many parts on each rank: forward passes of a shared model are collectives.

    All ranks must call. A rank with too few samples gets empty parts, for which it runs a sample and discards the
    result.
    """
    own = micro_batches(lengths, max_tokens)
    return micro_batches(lengths, max_tokens, max(ranks.gather(len(own))))
