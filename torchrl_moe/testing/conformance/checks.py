"""All checks by name, in the order in which they run. Naming them loads neither torch nor transformers.

A check is a function with ``@checked``, which has its advice; the first line of its docstring is what must hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from torchrl_moe.testing.conformance.adapter import EngineAdapter, NotOffered, Resumes, Sampling
from torchrl_moe.testing.conformance.interruptions import crossed_by_update, cut_midway
from torchrl_moe.testing.conformance.report import (
    CheckResult,
    ConformanceReport,
    DoesNotHold,
    Finding,
    RouteFaults,
    Settings,
    in_thread,
    result,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torchrl_moe.data import RoutingLayout
    from torchrl_moe.testing.conformance.judge import Judge, Sampled
    from torchrl_moe.testing.conformance.trial import Trial

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name, its function, what to do if it fails, and what must hold."""

    name: str
    find: Callable[[Trial], Finding]
    advice: str
    meaning: str


_checks: list[Check] = []


def checked(advice: str) -> Callable[[Callable[[Trial], Finding]], Callable[[Trial], Finding]]:
    """Add a function to :data:`CHECKS` under its own name."""

    def add(find: Callable[[Trial], Finding]) -> Callable[[Trial], Finding]:
        first = (find.__doc__ or "").splitlines()[0]
        _checks.append(Check(find.__name__, find, advice, first[:1].lower() + first[1:].rstrip(".")))
        return find

    return add


@checked("return the rows of prompt and answer, except for the last token: a row too few or too many shifts all others")
def rows(trial: Trial) -> Finding:
    """One row for each token but the last."""
    off, worst = 0, ""
    for sampled in trial.plain:
        count, tokens = len(trial.judge.routes(sampled)), len(sampled.ids)
        known = int(trial.judge.known(sampled).any(1).sum())
        # a row of -1 counts as missing; the last token may have one, so only those beyond it are too many
        surplus = max(0, count - tokens)
        if tokens - 1 - known + surplus > off:
            off = tokens - 1 - known + surplus
            worst = f"; {tokens} tokens have {count} rows, {known} of them known"
    return Finding(off, 0, f"rows too few or too many, at worst of {len(trial.plain)} answers{worst}")


@checked(
    "convert in the adapter: an unsigned type cannot hold -1, a wide one costs its width for every token and layer"
)
def dtype(trial: Trial) -> Finding:
    """The narrowest signed integer that holds -1 and all experts."""
    wanted = trial.judge.layout.numpy_dtype
    for sampled in trial.plain:
        trial.judge.routes(sampled)  # raises if they are invalid
    found = {str(np.asarray(sampled.answer.routed_experts).dtype) for sampled in trial.plain}
    # numpy's type, also of tensors: names of torch's types would differ
    wrong = found - {str(wanted)}
    return Finding(len(wrong), 0, f"wrong types: routes are {', '.join(sorted(found))}, wanted {wanted}")


@checked("write -1 where a layer has no router: 0 is an expert, and a trainer would replay it")
def dense_layers(trial: Trial) -> Finding:
    """Layers without a router hold -1."""
    layers = list(trial.judge.layout.dense_layers)
    if not layers:
        raise NotOffered("every layer of the model has a router")
    entries = np.concatenate([trial.judge.routes(sampled)[:, layers].ravel() for sampled in trial.plain])
    wrong = entries[entries != -1]
    example = f", such as {int(wrong[0])}" if len(wrong) else ""
    return Finding(len(wrong), 0, f"entries of {len(entries)} in layers {layers} that are not -1{example}")


@checked("omit its row, or write -1: any other value was routed for another token, or for none")
def last_token(trial: Trial) -> Finding:
    """The last token was never an input: it has no row, or one of -1."""
    filled = 0
    for sampled in trial.plain:
        beyond = trial.judge.routes(sampled)[len(sampled.ids) - 1 :, list(trial.judge.layout.moe_layers)]
        filled += bool((beyond != -1).any())
    return Finding(filled, 0, f"answers of {len(trial.plain)} in which the last token has experts")


@checked("return logical expert ids (not those of redundant or local copies), K different ones for each token")
def values(trial: Trial) -> Finding:
    """Expert ids exist, and none occurs twice in a row of one layer."""
    layout = trial.judge.layout
    faulty, total, example = 0, 0, ""
    for sampled in trial.plain:
        found = trial.judge.routes(sampled)[:, list(layout.moe_layers)].reshape(-1, layout.top_k)
        # sorted, so that an expert that occurs twice stands beside itself; -1 may repeat
        ordered = np.sort(found, -1)
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1)
        outside = ((found < -1) | (found >= layout.num_experts)).any(-1)
        bad = twice | outside
        faulty, total = faulty + int(bad.sum()), total + len(bad)
        if bad.any() and not example:
            example = f", such as {found[bad][0].tolist()}"
    return Finding(faulty, 0, f"rows of {total} with an expert outside 0..{layout.num_experts - 1}, or twice{example}")


@checked(
    "compare by hand one answer's rows with RouterReplay.record(): a shift by a token, another order of layers, or "
    "rows of another request; in lower precision raise Settings.tie"
)
def native_routes(trial: Trial) -> Finding:
    """Each row holds the experts that the model's router chooses, or the alternative at a tie."""
    judge = trial.judge
    judge.reference  # noqa: B018  raises if there is none: no row could be called wrong
    found = [judge.faults(sampled) for sampled in trial.plain]
    rows, faulty = sum(one.rows for one in found), sum(one.count for one in found)
    missing = sum(one.missing for one in found)
    ties, largest = sum(one.ties for one in found), max((one.largest for one in found), default=0.0)
    first = next((one.first for one in found if one.count), "")
    # a share, not a count: it can be compared between engines and between numbers of prompts
    return Finding(
        faulty / max(rows, 1),
        0,
        f"share of {rows} rows, {missing} of them missing; {ties} ties, largest gap of router scores "
        f"{largest:.1e}{first}",
    )


@checked("see native_routes; if that holds, precision differs (raise Settings.tolerance), or the weights")
def replay_parity(trial: Trial) -> Finding:
    """The model that follows the routes gives the engine's log-probs."""
    judge = trial.judge
    off = shifted = 0.0
    for sampled in trial.plain:
        off = max(off, judge.parity(sampled))
        # what a shift by one token does shows whether this model could reveal wrong routes at all
        rows = judge.routes(sampled)[: len(sampled.ids) - 1]
        if len(rows) > 1:
            shifted = max(shifted, judge.parity(sampled.with_routes(np.roll(rows, 1, 0))))
    if off <= judge.settings.tolerance and shifted <= 10 * judge.settings.tolerance:
        raise NotOffered(f"routes hardly change this model: rows shifted by a token move log-probs by {shifted:.1e}")
    return Finding(
        off, judge.settings.tolerance, f"largest difference of log-probs; rows shifted by a token: {shifted:.1e}"
    )


@checked("keep rows with the cached blocks and return them too, or switch prefix caching off for training")
def prefix_cache(trial: Trial) -> Finding:
    """A cached prompt has all of its rows, and they are correct."""
    cold, warm = trial.repeated
    cached = warm.answer.num_cached_tokens
    if not cached:
        raise NotOffered(f"no prefix was cached: num_cached_tokens is {cached} when a prompt comes again")
    faults = trial.judge.faults(warm)
    off, others = faults.count, ""
    # without a model nothing says which rows are wrong: the rows of the first time are the comparison
    if faults.wrong is None:
        layers = list(trial.judge.layout.moe_layers)
        left, right = (np.sort(trial.judge.routes(one)[: len(warm.prompt), layers]) for one in (cold, warm))
        count = min(len(left), len(right))  # missing rows are counted already
        differing = int((left[:count] != right[:count]).any(-1).sum())
        off, others = off + differing, f"; {differing} differ from those of the first time"
    return Finding(off, 0, f"faults with {cached} of {len(warm.prompt)} tokens cached, {faults.text}{others}")


@checked("join the rows of all chunks, in order, or switch chunked prefill off for training")
def chunked_prefill(trial: Trial) -> Finding:
    """A prompt that is prefilled in several chunks has the rows of all of them."""
    cold, _ = trial.repeated
    faults = trial.judge.faults(cold)
    cached = cold.answer.num_cached_tokens or 0
    return Finding(
        faults.count,
        0,
        f"faults with a prompt of {len(cold.prompt)} tokens, {cached} of them cached (several chunks, if the engine "
        f"takes fewer at a time), {faults.text}",
    )


@checked("keep rows by answer, not by request, or ask n times for one answer")
def samples(trial: Trial) -> Finding:
    """Each of several answers to one prompt has its own rows."""
    asked = Sampling(max_tokens=trial.settings.answer, n=trial.settings.samples)
    answers = trial.ask([trial.prompt(23, seed=2)], asked)
    found: Sequence[RouteFaults] = [trial.judge.faults(sampled) for sampled in answers]
    shared = 0
    # rows of the answers' own tokens only: those of the shared prompt are equal
    for one, two in combinations(answers, 2):
        left, right = (trial.judge.routes(sampled)[len(sampled.prompt) :] for sampled in (one, two))
        shared += one.tokens != two.tokens and np.array_equal(left, right)
    missing, wrong = sum(one.missing for one in found), sum(one.wrong or 0 for one in found)
    return Finding(
        missing + wrong + shared,
        0,
        f"faults in {len(answers)} answers: {missing} rows missing, {wrong} wrong; {shared} pairs of different answers "
        "with the same rows",
    )


SAMPLINGS: Mapping[str, Sampling] = MappingProxyType(
    {
        "plain": Sampling(),
        "temperature": Sampling(temperature=0.7),
        "top_k": Sampling(top_k=10),
        "top_p": Sampling(top_p=0.8),
        "min_p": Sampling(min_p=0.1),
        "repetition_penalty": Sampling(repetition_penalty=1.3),
        "presence_penalty": Sampling(presence_penalty=0.7),
        "frequency_penalty": Sampling(frequency_penalty=0.7),
        "together": Sampling(temperature=0.7, top_k=20, top_p=0.9),
    }
)
"""The sampling settings of each check. ``together``: top-p is applied to what top-k has left."""


def log_probs(trial: Trial, name: str) -> Finding:
    """Log-probs are those of the distribution that was sampled."""
    trial.judge.reference  # noqa: B018  raises if there is none: no need to generate
    if name == "plain":
        answers = trial.plain  # other checks have asked for them already
    else:
        prompts = [trial.prompt(length, seed=3) for length in trial.settings.prompts]
        answers = trial.ask(prompts, replace(SAMPLINGS[name], max_tokens=trial.settings.answer))
    found = [trial.judge.gap(sampled) for sampled in answers]
    off, unprocessed = (max(values, default=0.0) for values in zip(*found, strict=True))
    tokens = sum(len(sampled.tokens) for sampled in answers)
    allowed = trial.settings.tolerance
    # a setting that changes hardly anything would pass whether the engine applies it or not
    if name != "plain" and off <= allowed and unprocessed <= 10 * allowed:
        raise NotOffered(f"it hardly changes this model's log-probs: by {unprocessed:.1e} in {tokens} log-probs")
    power = f"; the model's own, unprocessed ones would be off by {unprocessed:.1e}" if name != "plain" else ""
    return Finding(off, allowed, f"largest difference of {tokens} log-probs{power}")


# Each setting is a check of its own: engines get some of them right and others not.
_checks += [
    Check(
        f"log_probs[{name}]",
        partial(log_probs, name=name),
        "have the engine return log-probs after temperature, penalties and truncation (vLLM: logprobs_mode="
        "'processed_logprobs'; SGLang: return_sampling_mask), or ratios are biased wherever it changes the "
        "distribution",
        "log-probs are those of the distribution that each token was sampled from",
    )
    for name in SAMPLINGS
]


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
    # With other weights in between, rows that are computed again differ from those that were delivered.
    has_other_weights = True
    try:
        try:
            trial.switch_weights()
        except NotOffered:
            has_other_weights = False
        judge = trial.judge_now
        resuming = in_thread(lambda: engine.resume(part.prompt, part.answer, part.sampling))
        answer = result(resuming, trial.settings.patience)
    finally:
        trial.restore_weights()
    from torchrl_moe.testing.conformance.judge import Sampled

    whole = Sampled(part.prompt, part.sampling, answer)
    if len(whole.tokens) <= len(part.tokens):
        raise DoesNotHold(f"an answer cut after {len(part.tokens)} tokens has {len(whole.tokens)} after it continued")
    return Resumed(part, whole, judge, has_other_weights)


@checked("return the tokens so far with finish_reason='abort': an aborted answer must not count as finished")
def abort(trial: Trial) -> Finding:
    """An aborted answer says so, and has what it made: tokens, log-probs, and the rows of all tokens but the last."""
    part = trial.once(cut_midway)
    faults = trial.judge.faults(part)
    reason = part.answer.finish_reason
    if part.answer.log_probs is not None:
        part.log_probs  # noqa: B018  raises unless there is one for each token
    return Finding(
        faults.count + (reason != "abort"),
        0,
        f"faults in an answer cut after {len(part.tokens)} tokens, finish_reason {reason!r}, {faults.text}",
    )


@checked("keep the first part's rows and log-probs, and append only the new ones: rows[len(old):]")
def resume(trial: Trial) -> Finding:
    """A continued answer keeps what was delivered (tokens, log-probs, versions, rows), and has all other rows."""
    found = trial.once(resumed)
    part, whole = found.part, found.whole
    tokens, rows = len(part.tokens), len(part.ids) - 1
    # experts of a row are a set: their order may change
    delivered, kept = (np.sort(trial.judge.routes(sampled)[:rows], -1) for sampled in (part, whole))
    changed = {
        "tokens": _places_that_differ(part.tokens, whole.tokens[:tokens]),
        "log-probs": 0 if part.answer.log_probs is None else int((part.log_probs != whole.log_probs[:tokens]).sum()),
        "versions": 0 if part.answer.versions is None else _places_that_differ(part.versions, whole.versions[:tokens]),
        "rows": int((delivered != kept).any((1, 2)).sum()) if len(delivered) == len(kept) else rows,
    }
    missing = int((~trial.judge.known(whole)).any(1).sum())
    surplus = max(0, len(trial.judge.routes(whole)) - len(whole.ids))
    named = ", ".join(f"{count} of the {name}" for name, count in changed.items() if count) or "none"
    between = "other weights" if found.has_other_weights else "the same weights, where recomputed rows look the same"
    cut = whole.answer.finish_reason == "abort"  # it ran to its end, so it may not say so any more
    return Finding(
        sum(changed.values()) + missing + surplus + cut,
        0,
        f"entries delivered with {tokens} tokens that changed when it continued with {between}: {named}; {missing} "
        f"rows missing, {surplus} too many, finish_reason {whole.answer.finish_reason!r}",
    )


@checked("let the engine follow the recorded experts when it processes the first part again, or expect this mismatch")
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


def _places_that_differ(one: list[int], two: list[int]) -> int:
    return int(np.sum(np.array(one) != np.array(two)))


@checked("label each token with the version of the weights that made it")
def versions(trial: Trial) -> Finding:
    """Every token has a version, that of the engine's weights."""
    served = trial.version()
    answers = trial.ask([trial.prompt(9, seed=7)], Sampling(max_tokens=trial.settings.answer))
    found = [version for sampled in answers for version in sampled.versions]
    # an engine that does not report its version must at least be consistent
    wanted = found[0] if served is None else served
    wrong = sum(version != wanted for version in found)
    serving = "does not say what it serves" if served is None else f"serves {served}"
    said = ", ".join(map(str, sorted(set(found))))
    return Finding(wrong, 0, f"tokens of {len(found)} with a wrong version; they say {said}, and the engine {serving}")


@checked("send every tensor, buffers too, and drop the prefix cache (or salt it by version) with each update")
def update(trial: Trial) -> Finding:
    """After an update answers come from the new weights, also for a prompt that is cached from the old ones."""
    # a long prompt, so that an engine with a prefix cache has old blocks to reuse by mistake
    prompt, sampling = trial.prompt(trial.settings.long_prompt, seed=6), Sampling(max_tokens=trial.settings.answer)
    trial.ask([prompt], sampling)
    old = trial.version()
    try:
        judge = trial.judge.by(trial.switch_weights())
        after, new = trial.ask([prompt], sampling)[0], trial.version()
    finally:
        trial.restore_weights()
    off = judge.gap(after)[0]
    stale = trial.judge.gap(after)[0]
    allowed = trial.settings.tolerance
    # new weights under an old version would be stored as the old policy's
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
        f"{after.answer.num_cached_tokens} tokens of the prompt cached; version {old}, then {new}",
    )


@checked("label tokens, not answers: at the update, record how many tokens each answer has")
def versions_over_update(trial: Trial) -> Finding:
    """Tokens of an answer that continues over an update have the version that made them."""
    found = trial.once(crossed_by_update)
    labels, boundary = found.sampled.versions, found.boundary
    old, new = found.versions
    wanted_old = labels[0] if old is None else old
    wanted_new = new if new is not None else max(labels) if max(labels) != wanted_old else None
    # tokens before the boundary have the old version, those behind it the new one
    wrong = sum(label != wanted_old for label in labels[:boundary])
    wrong += sum(label == wanted_old or label != wanted_new for label in labels[boundary:])
    said = " then ".join(f"{labels.count(version)} of version {version}" for version in dict.fromkeys(labels))
    return Finding(
        wrong,
        0,
        f"tokens of {len(labels)} with another version; the old weights made {boundary}, the engine says {said}",
    )


@checked("keep delivered rows when a request is prefilled again (SGLang: pause in_place or abort, not retract)")
def rows_over_update(trial: Trial) -> Finding:
    """Rows stay beside the log-probs that they were sampled with when an answer continues over an update."""
    found = trial.once(crossed_by_update)
    tokens = len(found.sampled.prompt) + found.boundary
    faults = found.before.faults(found.sampled, tokens=tokens)
    off = found.before.parity(found.sampled, tokens=tokens)
    others = ""
    # wrong by the old weights, right by the new ones: this tells the cause
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


CHECKS: tuple[Check, ...] = tuple(_checks)
"""In the order in which they run."""


def check(
    adapter: EngineAdapter,
    model: PreTrainedModel | str | Path | None = None,
    *,
    layout: RoutingLayout | None = None,
    only: Iterable[str] | None = None,
    settings: Settings | None = None,
) -> ConformanceReport:
    """Check an engine, and report what holds and how far off it is.

    The engine should have no other load meanwhile. Weights that the checks change are restored.

    Args:
        adapter: of the engine.
        model: the transformers model that the engine serves, or where to load it from, in float32. Without it, checks
            that need a comparison are not offered.
        layout: of the model's routers, if no model is given.
        only: names of the checks to run; by default all of :data:`CHECKS`.
        settings: of the requests, and tolerances.

    Returns:
        The report. An engine that fails to restore its own weights gets an extra row, ``"own weights"``.

    Raises:
        ValueError: ``only`` names an unknown check.
    """
    names = {one.name for one in CHECKS} if only is None else set(only)
    if unknown := sorted(names - {one.name for one in CHECKS}):  # before a model is loaded
        raise ValueError(f"no checks {unknown}; there are {[one.name for one in CHECKS]}")
    trial = open_trial(adapter, model, layout, settings)
    lost: tuple[CheckResult, ...] = ()
    try:
        results = tuple(run_check(one, trial) for one in CHECKS if one.name in names)
    finally:
        lost = _closed(trial)
    return ConformanceReport(str(getattr(adapter, "name", type(adapter).__name__)), (*results, *lost))


def open_trial(
    adapter: EngineAdapter,
    model: PreTrainedModel | str | Path | None,
    layout: RoutingLayout | None,
    settings: Settings | None,
) -> Trial:
    """Return what :func:`run_check` needs, to be closed by the caller; arguments as of :func:`check`."""
    from transformers import AutoModelForCausalLM

    from torchrl_moe.testing.conformance.judge import Reference
    from torchrl_moe.testing.conformance.trial import Trial

    if isinstance(model, str | Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    reference = None if model is None else Reference(model)
    return Trial(adapter, reference, layout, settings or Settings())


def run_check(one: Check, trial: Trial) -> CheckResult:
    """Run one check; an error of the engine is a finding like any other."""
    row = partial(CheckResult, name=one.name, meaning=one.meaning)
    try:
        found = one.find(trial)
    except NotOffered as reason:
        return row(verdict="not offered", seen=str(reason))
    except DoesNotHold as fault:
        return row(verdict="does not hold", seen=str(fault), advice=one.advice)
    except Exception as error:  # whatever an engine raises is the finding; the log has where it came from
        LOG.info("check %s raised", one.name, exc_info=True)
        return row(verdict="does not hold", seen=f"{type(error).__name__}: {error}", advice=one.advice)
    row = partial(row, off=found.off, allowed=found.allowed, seen=found.seen)
    # in this order: a NaN holds nowhere
    return row(verdict="holds") if found.off <= found.allowed else row(verdict="does not hold", advice=one.advice)


def _closed(trial: Trial) -> tuple[CheckResult, ...]:
    """Close a trial; a failure is one more result, so that none of the others is lost."""
    try:
        trial.close()
    except Exception as error:  # whatever an engine raises is the finding; the log has where it came from
        LOG.info("an engine did not restore its own weights", exc_info=True)
        return (
            CheckResult(
                name="own weights",
                meaning="an engine restores the model's own weights",
                verdict="does not hold",
                seen=f"{type(error).__name__}: {error}",
                advice="restart it: it may still serve the altered weights of the checks",
            ),
        )
    return ()
