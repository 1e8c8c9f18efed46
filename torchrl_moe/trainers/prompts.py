"""Prompts to train on, and held-out prompts, from any source."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from torch.utils.data import DataLoader, Dataset

from torchrl_moe._checks import check_number, shown
from torchrl_moe.modules.policies.prompt_reading import options_of
from torchrl_moe.modules.policies.prompts import plain_message
from torchrl_moe.trainers.prompt_sources import Row, Rows, read_source

__all__ = ["PromptSet", "load_prompts"]


def load_prompts(
    source: Any,
    *,
    prompt: str | None = "prompt",
    held_out: int = 0,
    seed: int = 0,
    arguments: Mapping[str, Any] | None = None,
) -> PromptSet:
    """Read prompts.

    Args:
        source: one of

            - rows: a sequence of mappings, each with a prompt and whatever columns the rewards read;
            - a dataset of the package ``datasets``, or a mapping of splits to datasets or rows. ``"train"`` is
              trained on, the first of ``"held_out"``, ``"validation"`` and ``"test"`` is held out;
            - the path of a ``.jsonl`` file, an object on each line, or of a folder, all of whose ``.jsonl`` files are
              read in the order of their names;
            - ``"package.module:function"``, which is called with ``arguments``, and returns any of the above
              except a path, or a pair: rows to train on, and held-out rows;
            - any other text: a name on the Hugging Face hub, for ``datasets.load_dataset(source, **arguments)``.
        prompt: column of the prompts. A prompt is text, sent as one user message, or a list of messages, ``{"role":
            ..., "content": ...}``, with whatever else the chat template reads, such as ``name`` or ``tool_calls``.
            ``None``: rows need no such column. Columns ``tools`` and ``chat_template_kwargs`` are for the template.
        held_out: number of rows to keep out of training, drawn with ``seed``. If the source has a held-out part, that
            many rows are drawn from it; 0 keeps all of it.
        seed: of that draw.
        arguments: of the function or of ``load_dataset``, such as ``{"name": "main", "split": "train"}``.

    Raises:
        ValueError: there is no such source; a row without a prompt, or with one of another kind; no data; or
            ``held_out`` is as large as the data, or larger than its held-out part.
        ImportError: a name on the hub, and ``datasets`` is not installed.

    >>> rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(10)]
    >>> prompts = load_prompts(rows, held_out=2)
    >>> len(prompts.train), len(prompts.held_out), prompts.columns
    (8, 2, ('prompt', 'answer'))
    """
    check_number("held_out", held_out, 0, whole=True)
    if not isinstance(prompt, str | None):
        raise ValueError(f"prompt must be the name of a column, or None, got {shown(prompt)}.")
    train, kept_out = read_source(source, arguments)
    if not len(train):
        raise ValueError("there are no rows to train on")
    if kept_out is None:
        if held_out >= len(train):
            raise ValueError(f"held_out={held_out} leaves none of {len(train)} rows to train on")
        drawn = random.Random(seed).sample(range(len(train)), held_out)
        left = sorted(set(range(len(train))) - set(drawn))
        train, kept_out = (_select(train, left) if drawn else train), _select(train, drawn)
    elif held_out > len(kept_out):
        raise ValueError(f"held_out={held_out} is more than the {len(kept_out)} rows that the source holds out")
    elif held_out:
        kept_out = _select(kept_out, random.Random(seed).sample(range(len(kept_out)), held_out))
    return PromptSet(train, kept_out, prompt)


@dataclass(frozen=True)
class PromptSet:
    """Rows to train on and rows held out, checked.

    Args:
        train: rows with a prompt each, and whatever else rewards read.
        held_out: the same, never trained on.
        prompt: column of the prompts: text, or a list of messages; ``None``: rows need none.

    Attributes:
        columns: names of all columns that any row has, in order of first appearance.

    Raises:
        ValueError: nothing to train on, or a row without a prompt, or with one of another kind.

    >>> prompts = PromptSet([{"prompt": "1+1=", "answer": "2"}], [], "prompt")
    >>> [(row["prompt"], row["answer"]) for row in prompts.loader(seed=0)]
    [('1+1=', '2')]
    """

    train: Rows = field(repr=False)
    held_out: Rows = field(repr=False)
    prompt: str | None
    columns: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not len(self.train):
            raise ValueError("there are no rows to train on")
        columns: dict[str, None] = {}
        for part, rows in (("train", self.train), ("held_out", self.held_out)):
            for place, row in enumerate(rows):
                columns.update(dict.fromkeys(row))
                if self.prompt is not None:
                    _check_row(row, self.prompt, f"{part} row {place}")
        if not all(isinstance(name, str) for name in columns):
            raise ValueError(f"columns must be named by text, got {', '.join(map(repr, columns))}")
        object.__setattr__(self, "columns", tuple(columns))

    def loader(self, seed: int) -> DataLoader[TensorDict]:
        """Return training rows for a collector, one at a time: each pass over them is a new shuffle.

        A collector starts pass after pass, without end, and restores its position from the loader's ``generator``,
        which determines every order.

        Args:
            seed: of the shuffles.

        Returns:
            A loader that yields a TensorDict ``[]`` with an entry for each of :attr:`columns`: the value as it is in
            the row, not as a tensor; ``None`` where the row lacks the column.
        """
        return self._loader(self.train, shuffle=True, seed=seed)

    def held_out_loader(self) -> DataLoader[TensorDict]:
        """Return the rows held out, in their order, as :meth:`loader` yields them.

        Raises:
            ValueError: none are held out.
        """
        if not len(self.held_out):
            raise ValueError("no rows are held out: load them with held_out=n")
        # its own generator: a loader without one draws from torch's global one at the start of each pass
        return self._loader(self.held_out, shuffle=False, seed=0)

    def _loader(self, rows: Rows, shuffle: bool, seed: int) -> DataLoader[TensorDict]:
        return DataLoader(
            _RowData(rows, self.columns),
            batch_size=None,
            shuffle=shuffle,
            collate_fn=_unchanged,
            generator=torch.Generator().manual_seed(seed),
        )


class _RowData(Dataset[TensorDict]):
    def __init__(self, rows: Rows, columns: tuple[str, ...]) -> None:
        self._rows = rows
        self._columns = columns

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> TensorDict:
        row = self._rows[place]
        # otherwise a list would become a column of several rows, and a number a tensor
        return TensorDict({name: NonTensorData(row.get(name)) for name in self._columns})


def _unchanged(row: TensorDict) -> TensorDict:
    return row


def _select(rows: Rows, places: Sequence[int]) -> Rows:
    select = getattr(rows, "select", None)
    return [rows[place] for place in places] if select is None else select(places)


def _check_row(row: Row, column: str, where: str) -> None:
    if column not in row:
        there = ", ".join(map(repr, row)) or "none"
        raise ValueError(
            f"{where} has no column {column!r}; its columns are {there}: name the one with the prompts, "
            "config.data.prompt (or load_prompts(prompt=...))"
        )
    prompt = row[column]
    if not isinstance(prompt, str | list | tuple):
        raise ValueError(f"{where}: column {column!r} must be text or a list of messages, got {prompt!r:.60}")
    if not prompt:
        raise ValueError(f"{where}: column {column!r} must be text or a list of messages, and not empty")
    try:
        json.dumps(prompt, ensure_ascii=False, default=str).encode()  # half of a surrogate pair is no text
        options_of({}, row)
        where = f"{where}, column {column!r}"
        for message in () if isinstance(prompt, str) else prompt:
            plain_message(message)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
