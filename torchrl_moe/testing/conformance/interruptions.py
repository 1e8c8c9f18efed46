"""Answers that are interrupted while they are generated, by an abort or by a weight update.

Only the engine knows how far an answer is. The moment of an abort is found by trial: at half of the time that a whole
answer takes, then earlier or later. Around an update answers are requested one after the other, so that one is in
flight. Durations are not judged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrl_moe.testing.conformance.adapter import Aborts, NotOffered, Sampling
from torchrl_moe.testing.conformance.report import DoesNotHold, in_thread, result

if TYPE_CHECKING:
    from torchrl_moe.testing.conformance.judge import Judge, Sampled
    from torchrl_moe.testing.conformance.trial import Trial

ABORTS = 10  # attempts to cut an answer midway
UPDATES = 8  # attempts to have an answer in flight at an update
CANDIDATES = 12  # of the answers around an update, the last ones are compared with both models


@dataclass(frozen=True, slots=True)
class Crossed:
    """An answer that continued over a weight update."""

    sampled: Sampled
    before: Judge
    after: Judge
    boundary: int
    versions: tuple[int | None, int | None]


def cut_midway(trial: Trial) -> Sampled:
    """Return the first part of an aborted answer."""
    engine = trial.adapter
    if not isinstance(engine, Aborts):
        raise NotOffered("the adapter has no abort(request_ids)")
    sampling, prompt = Sampling(max_tokens=trial.settings.long_answer), trial.prompt(20, seed=4)
    # The first try comes at half the time that a whole answer takes.
    start = time.monotonic()
    trial.ask([prompt], sampling)
    delay, seen = (time.monotonic() - start) / 2, []
    for attempt in range(ABORTS):
        name = f"conformance-cut-{attempt}"
        future = in_thread(lambda name=name: trial.ask([prompt], sampling, [name])[0])  # type: ignore[misc]
        wait([future], delay)
        engine.abort([name])
        sampled = result(future, trial.settings.patience)
        tokens = len(sampled.tokens)
        if 1 < tokens < sampling.max_tokens:  # of one token there are no rows but the prompt's
            return sampled
        seen.append(tokens)
        # too late is halved, too early grows by less, so the two do not alternate for ever
        delay *= 0.5 if tokens > 1 else 1.8
    raise DoesNotHold(f"no abort cut an answer of {sampling.max_tokens} tokens midway: they came back with {seen}")


def crossed_by_update(trial: Trial) -> Crossed:
    """Return an answer that continued over a weight update; the model's own weights are restored when this returns."""
    trial.check_updates()
    seen: list[str] = []
    try:
        for _ in range(UPDATES):
            # Ask for answers, update meanwhile, and look for one whose log-probs change weights on the way.
            before, old = trial.judge_now, trial.version()
            answers = _asked_during(trial, trial.switch_weights)[-CANDIDATES:]
            for sampled in reversed(answers):
                boundary = before.fitting(sampled)
                if 0 < boundary < len(sampled.tokens):
                    return Crossed(sampled, before, trial.judge_now, boundary, (old, trial.version()))
            reasons = {sampled.answer.finish_reason for sampled in answers}
            seen.append(" and ".join(map(repr, sorted(reasons))))
            if "abort" in reasons:
                break  # it ends requests at an update, so no further attempt will find one
    finally:
        trial.restore_weights()
    raise NotOffered(f"no answer continued over a weight update; those in flight ended with {', '.join(seen)}")


def _asked_during(trial: Trial, act: Callable[[], object]) -> list[Sampled]:
    """Call a function while long answers are requested one by one; return them: the last was in flight then."""
    prompt, sampling = trial.prompt(20, seed=5), Sampling(max_tokens=trial.settings.long_answer)
    answers: list[Sampled] = []
    seconds = [0.0]  # that the first answer took
    begun, over = threading.Event(), threading.Event()

    def ask() -> list[Sampled]:
        started = time.perf_counter()
        try:
            while not over.is_set():
                answers.extend(trial.ask([prompt], sampling, [f"conformance-update-{len(answers)}"]))
                if not begun.is_set():
                    seconds[0] = time.perf_counter() - started
                begun.set()
        finally:
            begun.set()  # an error, too, ends the wait below
        return answers

    future = in_thread(ask)
    try:
        begun.wait(trial.settings.patience)
        # in the middle of the next answer: an engine that updates at once would do so between the two
        time.sleep(seconds[0] / 2)
        act()
    finally:
        over.set()
    return result(future, trial.settings.patience)
