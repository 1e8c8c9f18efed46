"""Checks of answers that are aborted, and that continue afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torchrl_moe.testing.conformance.adapter import NotOffered, Resumes
from torchrl_moe.testing.conformance.background import in_thread, result
from torchrl_moe.testing.conformance.findings import DoesNotHold, Finding
from torchrl_moe.testing.conformance.interruptions import cut_midway

if TYPE_CHECKING:
    from torchrl_moe.testing.conformance.judge import Judge
    from torchrl_moe.testing.conformance.sampled import Sampled
    from torchrl_moe.testing.conformance.trial import Trial

__all__ = ["abort", "resume", "resumed_tail"]


@dataclass(frozen=True, slots=True)
class Resumed:
    """An aborted answer, the complete answer that it became, and a judge with the weights that made its second part."""

    part: Sampled
    whole: Sampled
    judge: Judge
    has_other_weights: bool


def resumed(trial: Trial) -> Resumed:
    """Abort an answer, change the weights if the engine takes new ones, and continue the answer."""
    engine = trial.adapter
    if not isinstance(engine, Resumes):
        raise NotOffered("the adapter has no resume(prompt, answer, sampling)")
    part = trial.once(cut_midway)
    try:
        has_other_weights = _switched(trial)
        judge = trial.judge_now
        going_on = in_thread(lambda: engine.resume(part.prompt, part.answer, part.sampling))
        answer = result(going_on, trial.settings.patience)
    finally:
        trial.restore_weights()
    from torchrl_moe.testing.conformance.sampled import Sampled

    whole = Sampled(part.prompt, part.sampling, answer)
    if len(whole.tokens) <= len(part.tokens):
        raise DoesNotHold(f"an answer cut after {len(part.tokens)} tokens has {len(whole.tokens)} after it continued")
    return Resumed(part, whole, judge, has_other_weights)


def abort(trial: Trial) -> Finding:
    """An aborted answer says so, and has what it made: tokens, log-probs, and the rows of all tokens but the last."""
    part = trial.once(cut_midway)
    faults = trial.judge.faults(part)
    reason = part.answer.finish_reason
    if part.answer.log_probs is not None:
        part.check_log_probs()
    return Finding(
        faults.count + (reason != "abort"),
        0,
        f"faults in an answer cut after {len(part.tokens)} tokens, finish_reason {reason!r}, {faults.text}",
    )


def resume(trial: Trial) -> Finding:
    """A continued answer keeps what was delivered (tokens, log-probs, versions, rows), and has all other rows."""
    found = trial.once(resumed)
    part, whole = found.part, found.whole
    tokens, rows = len(part.tokens), len(part.ids) - 1
    delivered, kept = (np.sort(trial.judge.routes(sampled)[:rows], -1) for sampled in (part, whole))
    changed = {
        "tokens": _differing(part.tokens, whole.tokens[:tokens]),
        "log-probs": 0 if part.answer.log_probs is None else int((part.log_probs != whole.log_probs[:tokens]).sum()),
        "versions": 0 if part.answer.versions is None else _differing(part.versions, whole.versions[:tokens]),
        "rows": int((delivered != kept).any((1, 2)).sum()) if len(delivered) == len(kept) else rows,
    }
    missing = int((~trial.judge.known(whole)).any(1).sum())
    surplus = max(0, len(trial.judge.routes(whole)) - len(whole.ids))
    named = ", ".join(f"{count} of the {name}" for name, count in changed.items() if count) or "none"
    between = "other weights" if found.has_other_weights else "the same weights, where recomputed rows look the same"
    cut = whole.answer.finish_reason == "abort"
    return Finding(
        sum(changed.values()) + missing + surplus + cut,
        0,
        f"entries delivered with {tokens} tokens that changed when it continued with {between}: {named}; {missing} "
        f"rows missing, {surplus} too many, finish_reason {whole.answer.finish_reason!r}",
    )


def resumed_tail(trial: Trial) -> Finding:
    """After an abort, log-probs are those of a model that follows all rows, those from before it included."""
    found = trial.once(resumed)
    tokens = len(found.part.tokens)
    off = found.judge.parity(found.whole, since=tokens)
    return Finding(
        off,
        trial.settings.tolerance,
        f"largest difference of {len(found.whole.tokens) - tokens} log-probs after the cut"
        + (", with other weights than before" if found.has_other_weights else ""),
    )


def _switched(trial: Trial) -> bool:
    """Change the engine's weights, if it takes new ones; return whether it did."""
    try:
        trial.switch_weights()
    except NotOffered:
        return False
    return True


def _differing(one: list[int], two: list[int]) -> int:
    return int(np.sum(np.array(one) != np.array(two)))
