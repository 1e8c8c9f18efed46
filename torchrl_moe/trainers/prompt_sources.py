"""Where rows of prompts come from: Python objects, JSON Lines, functions, the hub, tasks of ``reasoning-gym``."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import logging
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict
from torch.utils.data import DataLoader, Dataset

from torchrl_moe._checks import check_bool, check_number, shown
from torchrl_moe.modules.policies.prompts import options_of, plain_message
from torchrl_moe.trainers.function_names import import_function, is_function_name

Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Sequence[Row]
HELD_OUT_SPLITS = ("held_out", "validation", "test")
"""Names of splits that are held out, in order of preference."""
PATH_MARKS = (".", "/", "~")
FILE_MARKS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".zst")
KINDS = (
    "rows, a dataset, a .jsonl file or a folder of them, 'package.module:function', 'reasoning_gym:TASK', or a name on "
    "the hub"
)


def read_source(source: object, arguments: Mapping[str, object] | None = None) -> tuple[Rows, Rows | None]:
    """Return the rows to train on, and the held-out rows if the source has a held-out part.

    >>> read_source("json:loads", {"s": '[{"prompt": "1+1="}]'})
    ([{'prompt': '1+1='}], None)
    """
    found: Any = source
    options: dict[str, Any] = dict(arguments or {})
    name = str(source) if isinstance(source, str | os.PathLike) else f"a {type(source).__name__}"
    # a text is a path, a task of reasoning-gym, a function, or else a name on the hub
    if is_reasoning_task(source):
        found = reasoning_rows(name, **options)
    elif isinstance(source, str) and is_on_hub(source):
        found = import_hub(source).load_dataset(source, **options)
    elif isinstance(source, str) and not is_path(source):
        found = import_function(source)(**options)
    elif options:
        what = repr(name) if isinstance(source, str | os.PathLike) else name
        raise ValueError(f"arguments are for a function or a name on the hub, not for {what}")
    elif isinstance(source, str | os.PathLike):
        return _json_lines(Path(source).expanduser()), None
    # rows, two collections of rows, or splits by name
    if isinstance(found, Mapping):
        return _splits(found, name)
    # a pair is two collections, not two rows
    is_pair = isinstance(found, list | tuple) and len(found) == 2
    if is_pair and not any(isinstance(part, Mapping | str) for part in found):
        return _rows(found[0], name), _rows(found[1], name)
    return _rows(found, name), None


def is_path(source: str) -> bool:
    """Whether a text names a file or a folder, rather than a function or a dataset of the hub.

    >>> is_path("./prompts"), is_path("rows.jsonl"), is_path("openai/gsm8k")
    (True, True, False)
    """
    is_written_as_one = source.startswith(PATH_MARKS) or source.lower().endswith(FILE_MARKS)
    return is_written_as_one or Path(source).is_dir() or Path(source).is_file()


def is_on_hub(source: str) -> bool:
    """Whether a text names a dataset of the hub: it is no path, no function and no task of reasoning-gym.

    >>> is_on_hub("openai/gsm8k"), is_on_hub("rows.jsonl"), is_on_hub("my_task:rows"), is_on_hub("reasoning_gym:sums")
    (True, False, False, False)
    """
    return not (is_path(source) or is_function_name(source) or is_reasoning_task(source))


def import_hub(name: str) -> Any:
    """Return the module ``datasets``; an ``ImportError`` says why ``name`` needs it."""
    try:
        return import_module("datasets")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name!r} is no file, no folder and no 'package.module:function', so it is read from the Hugging Face "
            "hub, which needs an extra: pip install 'torchrl_moe[hub]'"
        ) from error


# -- JSON Lines
def _json_lines(path: Path) -> Rows:
    """Return the rows of a file, or of the files of a folder."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"there is no .jsonl file in the folder {str(path)!r}")
    if not (path.is_dir() or path.is_file()):
        raise ValueError(f"there is no file or folder {str(path)!r}")
    rows: list[Row] = []
    for file in files:
        way = "; files are JSON Lines: read others yourself, and give the rows"
        way = "; each line is one object" if file.suffix.lower() == ".jsonl" else way
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
                    raise ValueError(f"{file}, line {number}: not JSON ({error}){way}") from error
                if not isinstance(row, dict):
                    raise ValueError(f"{file}, line {number}: must be an object, got {shown(row)}{way}")
                rows.append(row)
    return rows


# -- objects


def _splits(found: Mapping[object, object], name: str) -> tuple[Rows, Rows | None]:
    names = list(found)
    # a mapping may also be a row, or columns: say what to write instead
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
        raise ValueError(f"prompts must be {KINDS}; got {shown(found)}")
    if hasattr(found, "to_dict") and hasattr(found, "columns"):
        raise ValueError(f"{name} is no list of rows: give its to_dict('records')")
    rows = list(found)
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            example = "a mapping of columns, such as {'prompt': text}"
            raise ValueError(f"{name}: row {place} must be {example}, got {shown(row)}")
    return rows


def load_prompts(
    source: object,
    *,
    prompt: str | None = "prompt",
    held_out: int = 0,
    seed: int = 0,
    arguments: Mapping[str, object] | None = None,
) -> PromptSet:
    """Read prompts.

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
    # held out are rows drawn from those to train on, or from the source's own held-out part
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
        # every row: a mistake in the last one would else end the run after hours
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
        """
        return self._loader(self.train, shuffle=True, seed=seed)

    def held_out_loader(self) -> DataLoader[TensorDict]:
        """Return the rows held out, in their order, as :meth:`loader` yields them."""
        if not len(self.held_out):
            raise ValueError("no rows are held out: load them with held_out=n")
        # its own generator: a loader without one draws from torch's global one at the start of each pass
        return self._loader(self.held_out, shuffle=False, seed=0)

    def _loader(self, rows: Rows, shuffle: bool, seed: int) -> DataLoader[TensorDict]:
        data, generator = cast("Dataset[TensorDict]", rows), torch.Generator().manual_seed(seed)
        return DataLoader(data, None, shuffle, collate_fn=partial(_entries, self.columns), generator=generator)


def _entries(columns: Sequence[str], row: Row) -> TensorDict:
    # otherwise a list would become a column of several rows, and a number a tensor
    return TensorDict({name: NonTensorData(row.get(name)) for name in columns})


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
    prompt, must = row[column], f"{where}: column {column!r} must be text or a list of messages"
    if not isinstance(prompt, str | list | tuple):
        raise ValueError(f"{must}, got {prompt!r:.60}")
    if not prompt:
        raise ValueError(f"{must}, and not empty")
    try:
        json.dumps(prompt, ensure_ascii=False, default=str).encode()  # half of a surrogate pair is no text
        options_of({}, row)
        where = f"{where}, column {column!r}"
        for message in () if isinstance(prompt, str) else prompt:
            plain_message(message)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


# Tasks of ``reasoning-gym``: the package generates questions and verifies answers. Loaded only when it is used.
LOG = logging.getLogger(__name__)
PREFIX = "reasoning_gym:"
NOT_READ = (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What some scorers of the package raise on an answer that has not the form they read."""
RUNS_ANSWERS = {
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24"),
    *("simple_integration", "spiral_matrix", "string_insertion"),
}
"""Tasks whose scorers give an answer to Python's ``eval``, in 0.1.25: what a model writes then runs in this process."""


def is_reasoning_task(source: object) -> bool:
    """Whether a source of data names a task of reasoning-gym; the task need not exist.

    >>> is_reasoning_task("reasoning_gym:chain_sum"), is_reasoning_task("my_task:rows")
    (True, False)
    """
    return isinstance(source, str) and source.startswith(PREFIX)


def reasoning_rows(
    source: str,
    *,
    size: int = 1000,
    held_out: int = 100,
    seed: int = 0,
    instruction: str = "",
    chat: bool = True,
    run_answers: bool = False,
    **options: Any,
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a task, ``"train"`` and ``"held_out"``: no held-out question is among those to train on.

    Args:
        source: ``"reasoning_gym:NAME"``.
        size: questions to train on, at most: each is there once, and none of those held out.
        held_out: questions that are held out, at most.
        seed: of the questions; another seed gives others.
        instruction: is written below each question, such as ``"Answer with the number only."``
        chat: whether prompts are messages, for models with a chat template, or texts.
        run_answers: allow tasks whose scorers run an answer as Python: it can do all that this process can, or never
            end.
        options: of the task, such as ``max_terms=2`` of ``chain_sum``.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: there is no such task, it runs answers, or it has no such option or value.
    """
    check_number("size", size, 1, whole=True)
    check_number("held_out", held_out, 0, whole=True)
    check_number("seed", seed, 0, whole=True)
    check_bool("chat", chat)
    if not isinstance(instruction, str):
        raise ValueError(f"instruction must be text, got {shown(instruction)}")
    check_bool("run_answers", run_answers)
    check_reasoning_task(source, {**options, "run_answers": run_answers})
    name, gym = source.removeprefix(PREFIX), _package()

    def rows(count: int, part: int) -> dict[str, dict[str, Any]]:
        # entry i of seed s is that of s + i: seeds side by side would share nearly all questions
        own = int(np.random.SeedSequence([seed, part]).generate_state(1)[0] >> 1)
        try:
            entries = list(gym.create_dataset(name, size=count, seed=own, **options)) if count else []
        except (AssertionError, AttributeError, TypeError, ValueError) as error:  # its own checks of values
            raise ValueError(f"{source}: {error}") from error
        found = {}
        for entry in entries:
            question = entry["question"]
            text = f"{question}\n{instruction}" if instruction else question
            # as text, because collectors keep mappings as nested data; of Python: scorers tell tuples from lists
            metadata = repr({key: _literal(value) for key, value in entry["metadata"].items()})
            prompt = [{"role": "user", "content": text}] if chat else text
            found[question] = {"prompt": prompt, "answer": entry["answer"], "task": name, "metadata": metadata}
        return found

    kept = rows(held_out, 1)
    train = [row for question, row in rows(size, 0).items() if question not in kept]
    if not train:
        raise ValueError(f"{source}: all questions are held out: lower held_out, which is {held_out}")
    return {"train": train, **({"held_out": list(kept.values())} if kept else {})}


def reasoning_score(completion: Any, answer: Any, task: str, metadata: str) -> float:
    """Return a task's own score of a completion, mostly 0 to 1: of what stands in ``<answer>`` tags, else of all of it.

    The other arguments are columns of :func:`reasoning_rows`. An answer on which the task's scorer raises is worth 0,
    and the first one of each task is logged.
    """
    gym = _package()
    text = completion if isinstance(completion, str) else "".join(str(message["content"]) for message in completion)
    inside = gym.utils.extract_answer(text)
    entry = {"question": "", "answer": answer, "metadata": ast.literal_eval(metadata)}
    given, scorer = text.strip() if inside is None else inside, gym.get_score_answer_fn(task)
    try:
        return float(scorer(given, entry))
    except NOT_READ as error:
        if task not in _UNREAD:
            _UNREAD.add(task)
            LOG.warning(
                "the scorer of %s cannot read %s (%s: %s): the reward is 0, here and for all such answers",
                *(task, shown(given), type(error).__name__, error),
            )
        return 0.0


_UNREAD: set[str] = set()


def _literal(value: object) -> object:
    try:
        ast.literal_eval(repr(value))
    except (ValueError, SyntaxError):  # an object of the task's own
        return json.loads(json.dumps(value, default=str))
    return value


def _package() -> ModuleType:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ImportError(
            "data.source=reasoning_gym:... needs the package reasoning-gym: pip install 'torchrl_moe[real]'"
        ) from error
    return reasoning_gym


def check_reasoning_task(source: str, arguments: Mapping[str, object]) -> None:
    """Refuse a task or an option that is not there, and a task that runs answers; as :func:`reasoning_rows`.

    ``arguments`` are that function's. It makes no rows, so it is quick.
    """
    name, tasks = source.removeprefix(PREFIX), _package().factory.DATASETS
    if name not in tasks:
        close, first = difflib.get_close_matches(name, tasks), ", ".join([*tasks][:4])
        near = f"near it are {', '.join(close)}" if close else f"there are {len(tasks)}, such as {first}"
        raise ValueError(f"{source}: there is no such task; {near}")
    if name in RUNS_ANSWERS and arguments.get("run_answers") is not True:
        raise ValueError(
            f"{source}: the scorer of this task runs what a model writes as Python, in this process. If you accept "
            "that, set data.arguments.run_answers=true"
        )
    settings = [field.name for field in dataclasses.fields(tasks[name][1])]
    for option in arguments.keys() - inspect.signature(reasoning_rows).parameters.keys():
        if option not in settings:
            known = ", ".join(setting for setting in settings if setting not in ("seed", "size"))
            raise ValueError(f"{source} has no option {option!r}; it has {known}")
