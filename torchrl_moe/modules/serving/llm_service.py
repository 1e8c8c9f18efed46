"""The engine interface of policies over a synchronous ``vllm.LLM``: one replica, in this process, one call at a time.

A service balances, waits, retries, counts and tracks versions; this does not. Arguments for a balancer
(``session_ids``, ``group_ids``, ``request_context``) are accepted and have no effect. Arguments that the caller would
rely on are refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.serving.prompts import normalise_prompts
from torchrl_moe.modules.serving.requests import common_fields, integers, make_request, rows_each
from torchrl_moe.modules.serving.scores import ONE_TOKEN, scores_of, scorings
from torchrl_moe.modules.serving.service import GenerationService

__all__ = ["Engine", "LLMService", "is_llm"]

STEERS_NOTHING = ("session_ids", "group_ids", "request_context")


def is_llm(model: Any) -> bool:
    """Whether an object is a ``vllm.LLM``; imports nothing."""
    return any(kind.__name__ == "LLM" and kind.__module__.split(".")[0] == "vllm" for kind in type(model).__mro__)


class LLMService:
    """Answers for a ``vllm.LLM``; safe to call from any thread.

    Args:
        llm: owned by the caller.

    Raises:
        ValueError: it returns logits instead of log-probs, or captures routes that cannot be read.
    """

    def __init__(self, llm: Any) -> None:
        from torchrl_moe.modules.backends.vllm.sync_llm import SyncLLM

        self._llm = SyncLLM(llm)
        self._ids = itertools.count()

    @property
    def routing_layout(self) -> RoutingLayout | None:
        """The model's routers; ``None`` if it captures no routes."""
        return self._llm.layout

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return self._llm.llm.get_tokenizer()

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Any = None,
        *,
        prompt_token_ids: Any = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        priority: int | Sequence[int] = 0,
        return_routed_experts: bool = True,
        **others: Any,
    ) -> Completion | list[Completion]:
        """Generate for one prompt or many; see :meth:`~torchrl_moe.modules.serving.service.GenerationService.generate`.

        Raises:
            ValueError: another argument of that one, which a ``vllm.LLM`` cannot keep, or vLLM refuses a request.
        """
        _refuse_others(others)
        batch = normalise_prompts(prompts, prompt_token_ids)
        common = common_fields(
            len(batch.prompts), None, sampling_params, lora_request, None, None, return_routed_experts, None
        )
        turns = integers(priority, len(batch.prompts), "priority")
        requests = [
            make_request(prompt, request_id=self._new_id(), priority=turn, **common)
            for prompt, turn in zip(batch.prompts, turns, strict=True)
        ]
        completions = self._llm.complete(requests, use_tqdm)
        return completions[0] if batch.single else completions

    def score(
        self,
        tokens: Any,
        routed_experts: Any = None,
        *,
        temperature: float | Sequence[float] = 1.0,
        kept: Any = None,
        lora_request: Any = None,
        use_tqdm: bool = False,
        **others: Any,
    ) -> Tensor | list[Tensor]:
        """Return log-probs of tokens; see :meth:`~torchrl_moe.modules.serving.service.GenerationService.score`.

        Raises:
            ValueError: another argument of that one, or tokens that were sampled from another distribution than the
                model's own at temperature 1.
        """
        _refuse_others(others)
        batch = normalise_prompts(prompt_token_ids=tokens)
        common = common_fields(len(batch.prompts), None, ONE_TOKEN, lora_request, None, None, False, None)
        requests = [
            make_request(prompt, request_id=self._new_id(), routed_experts=followed, scoring=scoring, **common)
            for prompt, followed, scoring in zip(
                batch.prompts, rows_each(routed_experts, batch), scorings(batch, temperature, kept), strict=True
            )
        ]
        scores = scores_of(self._llm.complete(requests, use_tqdm))
        return scores[0] if batch.single else scores

    def _new_id(self) -> str:
        return f"llm-{next(self._ids)}"


def _refuse_others(others: Mapping[str, Any]) -> None:
    """Refuse arguments that a caller would rely on."""
    for name, value in others.items():
        is_unset = value is None or (isinstance(value, list) and all(one is None for one in value))
        if name in STEERS_NOTHING or is_unset or (name == "actor_index" and value == 0):
            continue
        raise ValueError(
            f"{name}: a vllm.LLM is one engine in this process, without a service to provide that. "
            "AsyncVLLM.from_pretrained(path) can."
        )


Engine: TypeAlias = GenerationService | LLMService
"""The methods that policies use."""
