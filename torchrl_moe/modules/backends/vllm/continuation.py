"""An answer that a weight swap or its user cut short: what to ask vLLM for next, and how the parts become one again.

The prompt of the next part is the old prompt and the tokens so far. The rows delivered already win: the next part
brings routes, log-probs and versions of its own tokens only. The first part has G1 tokens, the rest G2.

Stop strings: vLLM looks for them in the rest; here they are looked for across the cut. Where the cut is inside a
character, vLLM's detokeniser cannot continue, and the text of the rest is made here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchrl_moe.modules.backends.replica import CompletionOutput, KeptIds, OnResume, Request

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

Decode = Callable[[Sequence[int]], str]
Scalar = TypeVar("Scalar", bound=np.generic)
HALF = "\ufffd"  # what a tokenizer shows for the bytes of an unfinished character

STATEFUL = (
    "structured_outputs",
    "bad_words",
    "repetition_detection",
    "thinking_token_budget",
    "extra_args",
    "presence_penalty",
    "frequency_penalty",
)
"""Sampling parameters whose effect on the next token depends on where the answer began."""


def can_continue(params: SamplingParams) -> bool:
    """Whether the next token depends on prompt + answer only, and not on where one ends and the other begins.

    If it does not, as with a grammar, whose state cannot be restored, the answer has to start again.
    """
    return not any(getattr(params, name, None) for name in STATEFUL)


def request_for_rest(
    request: Request,
    name: str,
    prompt_ids: NDArray[np.generic],
    first: CompletionOutput | None,
    rows: NDArray[np.integer] | None = None,
) -> Request:
    """Return the request, called ``name``, for the rest of an answer."""
    if first is not None:
        prompt_ids = np.concatenate([prompt_ids, first.token_ids])
    rows = request.routed_experts if rows is None else rows
    ids = prompt_ids.astype(np.int32)
    return replace(request, request_id=name, prompt=None, prompt_token_ids=ids, routed_experts=rows)


def sampling_for_rest(
    params: SamplingParams, index: int, first: CompletionOutput | None, decode: Decode
) -> SamplingParams:
    """Return vLLM's ``SamplingParams`` for the rest of answer ``index``."""
    rest = params.clone()
    rest.n = 1
    had = 0 if first is None else len(first.token_ids)
    if rest.seed is not None:  # as vLLM seeds the answers of a request; its random numbers go by position
        rest.seed += index
    if first is None:
        return rest
    rest.min_tokens = max(rest.min_tokens - had, 0)
    if rest.max_tokens is not None:
        if had >= rest.max_tokens:
            raise ValueError(
                f"answer {index} to resume has {had} tokens already: max_tokens={rest.max_tokens} must be larger"
            )
        rest.max_tokens -= had
    # the last token's row was still to come; those of tokens that were only streamed are gone with their replica
    rest.routed_experts_prompt_start = 0 if first.routed_experts is None else len(first.routed_experts)
    if _ends_inside_a_character(first, params, decode):
        rest.detokenize, rest.stop = False, None
    return rest


def _ends_inside_a_character(first: CompletionOutput, params: SamplingParams, decode: Decode) -> bool:
    return bool(params.detokenize) and decode(first.token_ids.tolist()).endswith(HALF)


def join(
    index: int,
    first: CompletionOutput | None,
    rest: CompletionOutput,
    params: SamplingParams,
    decode: Decode,
    on_resume: OnResume = "live",
) -> CompletionOutput:
    """Put answer ``index`` together.

    Shapes:
        - token_ids, logprobs, policy_versions, kept: ``[G1 + G2]``, less where a stop string ends the answer early
        - routed_experts: ``[P + G1 - 1 + G2, L, K]``: the rest has the rows that the first part lacks, at least one
    """
    if first is None:
        return replace(rest, index=index)
    # nothing came since the cut
    if not len(rest.token_ids):  # cut again; vLLM gives no rows then
        return replace(first, index=index, finish_reason=rest.finish_reason, stop_reason=rest.stop_reason)
    text = first.text + rest.text
    if params.detokenize:
        rest, text = _read(first, rest, params, decode)
    return replace(
        rest,
        index=index,
        token_ids=np.concatenate([first.token_ids, rest.token_ids]),
        text=text,
        policy_versions=np.concatenate([first.policy_versions, rest.policy_versions]),
        logprobs=_concatenated(first.logprobs, rest.logprobs),
        # of one whose replica died, only tokens were delivered: the rest then has all rows
        routed_experts=rest.routed_experts
        if first.routed_experts is None
        else _concatenated(first.routed_experts, rest.routed_experts),
        kept=KeptIds.join([first.kept, rest.kept], [len(first.token_ids), len(rest.token_ids)]),
        resume="live" if "live" in (first.resume, rest.resume, on_resume) else "forced",  # the worse of all parts
    )


def _concatenated(first: NDArray[Scalar] | None, rest: NDArray[Scalar] | None) -> NDArray[Scalar] | None:
    return None if first is None or rest is None else np.concatenate([first, rest])


def _read(
    first: CompletionOutput, rest: CompletionOutput, params: SamplingParams, decode: Decode
) -> tuple[CompletionOutput, str]:
    """Return the rest, ended where a stop string that vLLM could not see ends it, and the text of the whole answer."""
    inside = _ends_inside_a_character(first, params, decode)
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
    if not inside and not stops:
        return rest, first.text + rest.text
    # decoded across the cut, from the end of the text that is known
    before, after = first.token_ids.tolist(), rest.token_ids.tolist()
    known = len(decode(before).rstrip(HALF))

    def text(count: int) -> str:
        return first.text + decode([*before, *after[:count]])[known:]

    # vLLM has looked through the rest by itself, unless it began inside a character
    last_start = None if inside else len(first.text)
    floor = len(text(max(params.min_tokens - len(before), 0)).rstrip(HALF))
    found = partial(_first_match, stops=stops, begun=len(first.text), floor=floor, last_start=last_start)
    # the fewest tokens whose text has a stop string: once there, it stays there
    count = bisect_left(range(len(after) + 1), True, key=lambda count: found(text(count)) is not None)
    if count > len(after):
        if not inside:
            return rest, first.text + rest.text
        unseen = rest.finish_reason == "stop" and not params.include_stop_str_in_output  # the token that stopped it
        return rest, text(len(after) - unseen).rstrip(HALF)  # vLLM keeps half a character back, too
    match = found(text(count))
    assert match is not None
    start, stop = match
    rows, dropped = rest.routed_experts, len(after) - count
    ended = replace(
        rest,
        token_ids=rest.token_ids[:count],
        policy_versions=rest.policy_versions[:count],
        logprobs=None if rest.logprobs is None else rest.logprobs[:count],
        routed_experts=None if rows is None else rows[: len(rows) - dropped],
        kept=None if rest.kept is None else rest.kept.first(count),
        finish_reason="stop",
        stop_reason=stop,
    )
    return ended, text(count)[: start + (len(stop) if params.include_stop_str_in_output else 0)]


def _first_match(
    text: str, *, stops: Sequence[str], begun: int, floor: int, last_start: int | None
) -> tuple[int, str] | None:
    """Return the start of the stop string that ends first, and the string; it must end past both marks to count."""
    found = []
    for stop in stops:
        start = text.find(stop, max(begun - len(stop) + 1, floor - len(stop) + 1, 0))
        if start >= 0 and (last_start is None or start < last_start):
            found.append((start + len(stop), start, stop))
    return min(found, key=lambda match: match[0])[1:] if found else None
