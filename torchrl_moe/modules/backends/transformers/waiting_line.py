"""The answers that wait to join the batch, and the prompts that wait for their scores: who is next, and who fits."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence

from torchrl_moe.modules.backends.transformers.answer import Answer
from torchrl_moe.modules.backends.transformers.engine_args import EngineArguments
from torchrl_moe.modules.backends.transformers.running import Running

__all__ = ["WaitingLine"]


class WaitingLine:
    """First come, first served, or by priority.

    Args:
        arguments: of the engine.
        token_bytes: bytes of a token's keys and values.
        may_run: whether a request may continue now.
    """

    def __init__(self, arguments: EngineArguments, token_bytes: int, may_run: Callable[[Running], bool]) -> None:
        self._arguments, self._token_bytes, self._may_run = arguments, token_bytes, may_run
        self._serial = itertools.count()
        self._answers: list[tuple[int, int, Running, Answer]] = []  # a heap, as the next one
        self._scored: list[tuple[int, int, Running]] = []

    def __len__(self) -> int:
        return len(self._answers) + len(self._scored)

    def add(self, running: Running) -> None:
        """Add a request's answers, or its prompt if it is to be scored."""
        turn = running.request.priority if self._arguments.scheduling_policy == "priority" else 0
        if running.request.scoring is not None:
            heapq.heappush(self._scored, (turn, next(self._serial), running))
        for answer in running.answers:
            heapq.heappush(self._answers, (turn, next(self._serial), running, answer))

    def drop(self, gone: Running) -> None:
        """Remove a request."""
        self._answers = [entry for entry in self._answers if entry[2] is not gone]
        self._scored = [entry for entry in self._scored if entry[2] is not gone]
        heapq.heapify(self._answers)
        heapq.heapify(self._scored)

    def next_scored(self) -> Running | None:
        """Take the request whose prompt is scored next, if one may run."""
        runs = [entry for entry in self._scored if self._may_run(entry[2])]
        if not runs:
            return None
        first = min(runs)
        self._scored.remove(first)
        heapq.heapify(self._scored)
        return first[2]

    def joining(self, inside: Sequence[Answer], again: Sequence[Answer]) -> list[Answer]:
        """Take what may join the batch now.

        Args:
            inside: the answers in it.
            again: answers to be read again; they join before others.

        Returns:
            As many as there is room for and one step may read, where one may always be read; those of ``again`` first.
        """
        joining: list[Answer] = []
        held, now, widest = [], time.monotonic(), 0
        for answer in again:
            widest = max(widest, len(answer.ids))
            if self._is_too_much(len(joining), widest):
                return joining
            joining.append(answer)
        while self._answers:
            entry = heapq.heappop(self._answers)
            _, _, running, answer = entry
            if not self._may_run(running):
                held.append(entry)
                continue
            widest = max(widest, len(answer.ids))
            if self._is_too_much(len(joining), widest) or not self._has_room([*inside, *joining, answer]):
                held.append(entry)
                break
            running.joined_at = running.joined_at or now
            joining.append(answer)
        for entry in held:
            heapq.heappush(self._answers, entry)
        return joining

    def _is_too_much(self, others: int, widest: int) -> bool:
        """Whether one more is too much for a step: all are padded to the widest."""
        return others > 0 and (others + 1) * widest > self._arguments.max_num_batched_tokens

    def _has_room(self, batch: Sequence[Answer]) -> bool:
        budget = self._arguments.kv_cache_memory_bytes
        needed = len(batch) * max(answer.longest for answer in batch) * self._token_bytes
        return len(batch) <= self._arguments.max_num_seqs and (budget is None or needed <= budget)
