"""Tasks of ``reasoning-gym`` as data and reward: ``data.source=reasoning_gym:chain_sum``.

The package generates questions and verifies answers; a run names a task and its options. Loaded only when it is used.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from torchrl_moe._checks import check_bool, check_number, shown

__all__ = ["check_reasoning_task", "is_reasoning_task", "reasoning_rows", "reasoning_score"]

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
        return {entry["question"]: _row(entry, name, instruction, chat) for entry in entries}

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
        _note_unread(task, shown(given), f"{type(error).__name__}: {error}")
        return 0.0


_UNREAD: set[str] = set()


def _note_unread(task: str, given: str, error: str) -> None:
    if task not in _UNREAD:
        _UNREAD.add(task)
        LOG.warning(
            "the scorer of %s cannot read %s (%s): the reward is 0, here and for all such answers", task, given, error
        )


def _row(entry: Mapping[str, Any], task: str, instruction: str, chat: bool) -> dict[str, Any]:
    text = f"{entry['question']}\n{instruction}" if instruction else entry["question"]
    prompt = [{"role": "user", "content": text}] if chat else text
    # as text, because collectors keep mappings as nested data; of Python, because scorers tell tuples from lists
    metadata = repr({name: _literal(value) for name, value in entry["metadata"].items()})
    return {"prompt": prompt, "answer": entry["answer"], "task": task, "metadata": metadata}


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
            "data.source=reasoning_gym:... needs the package reasoning-gym: pip install reasoning-gym"
        ) from error
    return reasoning_gym


def check_reasoning_task(source: str, arguments: Mapping[str, object]) -> None:
    """Refuse a task or an option that is not there, and a task that runs answers; as :func:`reasoning_rows`.

    ``arguments`` are that function's. It makes no rows, so it is quick.
    """
    name, tasks = source.removeprefix(PREFIX), _package().factory.DATASETS
    if name not in tasks:
        raise ValueError(f"{source}: there is no such task{_near(name, list(tasks))}")
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


def _near(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names)
    return f"; near it are {', '.join(close)}" if close else f"; there are {len(names)}, such as {', '.join(names[:4])}"
