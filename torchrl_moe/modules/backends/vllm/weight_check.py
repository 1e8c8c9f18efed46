"""The weight check: a request that new weights must pass before any of their tokens leaves the engine process.

With a canary (the trainer's own log-probs of a fixed prompt), the engine's log-probs must equal it. Without one, the
engine generates one token, whose log-prob must be a number: a tensor that did not arrive shows as NaN.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchrl_moe.errors import WeightSyncError
from torchrl_moe.modules.backends.engine import compare_log_probs

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

__all__ = ["WeightCheck", "is_weight_check"]

PROBE_SECONDS = 10.0
PROOF_SECONDS = 60.0
KEY = "torchrl_moe_weight_check"  # in the request's ``extra_args``


class WeightCheck:
    """A request to an engine that generates, or is about to.

    Our scheduler lets it overtake all other requests. Under another scheduler it waits its turn; then no result in time
    means that the engine is full, and says nothing about its weights.
    """

    def __init__(self, engine: AsyncLLM, proof: Mapping[str, Any] | None, name: str) -> None:
        self._engine, self._proof, self._name = engine, proof, name
        self._sent: RequestOutputCollector | None = None

    async def send(self) -> None:
        """Send the request; a paused engine answers it in its first steps after the pause. Idempotent."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._sent is not None:
            return
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=0,
            prompt_logprobs=None if self._proof is None else 0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={KEY: True},
        )
        ids = [0] if self._proof is None else list(self._proof["token_ids"])
        prompt = {"prompt_token_ids": ids, "cache_salt": self._name}
        self._sent = await self._engine.add_request(self._name, prompt, params)

    async def ask(self, seconds: float) -> str:
        """Return why the weights were not checked; an empty string if they passed."""
        await self.send()
        seconds = min(seconds, PROBE_SECONDS if self._proof is None else PROOF_SECONDS)
        assert self._sent is not None
        answer = asyncio.ensure_future(self._sent.get())
        # a check without an answer says nothing about the weights
        done, _ = await asyncio.wait([answer], timeout=seconds)
        if not done:
            answer.cancel()
            await self._engine.abort([self._name])
            return f"the check of the new weights had no turn within {seconds:g} s"
        final = answer.result()
        first = final.outputs[0].logprobs[0]
        if not all(math.isfinite(entry.logprob) for entry in first.values()):
            raise WeightSyncError("the new weights give a log-prob that is not a number")
        # the trainer's log-probs of the same prompt
        if self._proof is not None:
            tokens = self._proof["token_ids"][1:]
            got = [entry[token].logprob for token, entry in zip(tokens, final.prompt_logprobs[1:], strict=True)]
            compare_log_probs(got, self._proof["log_probs"], self._proof["tolerance"])
        return ""


def is_weight_check(params: SamplingParams | None) -> bool:
    """Whether ``SamplingParams`` are those of a weight check."""
    return bool(params and params.max_tokens == 1 and (params.extra_args or {}).get(KEY))
