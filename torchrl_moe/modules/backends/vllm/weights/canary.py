"""A question that new weights must answer well before anything else that they made leaves the engine process.

With the trainer's own log-probs of a fixed prompt, the engine's must equal them; without, one token is asked for, whose
log-prob must be a number: a tensor that did not arrive shows as NaN.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_moe._errors import WeightSyncError

__all__ = ["ask_canary", "compare_log_probs"]

PROBE_SECONDS = 10.0
PROOF_SECONDS = 60.0


async def ask_canary(engine: Any, canary: Mapping[str, Any] | None, name: str, seconds: float) -> str:
    """Ask a question of an engine that generates.

    It waits its turn behind requests that run and wait: vLLM lets nothing overtake them. So no answer in time says
    that the engine is full, and nothing of its weights.

    Args:
        engine: the ``AsyncLLM``.
        canary: ``token_ids`` of a prompt, the trainer's ``log_probs`` of its tokens from the second on, and the
            ``tolerance`` between the two; ``None`` asks for one token.
        name: of the request, and of its part of the prefix cache; each asking needs its own.
        seconds: that it may take, at most.

    Returns:
        Why nothing is proved, in words; an empty string if the answer is right.

    Raises:
        WeightSyncError: the answer is wrong.
    """
    answer = asyncio.ensure_future(_answer(engine, canary, name))
    seconds = min(seconds, PROBE_SECONDS if canary is None else PROOF_SECONDS)
    done, _ = await asyncio.wait([answer], timeout=seconds)
    if not done:
        answer.cancel()
        return f"the canary had no turn within {seconds:g} s"
    final = answer.result()
    first = final.outputs[0].logprobs[0]
    if not all(math.isfinite(entry.logprob) for entry in first.values()):
        raise WeightSyncError("the new weights give a log-prob that is not a number")
    if canary is not None:
        tokens = canary["token_ids"][1:]
        got = [entry[token].logprob for token, entry in zip(tokens, final.prompt_logprobs[1:], strict=True)]
        compare_log_probs(got, canary["log_probs"], canary["tolerance"])
    return ""


async def _answer(engine: Any, canary: Mapping[str, Any] | None, name: str) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=0,
        prompt_logprobs=None if canary is None else 0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompt = {"prompt_token_ids": [0] if canary is None else list(canary["token_ids"]), "cache_salt": name}
    final: Any = None
    async for output in engine.generate(prompt, params, name):
        final = output
    return final


def compare_log_probs(got: Sequence[float], expected: Sequence[float], tolerance: float) -> None:
    """Compare the engine's log-probs of a prompt's tokens with the trainer's.

    Raises:
        WeightSyncError: they are not as many, or differ by more than the tolerance; the largest difference is named.

    Example:
        >>> compare_log_probs([-1.0, -2.0], [-1.0, -2.5], tolerance=1e-3)
        Traceback (most recent call last):
        ...
        torchrl_moe._errors.WeightSyncError: the new weights' log-probs differ from the trainer's by up to 5.0e-01 \
(at token 2: -2 and -2.5), allowed: 1.0e-03
    """
    if len(got) != len(expected):
        raise WeightSyncError(f"the canary has {len(expected)} log-probs for a prompt of {len(got) + 1} tokens")
    differences = [abs(ours - theirs) for ours, theirs in zip(got, expected, strict=True)]
    if all(difference <= tolerance for difference in differences):  # also false of NaN
        return
    place = max(range(len(got)), key=lambda i: math.inf if math.isnan(differences[i]) else differences[i])
    raise WeightSyncError(
        f"the new weights' log-probs differ from the trainer's by up to {differences[place]:.1e} "
        f"(at token {place + 1}: {got[place]:.6g} and {expected[place]:.6g}), allowed: {tolerance:.1e}"
    )
