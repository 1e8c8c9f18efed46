"""Where rows of prompts come from: Python objects, JSON Lines, functions, the Hugging Face hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from torchrl_moe.trainers.function_names import import_function, is_function_name

__all__ = ["HELD_OUT_SPLITS", "Row", "Rows", "is_path", "read_source"]

Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Sequence[Row]
HELD_OUT_SPLITS = ("held_out", "validation", "test")
"""Names of splits that are held out, in order of preference."""
PATH_MARKS = (".", "/", "~")
FILE_MARKS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".zst")
KINDS = "rows, a dataset, a .jsonl file or a folder of them, 'package.module:function', or a name on the hub"


def read_source(source: Any, arguments: Mapping[str, Any] | None = None) -> tuple[Rows, Rows | None]:
    """Return the rows to train on, and the held-out rows if the source has a held-out part.

    Args:
        source: see :func:`~torchrl_moe.trainers.prompts.load_prompts`.
        arguments: of a function, or of ``datasets.load_dataset``.

    Raises:
        ValueError: there is no such source, it is of another kind, or takes no arguments.
        ImportError: a name on the hub, and ``datasets`` is not installed.

    >>> read_source("json:loads", {"s": '[{"prompt": "1+1="}]'})
    ([{'prompt': '1+1='}], None)
    """
    if isinstance(source, str) and not is_path(source):
        if is_function_name(source):
            return _parts(import_function(source)(**(arguments or {})), source)
        return _parts(_from_hub(source, arguments or {}), source)
    if arguments:
        raise ValueError(f"arguments are for a function or a name on the hub, not for {_kind(source)}")
    if isinstance(source, str | os.PathLike):
        return _from_path(Path(source).expanduser()), None
    return _parts(source, _kind(source))


def _kind(source: Any) -> str:
    return repr(str(source)) if isinstance(source, str | os.PathLike) else f"a {type(source).__name__}"


def is_path(source: str) -> bool:
    """Whether a text names a file or a folder, rather than a function or a dataset of the hub.

    >>> is_path("./prompts"), is_path("rows.jsonl"), is_path("openai/gsm8k")
    (True, True, False)
    """
    is_written_as_one = source.startswith(PATH_MARKS) or source.lower().endswith(FILE_MARKS)
    return is_written_as_one or Path(source).is_dir() or Path(source).is_file()


# -- JSON Lines -------------------------------------------------------------------------------------------------------


def _from_path(path: Path) -> Rows:
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise ValueError(f"there is no .jsonl file in the folder {str(path)!r}")
    elif path.is_file():
        files = [path]
    else:
        raise ValueError(f"there is no file or folder {str(path)!r}")
    return [row for file in files for row in _lines(file)]


def _lines(file: Path) -> Iterator[Row]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
                raise ValueError(f"{file}, line {number}: not JSON ({error}){_way(file)}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{file}, line {number}: must be an object, got {_shown(row)}{_way(file)}")
            yield row


def _way(file: Path) -> str:
    is_lines = file.suffix.lower() == ".jsonl"
    return (
        "; each line is one object" if is_lines else "; files are JSON Lines: read others yourself, and give the rows"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- objects ----------------------------------------------------------------------------------------------------------


def _from_hub(name: str, arguments: Mapping[str, Any]) -> Any:
    try:
        hub = import_module("datasets")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name!r} is no file, no folder and no 'package.module:function', so it is a dataset on the Hugging Face "
            "hub, which needs a package: pip install datasets"
        ) from error
    return hub.load_dataset(name, **arguments)


def _parts(found: Any, name: str) -> tuple[Rows, Rows | None]:
    """Return both parts of a source's content: rows, two collections of rows, or splits by name."""
    if isinstance(found, Mapping):
        return _splits(found, name)
    is_pair = isinstance(found, list | tuple) and len(found) == 2
    if is_pair and not any(isinstance(part, Mapping | str) for part in found):
        train, held_out = found
        return _rows(train, name), _rows(held_out, name)
    return _rows(found, name), None


def _splits(found: Mapping[str, Any], name: str) -> tuple[Rows, Rows | None]:
    names = list(found)
    if any(isinstance(part, str) or not isinstance(part, Iterable) for part in found.values()):
        raise ValueError(f"{name} with {', '.join(map(str, names))} is one row: write a list of rows")
    if any(isinstance(row, str) for part in found.values() if isinstance(part, list | tuple) for row in part):
        raise ValueError(
            f"{name} with {', '.join(map(str, names))} holds columns: write a list of rows, such as "
            "[{'prompt': text}]; or of splits to rows"
        )
    if "train" not in found and len(names) != 1:
        raise ValueError(f"{name} has no split 'train'; it has {', '.join(map(str, names)) or 'none'}")
    train = "train" if "train" in found else names[0]
    held_out = next((split for split in HELD_OUT_SPLITS if split in found and split != train), None)
    return _rows(found[train], name), None if held_out is None else _rows(found[held_out], name)


def _rows(found: Any, name: str) -> Rows:
    """Return a collection of rows; a dataset is returned as it is, and stays on disk."""
    if hasattr(found, "column_names"):
        if not hasattr(found, "__len__"):
            raise ValueError(f"{name} is a streamed dataset, whose rows cannot be indexed: load it without streaming")
        return found
    if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
        raise ValueError(f"prompts must be {KINDS}; got {_shown(found)}")
    if hasattr(found, "to_dict") and hasattr(found, "columns"):
        raise ValueError(f"{name} is no list of rows: give its to_dict('records')")
    rows = list(found)
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            example = "a mapping of columns, such as {'prompt': text}"
            raise ValueError(f"{name}: row {place} must be {example}, got {_shown(row)}")
    return rows
