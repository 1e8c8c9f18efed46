"""Stands for a ``Dataset`` of the package ``datasets``: rows by place, columns by name, and no list of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class FakeDataset:
    """As ``datasets.Dataset``: a row is a new dict with all columns, ``None`` where it has none."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = list(rows)
        self.column_names = list(dict.fromkeys(name for row in rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {name: self._rows[place].get(name) for name in self.column_names}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[place] for place in range(len(self)))

    def select(self, places: Sequence[int]) -> FakeDataset:
        """Return the rows at some places."""
        return FakeDataset([self[place] for place in places])


class FakeDatasetDict(dict[str, FakeDataset]):
    """As ``datasets.DatasetDict``: splits by name."""

    @property
    def column_names(self) -> dict[str, list[str]]:
        """Columns of each split."""
        return {name: split.column_names for name, split in self.items()}


class FakeStream:
    """As ``datasets.IterableDataset``: it has columns, and no length."""

    column_names = ("prompt",)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{"prompt": "1+1="}])
