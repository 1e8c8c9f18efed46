"""Checks of weight updates: answers after an update, and answers that continue over one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrl_moe.testing.conformance.adapter import NotOffered, Sampling
from torchrl_moe.testing.conformance.findings import Finding
from torchrl_moe.testing.conformance.interruptions import crossed_by_update

if TYPE_CHECKING:
    from torchrl_moe.testing.conformance.judge import Judge
    from torchrl_moe.testing.conformance.sampled import Sampled
    from torchrl_moe.testing.conformance.trial import Trial

__all__ = ["rows_over_update", "update", "versions", "versions_over_update"]


@dataclass(frozen=True, slots=True)
class Updated:
    """Answers to one prompt before and after a weight update, the judge of the second, and the engine's versions."""

    before: Sampled
    after: Sampled
    judge: Judge
    versions: tuple[int | None, int | None]


def updated(trial: Trial) -> Updated:
    """Send a long prompt, update the weights, and send it again; the model's own weights are restored afterwards."""
    prompt, sampling = trial.prompt(trial.settings.long_prompt, seed=6), Sampling(max_tokens=trial.settings.answer)
    before, version = trial.ask([prompt], sampling)[0], trial.version()
    try:
        judge = trial.judge.by(trial.switch_weights())
        return Updated(before, trial.ask([prompt], sampling)[0], judge, (version, trial.version()))
    finally:
        trial.restore_weights()


def versions(trial: Trial) -> Finding:
    """Every token has a version, that of the engine's weights."""
    served = trial.version()
    answers = trial.ask([trial.prompt(9, seed=7)], Sampling(max_tokens=trial.settings.answer))
    found = [version for sampled in answers for version in sampled.versions]
    wanted = found[0] if served is None else served
    wrong = sum(version != wanted for version in found)
    serving = "does not say what it serves" if served is None else f"serves {served}"
    said = ", ".join(map(str, sorted(set(found))))
    return Finding(wrong, 0, f"tokens of {len(found)} with a wrong version; they say {said}, and the engine {serving}")


def update(trial: Trial) -> Finding:
    """After an update answers come from the new weights, also for a prompt that is cached from the old ones."""
    found = trial.once(updated)
    off = found.judge.gap(found.after)[0]
    stale = trial.judge.gap(found.after)[0]
    allowed = trial.settings.tolerance
    old, new = found.versions
    if old is not None and new is not None and new <= old:
        off = float("inf")
    if off <= allowed and stale <= 10 * allowed:
        raise NotOffered(
            f"other weights hardly change this model's log-probs: by {stale:.1e}, with {allowed:.1e} allowed"
        )
    return Finding(
        off,
        allowed,
        f"largest difference of log-probs after an update (of the old weights: {stale:.1e}); "
        f"{found.after.answer.num_cached_tokens} tokens of the prompt cached; version {old}, then {new}",
    )


def versions_over_update(trial: Trial) -> Finding:
    """Tokens of an answer that continues over an update have the version that made them."""
    found = trial.once(crossed_by_update)
    labels, boundary = found.sampled.versions, found.boundary
    old, new = found.versions
    wanted_old = labels[0] if old is None else old
    wanted_new = new if new is not None else max(labels) if max(labels) != wanted_old else None
    wrong = sum(label != wanted_old for label in labels[:boundary])
    wrong += sum(label == wanted_old or label != wanted_new for label in labels[boundary:])
    said = " then ".join(f"{labels.count(version)} of version {version}" for version in dict.fromkeys(labels))
    return Finding(
        wrong,
        0,
        f"tokens of {len(labels)} with another version; the old weights made {boundary}, the engine says {said}",
    )


def rows_over_update(trial: Trial) -> Finding:
    """Rows stay beside the log-probs that they were sampled with when an answer continues over an update."""
    found = trial.once(crossed_by_update)
    tokens = len(found.sampled.prompt) + found.boundary
    faults = found.before.faults(found.sampled, tokens=tokens)
    off = found.before.parity(found.sampled, tokens=tokens)
    others = ""
    if faults.wrong:
        again = found.after.faults(found.sampled, tokens=tokens)
        if (again.wrong or 0) < faults.wrong:
            others = f"; with the new weights {again.wrong} are wrong: the rows were recomputed, the log-probs were not"
    return Finding(
        faults.count / max(faults.rows, 1),
        0,
        f"share of rows beside old tokens that the old weights do not choose, {faults.text}; log-probs under them are "
        f"off by {off:.1e}{others}",
    )
