"""One prompt, one answer, one reward: the episode that a collector runs for a set of prompts."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_moe.collectors.workflow import Ask
from torchrl_moe.modules.policies.request_keys import ARGUMENTS
from torchrl_moe.trainers.rewards import Rewards

__all__ = ["PromptEpisode"]

WRITTEN = {
    *("history", "text", "tokens", "masks", "log_probs", "routed_experts", "sampling", "routing"),
    *("advantage", "current_version", "num_valid_tokens", "num_sequences", "sum_weights", "prox", "ref_log_probs"),
    *("expert_counts", "num_router_sequences"),
    *("policy_version", "policy_versions", "finish_reason", "num_cached_tokens", "num_segments", "resume"),
    *("next", "done", "terminated", "truncated", "rewards"),
}
"""Entries of a row that rollouts write, and that a policy reads as those of an earlier turn."""
TAKEN = WRITTEN | set(ARGUMENTS)


class PromptEpisode:
    """Sends a prompt, and rewards the answer; an async function for ``AsyncLLMCollector``, in place of an environment.

    Each row carries the sample's columns and, at ``("rewards", name)``, what each reward function returned, float32
    ``[1]``, NaN if it abstained. A column with the name of an entry that rollouts write or requests read (``"text"``,
    ``"tokens"``, ``"priority"``, ...) is passed to the rewards, but is not in the rows.

    The time that rewards may take is the collector's ``reward_timeout``; after that the sample's group is dropped.

    Args:
        prompt_column: column of the prompt, which is text or a list of messages.
        rewards: of the answers.
        is_chat: whether the policy reads messages (``input_mode="history"``): then a text prompt becomes one user
            message. Otherwise the policy reads text, and prompts must be text.
        tokenizer: decodes completions for the rewards. Default: the completion is the policy's text; in a chat without
            the end-of-turn token, otherwise with it.
        skip_special_tokens: whether that leaves special tokens out, such as an added ``<think>``. The end-of-turn token
            is left out in any case.

    >>> def polite(completion):
    ...     return float("please" in completion)
    >>> prompts = load_prompts([{"prompt": "Ask for tea."}])  # doctest: +SKIP
    >>> episode = PromptEpisode("prompt", Rewards(polite))
    >>> collector = AsyncLLMCollector(episode, policy=policy, dataloader=prompts.loader(0))  # doctest: +SKIP
    """

    def __init__(
        self,
        prompt_column: str,
        rewards: Rewards,
        *,
        is_chat: bool = True,
        tokenizer: Any = None,
        skip_special_tokens: bool = True,
    ) -> None:
        self.prompt_column = prompt_column
        self.rewards = rewards
        self.is_chat = is_chat
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens

    async def __call__(self, data: TensorDictBase, ask: Ask) -> float | None:
        """Run a sample, and return its reward; ``None`` if all functions abstained.

        Args:
            data: ``[]``, from :meth:`~torchrl_moe.trainers.prompts.PromptSet.loader`.
            ask: returns the answer to a prompt.

        Raises:
            ValueError: no prompt in its column, a prompt that the policy cannot read, or see
                :meth:`Rewards.__call__`.
            TypeError: a reward function returned no number.
        """
        columns = {name: data[name] for name in data.keys()}  # noqa: SIM118  a TensorDict iterates over its batch
        prompt = self._prompt(columns)
        for name in TAKEN & columns.keys():
            del data[name]
        answer = await ask(prompt)
        ids = answer["tokens"].response.tolist()
        reward = await self.rewards(prompt, self._completion(answer, ids), ids, columns)
        for name, value in reward.values.items():
            data["rewards", name] = torch.tensor([float("nan") if value is None else value])
        return reward.total

    def _prompt(self, columns: dict[str, Any]) -> Any:
        if self.prompt_column not in columns:
            there = ", ".join(map(repr, columns))
            raise ValueError(f"the sample has no column {self.prompt_column!r}; its columns are {there or 'none'}")
        prompt = columns[self.prompt_column]
        if not self.is_chat and not isinstance(prompt, str):
            raise ValueError(f"the policy reads text, not messages: column {self.prompt_column!r} is {prompt!r:.60}")
        return prompt

    def _completion(self, answer: TensorDictBase, ids: list[int]) -> str:
        if self.tokenizer is not None:
            end = getattr(self.tokenizer, "eos_token_id", None)
            spoken = ids[:-1] if ids and ids[-1] == end else ids
            text: str = self.tokenizer.decode(spoken, skip_special_tokens=self.skip_special_tokens)
        elif self.is_chat:
            text = answer["history"].response.content[0]
        else:
            text = answer["text"].response
        return text
