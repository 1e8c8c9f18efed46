"""Settings of the checks, calls to an engine that may never answer, and results: as text, as HTML and as JSON."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias, TypeVar

from torchrl_moe.render.tables import html_table, plain_table

# Fewer tokens would leave a check nothing to look at: a long answer must have a middle, a prompt a second token.
LEAST = {"answer": 2, "long_prompt": 2, "long_answer": 4, "samples": 2, "vocabulary": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the requests to an engine, and tolerances.

    The defaults are for float32 on both sides, which proves the mapping. In bfloat16 router scores and log-probs differ
    by rounding alone: set the two tolerances that your model needs.

    Raises:
        ValueError: an invalid setting.
    """

    tolerance: float = 1e-4
    """Of log-probs."""
    tie: float = 1e-5
    """Experts whose router scores differ by no more than this are tied: either choice is right."""
    prompts: tuple[int, ...] = (1, 5, 17, 40)
    """Tokens of the prompts of plain answers."""
    answer: int = 12
    """Tokens of a plain answer."""
    long_prompt: int = 300
    """Tokens of a prompt that is prefilled in several chunks, and cached: several times
    the tokens of an engine step, and of a cache block."""
    long_answer: int = 150
    """Tokens of an answer that is interrupted."""
    samples: int = 3
    """Answers to one prompt, for ``n > 1``."""
    vocabulary: int = 256
    """Prompts have ids below this, or below the model's vocabulary if that is smaller, special ids left out."""
    seed: int = 0
    """Seed of prompts and of altered weights."""
    patience: float = 120.0
    """Seconds that a call of ``generate`` or ``resume`` may take."""

    def __post_init__(self) -> None:
        if not self.tolerance > 0:
            raise ValueError(f"tolerance must be positive, got {self.tolerance:g}")
        if not self.tie >= 0:
            raise ValueError(f"tie must not be negative, got {self.tie:g}")
        if not self.patience > 0:
            raise ValueError(f"patience must be positive, got {self.patience:g}")
        if not self.prompts or min(self.prompts) < 1:
            raise ValueError(f"prompts must be lengths of at least 1, got {self.prompts}")
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


class DoesNotHold(Exception):
    """A check fails in a way that cannot be given as a number; the message says how."""


Result = TypeVar("Result")


def in_thread(function: Callable[[], Result]) -> Future[Result]:
    """Run a function in its own thread; return a future of its result."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  it is raised where the result is read
            future.set_exception(error)

    # a daemon, and no pool: Python's end would wait for an engine that hangs
    threading.Thread(target=run, name="torchrl_moe-conformance", daemon=True).start()
    return future


def result(future: Future[Result], seconds: float) -> Result:
    """Wait for a future; an engine that takes longer does not hold."""
    try:
        return future.result(seconds)
    except TimeoutError as error:
        if future.done():  # the engine's own timeout
            raise
        raise DoesNotHold(f"the engine did not answer within {seconds:g} s") from error


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found: how far ``off`` the engine is, in the unit that ``seen`` names, and how far it may be."""

    off: float
    allowed: float
    seen: str


@dataclass(frozen=True, slots=True)
class RouteFaults:
    """How correct an answer's routes are: rows ``(token, layer)`` without a route, wrong rows, and ties.

    ``wrong`` is ``None`` where there is no model to compare with. ``largest`` is the largest gap of a router's scores.
    """

    rows: int
    missing: int
    wrong: int | None
    ties: int = 0
    largest: float = 0.0
    first: str = ""

    @property
    def count(self) -> int:
        return self.missing + (self.wrong or 0)

    @property
    def text(self) -> str:
        """One line for the report's last column."""
        judged = "no model to judge them" if self.wrong is None else f"{self.wrong} wrong, {self.ties} ties"
        return f"{self.rows} rows of tokens and layers: {self.missing} missing, {judged}{self.first}"


Verdict: TypeAlias = Literal["holds", "does not hold", "not offered"]
HEADER = ("check", "verdict", "off by", "allowed", "seen")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: of the check.
        meaning: what must hold.
        verdict: ``"not offered"`` if the engine, or its adapter, lacks what the check needs: that is not a pass.
        off: how far off the engine is, in the unit that ``seen`` names; ``None`` if that cannot be given as a number.
        allowed: the greatest value that holds.
        seen: what was examined and found.
        advice: what to do about a failure; empty otherwise.
    """

    name: str
    meaning: str
    verdict: Verdict
    off: float | None = None
    allowed: float | None = None
    seen: str = ""
    advice: str = ""

    @property
    def holds(self) -> bool:
        """Whether the check ran, and holds."""
        return self.verdict == "holds"

    @property
    def text(self) -> str:
        """The row as sentences."""
        off = f", off by {_number(self.off)} (allowed: {_number(self.allowed)})" if self.off is not None else ""
        advice = f" What to do: {self.advice}." if self.advice else ""
        return f"{self.name} {self.verdict}{off}: {self.seen}. What must hold: {self.meaning}.{advice}"


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """The results of all checks, in the order in which they ran.

    >>> row = CheckResult(name="dtype", meaning="as narrow as can be", verdict="holds", off=0, allowed=0, seen="int8")
    >>> print(ConformanceReport("MyEngine", (row,)))
    MyEngine: 1 holds, 0 do not hold, 0 not offered
    check  verdict  off by  allowed  seen
    dtype  holds         0        0  int8
    """

    engine: str
    results: tuple[CheckResult, ...]

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """Those that do not hold."""
        return tuple(result for result in self.results if result.verdict == "does not hold")

    def __getitem__(self, name: str) -> CheckResult:
        found = next((result for result in self.results if result.name == name), None)
        if found is None:
            raise KeyError(f"no check {name!r} in this report; there are {[result.name for result in self.results]}")
        return found

    @property
    def title(self) -> str:
        """The engine, and the number of checks per verdict."""
        counts = Counter(result.verdict for result in self.results)
        holding = f"{counts['holds']} hold{'s' if counts['holds'] == 1 else ''}"
        return f"{self.engine}: {holding}, {counts['does not hold']} do not hold, {counts['not offered']} not offered"

    def table(self) -> str:
        """Return the report as text: a line for each check, and what to do about those that do not hold."""
        table = plain_table(self.title, HEADER, self._rows(), wide=("check", "verdict", "seen"))
        return "\n".join([table, *self._advice()])

    __str__ = table

    def _repr_html_(self) -> str:
        return html_table(self.title, HEADER, self._rows(), note=" ".join(self._advice()))

    def _advice(self) -> list[str]:
        """Return what must hold, and what to do, once for all failures that share it."""
        # nine checks of log-probs share one sentence
        names: dict[tuple[str, str], list[str]] = {}
        for one in self.failures:
            names.setdefault((one.meaning, one.advice), []).append(one.name)
        return [f"{', '.join(of)}: {meaning}. What to do: {advice}." for (meaning, advice), of in names.items()]

    def _rows(self) -> list[list[str]]:
        return [[one.name, one.verdict, _number(one.off), _number(one.allowed), one.seen] for one in self.results]

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain data: ``engine``, ``holds`` (no failure) and a mapping for each of ``checks``."""
        rows = [asdict(result) for result in self.results]
        for row in rows:
            if row["off"] is not None and not math.isfinite(row["off"]):  # JSON has no infinity, and no NaN
                row["off"] = None
        return {"engine": self.engine, "holds": not self.failures, "checks": rows}

    def to_json(self, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)


def _number(value: float | None) -> str:
    # counts as they are, differences with their order of magnitude
    return "" if value is None else f"{value:.0f}" if float(value).is_integer() else f"{value:.1e}"
