"""Prompts from a dataloader, one by one, with their positions, so that a collector can continue where it stopped."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor


class StreamState(TypedDict):
    """A stream's place in its data, for a checkpoint."""

    position: int
    epoch_position: int
    epoch_rng: Tensor | None
    again: dict[int, TensorDictBase]
    """Rows that were read and not used, by position."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data."""

    position: int
    data: TensorDictBase

    @property
    def excerpt(self) -> str:
        """The row, cut to a line."""
        text = ", ".join(f"{key}={value!r}" for key, value in self.data.to_dict().items())
        return text if len(text) <= 200 else f"{text[:197]}..."


class PromptStream:
    """Endless rows of a dataloader, which is iterated again when it is exhausted.

    >>> stream = PromptStream([{"query": ["a", "b"]}, {"query": ["c"]}])
    >>> [next(stream).data["query"] for _ in range(4)]
    ['a', 'b', 'c', 'a']
    """

    def __init__(self, dataloader: Iterable[object]) -> None:
        self._dataloader = dataloader
        self._rows: deque[TensorDictBase] = deque()
        self._again: deque[Prompt] = deque()
        self._iterator: Iterator[object] | None = None
        self.position = 0
        """Rows read so far. Those that come again after a restore are counted once."""
        self._epoch_position = 0  # where this epoch began
        self._epoch_rng: Tensor | None = None

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        """Return the next row."""
        if self._again:
            return self._again.popleft()
        prompt = Prompt(self.position, self._next_row())
        self.position += 1
        return prompt

    @property
    def next_position(self) -> int:
        """The position of the next row."""
        return self._again[0].position if self._again else self.position

    def seed(self, seed: int) -> None:
        """Seed what shuffles the data, from the next epoch on; this is the first one if nothing was read."""
        _rng(self._dataloader).manual_seed(seed)

    def _next_row(self) -> TensorDictBase:
        for _ in range(2):  # this epoch, and the next
            while not self._rows and (batch := self._next_batch()) is not None:
                self._rows.extend(_rows_of(batch))
            if self._rows:
                return self._rows.popleft()
        raise ValueError("the dataloader yields nothing")

    def _next_batch(self) -> object:
        begins = None
        if self._iterator is None:
            # an epoch is shuffled as it begins: with this state it can be read again
            begins = _rng(self._dataloader).get_state()
            self._iterator = iter(self._dataloader)
        batch = next(self._iterator, None)
        if batch is None:
            self._iterator = None
        elif begins is not None:  # data that can be read once have no further epoch, and stay at the end of this one
            self._epoch_position, self._epoch_rng = self.position, begins
        return batch

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self, unfinished: Iterable[Prompt] = ()) -> StreamState:
        """Return the position of the stream; ``unfinished`` rows come again after a restore."""
        again = {prompt.position: prompt.data for prompt in (*self._again, *unfinished)}
        return {
            "position": self.position,
            "epoch_position": self._epoch_position,
            "epoch_rng": self._epoch_rng,
            "again": dict(sorted(again.items())),
        }

    def load_state_dict(self, state: StreamState) -> None:
        """Continue where another stream of the same data stopped; the current epoch is read again up to there."""
        self._rows.clear()
        self._iterator = None
        self.position = self._epoch_position = state["epoch_position"]
        self._epoch_rng = state["epoch_rng"]
        # a dataloader cannot seek: shuffle as then, and read up to the position
        rng = _rng(self._dataloader)
        before = rng.get_state()
        if state["epoch_rng"] is not None:
            rng.set_state(state["epoch_rng"])
        self._again.clear()
        for _ in range(state["position"] - state["epoch_position"]):
            next(self)
        if rng is torch.default_generator:  # it is not ours
            rng.set_state(before)
        self._again = deque(Prompt(position, data) for position, data in state["again"].items())


def _rows_of(batch: object) -> Iterable[TensorDictBase]:
    """Return the rows of what a dataloader yields, each of batch size ``[]``."""
    if is_tensor_collection(batch):
        rows: TensorDictBase = batch
        return rows.unbind(0) if rows.ndim else [rows]
    if isinstance(batch, Mapping):
        sizes = {
            len(value)
            for value in batch.values()
            if isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.ndim)
        }
        if not sizes:  # a mapping without a column is a row
            return [TensorDict(dict(batch))]
        if len(sizes) > 1:
            raise ValueError(f"the columns of a batch have different lengths: {sorted(sizes)}")
        if ambiguous := [name for name, value in batch.items() if _is_of_one_row(value)]:
            raise ValueError(
                f"a mapping with lists is a batch with a row for each item, but {ambiguous[0]!r} is of one row: make "
                f"it a list, too; for a single row, which has lists, put all in lists: {{{ambiguous[0]!r}: [...], ...}}"
            )
        return TensorDict(dict(batch), batch_size=list(sizes)).unbind(0)
    if isinstance(batch, list | tuple):
        return [row for part in batch for row in _rows_of(part)]
    raise TypeError(
        f"the dataloader must yield mappings or TensorDicts, got {type(batch).__name__}: give it a collate_fn"
    )


def _is_of_one_row(value: object) -> bool:
    """Whether a value is a plain one, or the messages of a conversation, so that it can't be a column."""
    if isinstance(value, list | tuple) and value:
        return all(isinstance(item, Mapping) and {"role", "content"} <= item.keys() for item in value)
    return value is None or isinstance(value, str | bytes | bool | int | float)


def _rng(dataloader: object) -> torch.Generator:
    """Return what shuffles the data: torch's global generator, unless the dataloader has one of its own."""
    generator = getattr(dataloader, "generator", None)
    generator = getattr(getattr(dataloader, "sampler", None), "generator", None) if generator is None else generator
    return torch.default_generator if generator is None else generator
