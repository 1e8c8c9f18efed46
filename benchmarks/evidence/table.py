"""A CSV of measurements that a stopped run continues: what it holds already is not measured again."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

__all__ = ["DATA", "KEYS", "VERSIONS", "Table"]

DATA = Path(__file__).parent / "data"
VERSIONS = {name: version(name) for name in ("torch", "transformers")}
KEYS: Mapping[str, tuple[str, ...]] = {
    "lengths": ("family", "layers", "experts", "top_k", "noise", "seed", "longest", "ages"),
    "gradients": ("family", "layers", "experts", "top_k", "noise", "masks", "seed", "ages"),
    "variances": ("family", "layers", "experts", "top_k", "noise", "masks", "seed", "ages"),
    "runs": ("task", "noise", "stale", "arm", "lr", "seed", "steps"),
    "real": ("task", "seed", "steps", "supervised"),
}
"""By file, the columns that say what was measured."""
Row = Mapping[str, object]


class Table:
    """The rows of one file. ``keys``: the columns that say what was measured, the seed among them."""

    def __init__(self, path: Path, keys: Iterable[str]) -> None:
        self.path, self.keys = path, tuple(keys)
        self.rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                self.rows = list(csv.DictReader(file))
        if self.rows and not {*self.keys} <= {*self.rows[0]}:
            raise ValueError(
                f"{path} has the columns {list(self.rows[0])}, and {list(self.keys)} are needed: move it away"
            )

    def holds(self, **what: object) -> bool:
        """Whether something was measured."""
        return self._key(what) in {self._key(row) for row in self.rows}

    def measure(self, function: Callable[..., Iterable[Row]], **what: object) -> None:
        """Call a function of what is to be measured, unless it was; its rows are appended together, or not at all."""
        if self.holds(**what):
            return
        found = [{**what, **row, **VERSIONS} for row in function(**what)]
        is_new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
            if is_new:
                writer.writeheader()
            elif self.rows and list(self.rows[0]) != list(found[0]):
                raise ValueError(
                    f"{self.path} has the columns {list(self.rows[0])}, and now there are {list(found[0])}"
                )
            writer.writerows(found)
        self.rows += [{name: str(value) for name, value in row.items()} for row in found]
        print(f"{self.path.stem}: {', '.join(f'{name}={value}' for name, value in what.items())}", flush=True)

    def _key(self, row: Row) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in self.keys)

    def select(self, **where: object) -> list[dict[str, str]]:
        """Return the rows with these values."""
        return [row for row in self.rows if all(row[name] == str(value) for name, value in where.items())]
