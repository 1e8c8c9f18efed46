"""What commands share: exit codes, their description, results as text or JSON. Imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TextIO, TypeVar

FINE, PROBLEM, BAD_USE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: all is well; a problem was found, or the command failed midway; invalid use; Ctrl-C."""


class BadUse(Exception):
    """What was asked for cannot be done; the message says what to change."""


P = ParamSpec("P")
T = TypeVar("T")


class NamedStream:
    """A text stream whose errors name it, as errors of files name their path."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._named(self._stream.write, text)

    def flush(self) -> None:
        self._named(self._stream.flush)

    def _named(self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return do(*args, **kwargs)
        except OSError as error:
            error.filename = error.filename or self._name
            raise


@dataclass(frozen=True, slots=True)
class Output:
    """Where results go: stdout, where nothing else is written under ``--json``."""

    stream: TextIO | NamedStream
    is_json: bool

    def show(self, text: str, data: object, *, indent: int | None = 2) -> None:
        """Write a result.

        >>> Output(sys.stdout, is_json=True).show("", {"a": (1, float("nan"))}, indent=None)
        {"a": [1, null]}
        """
        if self.is_json:
            text = json.dumps(_plain(data), indent=indent, allow_nan=False)
        print(text, file=self.stream, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of ``torchrl-moe``: its help, its options, and what runs it."""

    name: str
    help: str
    description: str
    examples: Sequence[tuple[str, str]]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Output], int]
    after_interrupt: str = "nothing was left running"
    keeps_logs: bool = False

    @property
    def epilog(self) -> str:
        """The examples, as its help shows them."""
        return f"examples:\n{listing(self.examples, '  ')}\n\nexit codes: 0 fine, 1 a problem was found, 2 bad use"


def listing(lines: Mapping[str, str] | Sequence[tuple[str, str]], indent: str = "") -> str:
    """Return names beside what each says, a line for each.

    >>> print(listing({"rows": "one for each token", "abort": "says so"}))
    rows   one for each token
    abort  says so
    """
    # two columns, the first as wide as its longest entry
    pairs = list(lines.items()) if isinstance(lines, Mapping) else list(lines)
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{indent}{name:<{width}}  {what}" for name, what in pairs)


def note(text: str) -> None:
    """Print progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    # JSON has no NaN
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
