"""All checks by name, and how they are run. Naming them loads neither torch nor transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_moe.testing.conformance import (
    interruption_checks,
    log_prob_checks,
    route_checks,
    shape_checks,
    weight_checks,
)
from torchrl_moe.testing.conformance.adapter import EngineAdapter, NotOffered
from torchrl_moe.testing.conformance.findings import DoesNotHold, Finding
from torchrl_moe.testing.conformance.report import CheckResult, ConformanceReport
from torchrl_moe.testing.conformance.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torchrl_moe.data import RoutingLayout
    from torchrl_moe.testing.conformance.trial import Trial

__all__ = ["CHECKS", "Check", "check", "open_trial", "run_check"]

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name, its function (whose docstring says what must hold), and what to do if it fails."""

    name: str
    find: Callable[[Trial], Finding]
    advice: str
    meaning: str = ""

    def __post_init__(self) -> None:
        if not self.meaning:
            first = (self.find.__doc__ or "").splitlines()[0]
            object.__setattr__(self, "meaning", first[:1].lower() + first[1:].rstrip("."))


SAMPLED = (
    "have the engine return log-probs after temperature, penalties and truncation (vLLM: logprobs_mode="
    "'processed_logprobs'; SGLang: return_sampling_mask), or ratios are biased wherever it changes the distribution"
)

CHECKS: tuple[Check, ...] = (
    Check(
        "rows",
        shape_checks.rows,
        "return the rows of prompt and answer, except for the last token: a row too few or too many shifts all others",
    ),
    Check(
        "dtype",
        shape_checks.dtype,
        "convert in the adapter: an unsigned type cannot hold -1, a wide one costs its width for every token and layer",
    ),
    Check(
        "dense_layers",
        shape_checks.dense_layers,
        "write -1 where a layer has no router: 0 is an expert, and a trainer would replay it",
    ),
    Check(
        "last_token",
        shape_checks.last_token,
        "omit its row, or write -1: any other value was routed for another token, or for none",
    ),
    Check(
        "values",
        shape_checks.values,
        "return logical expert ids (not those of redundant or local copies), K different ones for each token",
    ),
    Check(
        "native_routes",
        route_checks.native_routes,
        "compare by hand one answer's rows with RouterReplay.record(): a shift by a token, another order of layers, or "
        "rows of another request; in lower precision raise Settings.tie",
    ),
    Check(
        "replay_parity",
        route_checks.replay_parity,
        "see native_routes; if that holds, precision differs (raise Settings.tolerance), or the weights",
    ),
    Check(
        "prefix_cache",
        route_checks.prefix_cache,
        "keep rows with the cached blocks and return them too, or switch prefix caching off for training",
    ),
    Check(
        "chunked_prefill",
        route_checks.chunked_prefill,
        "join the rows of all chunks, in order, or switch chunked prefill off for training",
    ),
    Check("samples", route_checks.samples, "keep rows by answer, not by request, or ask n times for one answer"),
    *(
        Check(f"log_probs[{name}]", partial(log_prob_checks.log_probs, name=name), SAMPLED, log_prob_checks.MEANING)
        for name in log_prob_checks.SAMPLINGS
    ),
    Check(
        "abort",
        interruption_checks.abort,
        "return the tokens so far with finish_reason='abort': an aborted answer must not count as finished",
    ),
    Check(
        "resume",
        interruption_checks.resume,
        "keep the first part's rows and log-probs, and append only the new ones: rows[len(old):]",
    ),
    Check(
        "resumed_tail",
        interruption_checks.resumed_tail,
        "let the engine follow the recorded experts when it processes the first part again, or expect this mismatch",
    ),
    Check("versions", weight_checks.versions, "label each token with the version of the weights that made it"),
    Check(
        "update",
        weight_checks.update,
        "send every tensor, buffers too, and drop the prefix cache (or salt it by version) with each update",
    ),
    Check(
        "versions_over_update",
        weight_checks.versions_over_update,
        "label tokens, not answers: at the update, record how many tokens each answer has",
    ),
    Check(
        "rows_over_update",
        weight_checks.rows_over_update,
        "keep delivered rows when a request is prefilled again (SGLang: pause in_place or abort, not retract)",
    ),
)
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
    chosen = _chosen(only)
    trial = open_trial(adapter, model, layout, settings)
    lost: tuple[CheckResult, ...] = ()
    try:
        results = tuple(run_check(one, trial) for one in chosen)
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

    from torchrl_moe.testing.conformance.reference import Reference
    from torchrl_moe.testing.conformance.trial import Trial

    if isinstance(model, str | Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    reference = None if model is None else Reference(model)
    return Trial(adapter, reference, layout, settings or Settings())


def run_check(one: Check, trial: Trial) -> CheckResult:
    """Run one check."""
    try:
        found = one.find(trial)
    except NotOffered as reason:
        return CheckResult(name=one.name, meaning=one.meaning, verdict="not offered", seen=str(reason))
    except DoesNotHold as fault:
        seen, off, allowed = str(fault), None, None
    except Exception as error:  # whatever an engine raises is the finding; the log has where it came from
        LOG.info("check %s raised", one.name, exc_info=True)
        seen, off, allowed = f"{type(error).__name__}: {error}", None, None
    else:
        seen, off, allowed = found.seen, found.off, found.allowed
        if off <= allowed:
            return CheckResult(name=one.name, meaning=one.meaning, verdict="holds", off=off, allowed=allowed, seen=seen)
    return CheckResult(
        name=one.name,
        meaning=one.meaning,
        verdict="does not hold",
        off=off,
        allowed=allowed,
        seen=seen,
        advice=one.advice,
    )


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


def _chosen(only: Iterable[str] | None) -> tuple[Check, ...]:
    if only is None:
        return CHECKS
    names = list(only)
    unknown = sorted(set(names) - {one.name for one in CHECKS})
    if unknown:
        raise ValueError(f"no checks {unknown}; there are {[one.name for one in CHECKS]}")
    return tuple(one for one in CHECKS if one.name in names)
