"""The requests and answers of one sample: a row for each turn, laid out as an environment's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any, TypeAlias

import torch
from tensordict import NestedKey, NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data.llm import History

from torchrl_moe.collectors.episode import MAX_TURNS, Generate, too_many_turns
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies.sample_request import SampleRequest
from torchrl_moe.modules.policies.sampling_entry import SAMPLING
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper

__all__ = ["Conversation", "PromptLike", "finite", "number_of"]

PromptLike: TypeAlias = "History | Sequence[Mapping[str, Any]] | str | Sequence[int] | Tensor"
"""The whole prompt of an answer, in the form of the policy's ``input_mode``.

``"history"``: a ``History`` ``[turns]``, messages (``{"role": ..., "content": ...}``), or text, a single message of the
user. ``"text"``: text. ``"tokens"``: ids."""


class Conversation:
    """The turns of one sample.

    Args:
        policy: reads prompts and lays out answers.
        generate: asks the engine.
        data: ``[]``, what each row carries; read when the rows are made.
        generate_kwargs: change the policy's.
        max_turns: how many answers it may ask for.
    """

    def __init__(
        self,
        policy: vLLMWrapper,
        generate: Generate,
        data: TensorDictBase,
        generate_kwargs: Mapping[str, Any],
        max_turns: int = MAX_TURNS,
    ) -> None:
        self._policy = policy
        self._generate = generate
        self._data = data
        self._generate_kwargs = dict(generate_kwargs)
        self._asked, self._max_turns = 0, max_turns
        self._answers: dict[int, TensorDictBase] = {}  # in the order of the requests
        self._under_way: set[asyncio.Future[Completion]] = set()
        self._is_over = False

    @property
    def under_way(self) -> int:
        """Answers that are being generated."""
        return len(self._under_way)

    async def ask(
        self,
        prompt: PromptLike,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **generate_kwargs: Any,
    ) -> TensorDictBase:
        """Return the answer to a prompt, ``[]``, with the keys that the policy writes.

        A prompt that continues an earlier answer sends its token ids; its log-probs, routes and versions are in the new
        answer too.

        Args:
            prompt: see :data:`PromptLike`.
            tools: JSON schemas or functions, for the chat template; default: the sample's ``"tools"``.
            chat_template_kwargs: further arguments of it; default: the sample's.
            **generate_kwargs: change the policy's for this answer.

        Raises:
            TypeError: the policy reads another kind of prompt, or one without a chat template.
            EngineError: there is no answer.
            RuntimeError: the sample's episode has ended.
            ValueError: it has asked ``max_turns`` times already.
        """
        if self._asked >= self._max_turns:
            raise too_many_turns(self._max_turns, "the episode asks for another answer")
        if self._is_over:
            raise RuntimeError("this episode has ended: it cannot ask for another answer")
        given = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        entries = {name: NonTensorData(value) for name, value in given.items() if value is not None}
        if entries and self._policy.input_mode != "history":
            mode = self._policy.input_mode
            raise TypeError(f"{', '.join(entries)}: for chats, and the policy has input_mode={mode!r}")
        request = self._request(
            {**entries, self._policy.input_key: self._read(prompt)}, {**self._generate_kwargs, **generate_kwargs}
        )
        place = self._asked
        self._asked += 1
        completion = asyncio.ensure_future(self._generate(request, 0))
        self._under_way.add(completion)
        try:
            answer = self._policy.answer(request, await completion)
        finally:
            self._under_way.discard(completion)
        self._answers[place] = answer
        return answer

    async def close(self) -> None:
        """Cancel the requests that nothing waits for any more."""
        self._is_over = True
        if self._under_way:
            for completion in self._under_way:
                completion.cancel()
            await asyncio.wait(self._under_way)

    def rows(self, reward: Any) -> list[TensorDictBase]:
        """Return a row ``[]`` for each answer, in the order of the requests; the last row is done.

        Args:
            reward: a number for the last turn, or one number per turn.

        Raises:
            ValueError: nothing was asked, there are more or fewer rewards than turns, or one is not finite.
            TypeError: the reward is neither a number nor a sequence of them.
        """
        answers = [self._answers[place] for place in sorted(self._answers)]
        if not answers:
            raise ValueError("the episode asked for no answer: there is nothing to train on")
        rewards = _rewards(reward, len(answers))
        return [
            self._row(answer, following, value)
            for answer, following, value in zip(answers, [*answers[1:], None], rewards, strict=True)
        ]

    # -- parts ------------------------------------------------------------------------------------------------------

    def _read(self, prompt: PromptLike) -> Any:
        """Return a prompt as the policy reads it."""
        mode = self._policy.input_mode
        if mode == "text" and isinstance(prompt, str):
            return prompt
        if mode == "history" and isinstance(prompt, str):
            return lazy_stack([History(role="user", content=prompt)])
        if mode == "history" and isinstance(prompt, History) and prompt.ndim == 1:
            return prompt
        if not isinstance(prompt, str | History) and len(prompt):
            if mode == "history" and isinstance(prompt[0], Mapping):
                return NonTensorData(list(prompt))  # with all that the template reads
            if mode == "tokens" and not isinstance(prompt[0], Mapping):
                return torch.as_tensor(prompt, dtype=torch.int64)
        kinds = {"history": "a History [turns], messages, or text", "text": "text", "tokens": "token ids"}
        raise TypeError(f"a policy of input_mode={mode!r} takes {kinds[mode]}, got {prompt!r:.200}")

    def _request(self, asked: dict[NestedKey, Any], generate_kwargs: dict[str, Any]) -> SampleRequest:
        """Return the request for a prompt, with the ids of the latest answer that it continues, if any.

        Args:
            asked: the prompt, at the policy's ``input_key``, and how it is rendered.
            generate_kwargs: of this answer.
        """
        keys = self._policy.keys
        written = (keys.tokens, keys.masks, keys.log_probs, keys.routed_experts, "policy_versions", "resume", SAMPLING)
        known = [key for key in written if key is not None]
        for place in sorted(self._answers, reverse=True):
            earlier = self._answers[place].select(*known, strict=False)
            (request,) = self._policy.requests(self._sample(asked, earlier), **generate_kwargs)
            had = self._answers[place].get((keys.tokens, "full")).tolist()
            if request.prompts.ids[0][: len(had)] == had:
                return request
        (request,) = self._policy.requests(self._sample(asked, None), **generate_kwargs)
        return request

    def _sample(self, asked: dict[NestedKey, Any], earlier: TensorDictBase | None) -> TensorDictBase:
        sample = self._data.copy()
        if earlier is not None:
            sample.update(earlier.copy())
        for key, value in asked.items():
            sample.set(key, value)
        return sample

    def _row(self, answer: TensorDictBase, following: TensorDictBase | None, reward: float) -> TensorDictBase:
        policy = self._policy
        mode = {"history": policy.history_key, "text": policy.text_key, "tokens": policy.tokens_key}[policy.input_mode]
        shown = answer.get(mode)
        is_last = following is None
        then = TensorDict(
            {
                mode: type(shown)(prompt=shown.full if following is None else following.get(mode).prompt),
                "reward": torch.tensor([[reward]]),
                "done": torch.tensor([is_last]),
                "terminated": torch.tensor([is_last]),
                "truncated": torch.tensor([False]),
            }
        )
        row = self._data.copy().update(answer)
        row.update({key: torch.tensor([False]) for key in ("done", "terminated", "truncated")})
        return row.set("next", then)


def _rewards(reward: Any, turns: int) -> list[float]:
    """Return a reward for each turn."""
    if (last := number_of(reward)) is not None:
        found: list[float | None] = [*[0.0] * (turns - 1), last]
    else:
        plain = reward.tolist() if hasattr(reward, "tolist") else reward
        found = [number_of(one) for one in plain] if isinstance(plain, list | tuple) else [None]
    values = [value for value in found if value is not None]
    if len(values) < len(found):
        raise TypeError(f"an episode must return its reward, a number or one number per turn, got {reward!r:.200}")
    if len(values) != turns:
        raise ValueError(f"the episode returned {len(values)} rewards for {turns} turns")
    return [finite(value, "the episode") for value in values]


def number_of(value: Any) -> float | None:
    """Return a number, a scalar tensor or a NumPy number as a float; ``None`` for anything else.

    >>> number_of(torch.tensor(True)), number_of(10**400), number_of("1"), number_of([1.0])
    (1.0, inf, None, None)
    """
    plain: Any = value.item() if getattr(value, "shape", None) == () else value
    if not isinstance(plain, Real | Decimal):
        return None
    try:
        return float(plain)
    except OverflowError:  # of an int
        return math.inf if plain > 0 else -math.inf  # type: ignore[operator]


def finite(reward: float, who: str) -> float:
    """Return a reward.

    Raises:
        ValueError: float32, which rows hold, would make it NaN or infinite.
    """
    if not abs(reward) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{who} returned {reward}: a reward must be finite, in float32")
    return reward
