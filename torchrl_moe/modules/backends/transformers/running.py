"""A request in flight: its parts, whether it can be served, and its result so far."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.replica import Completion, CompletionMetrics, CompletionOutput, Request, nothing_yet
from torchrl_moe.modules.backends.request_routes import RequestRoutes, check_rows, rows_of_answer
from torchrl_moe.modules.backends.transformers.answer import Answer
from torchrl_moe.modules.backends.transformers.engine_args import EngineArguments
from torchrl_moe.modules.backends.transformers.sampling import Sampling, read_sampling
from torchrl_moe.modules.backends.transformers.words import Words

__all__ = ["RequestReader", "Running"]


@dataclass(eq=False, slots=True)
class Running:
    """One request in flight.

    Attributes:
        answers: that are generated.
        done: index -> an answer that was finished before this request.
        kept: tokens that its answers had before.
        joined_at: when its first answer joined the batch; 0 before.
        token_at: when its first token was made; 0 before.
        scores: log-probs of its prompt's tokens, float32 ``[P]``, once computed, if it asks for them.
        over: set when its completion is sent.
    """

    request: Request
    prompt_ids: list[int]
    started: float = field(default_factory=time.monotonic)
    answers: list[Answer] = field(default_factory=list)
    done: dict[int, CompletionOutput] = field(default_factory=dict)
    kept: int = 0
    joined_at: float = 0.0
    token_at: float = 0.0
    scores: NDArray[np.float32] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to compute."""
        if self.request.scoring is not None:
            return self.scores is not None
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def generated(self) -> int:
        """Tokens that this request has generated."""
        return sum(len(answer.tokens) for answer in self.answers) - self.kept

    def completion(self) -> Completion:
        """Return its completion so far; answers that still grow count as cut."""
        request, began, given = self.request, self.started, self.request.resume
        before = 0.0 if given is None else given.metrics.total_seconds
        return Completion(
            request_id=request.request_id,
            prompt=request.prompt if given is None else given.prompt,
            prompt_token_ids=np.array(self.prompt_ids, np.int64),
            num_cached_tokens=0,
            outputs=self._outputs(),
            metrics=CompletionMetrics(
                queue_seconds=max(self.joined_at - began, 0.0),
                first_token_seconds=max(self.token_at - began, 0.0),
                total_seconds=before + time.monotonic() - began,
            ),
            prompt_logprobs=self.scores,
        )

    def _outputs(self) -> list[CompletionOutput]:
        if self.request.scoring is None:
            grown = {one.index: one.output(self.request.return_routed_experts) for one in self.answers}
            return [output for _, output in sorted({**self.done, **grown}.items())]
        outputs = nothing_yet(self.request).outputs  # a scoring request has no answer
        if self.scores is not None:
            outputs[0].finish_reason = "length"
        return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReader:
    """Turns requests into what runs, or refuses them.

    Attributes:
        arguments: of the engine.
        max_model_len: tokens that a prompt and its answer may have.
        vocabulary: how many words the model has.
        token_bytes: bytes of a token's keys and values.
        words: the tokenizer.
        layout: the routers; ``None`` if no routes are recorded.
        routes: which requests follow recorded experts.
        device: of the random generators.
    """

    arguments: EngineArguments
    max_model_len: int
    vocabulary: int
    token_bytes: int
    words: Words
    layout: RoutingLayout | None
    routes: RequestRoutes
    device: torch.device

    def __call__(self, request: Request) -> Running:
        """Return what a request asks for.

        Raises:
            ValueError: this engine cannot serve it.
        """
        if request.lora_request is not None:
            raise ValueError("lora_request: engine='transformers' serves no adapters; vLLM does")
        request = self.routes.checked(request)
        sampling = read_sampling(request.sampling_params, request.guided_options)
        given = request.prompt_token_ids
        ids = self.words.encode(request.prompt or "") if given is None else given.tolist()
        self._check_prompt(ids, scored=request.scoring is not None)
        running = Running(request, ids)
        if request.scoring is None:
            for index in range(sampling.n):
                self._add(running, sampling, index)
        return running

    def _add(self, running: Running, sampling: Sampling, index: int) -> None:
        """Add an answer: as it is if it was finished before, else to generate, or to continue."""
        request = running.request
        before = None if request.resume is None else request.resume.outputs[index]
        if before is not None and before.finish_reason != "abort":
            running.done[index] = before
            return
        answer = Answer(running.prompt_ids, sampling, index, self.words, self.max_model_len, self.layout)
        answer.followed, answer.how = request.routed_experts, self.routes.how(request)
        if before is not None and len(before.token_ids):
            self._check_first_part(answer, before)
            answer.go_on_from(before)
            running.kept += len(before.token_ids)
        if sampling.seed is not None:  # without repeating random numbers of the first part
            seed = sampling.seed + index + len(answer.tokens)
            answer.generator = torch.Generator(self.device).manual_seed(seed)
        self._check_room(answer)
        running.answers.append(answer)

    def _check_prompt(self, ids: list[int], scored: bool) -> None:
        most = self.max_model_len - (not scored)
        if not 1 <= len(ids) <= most:
            raise ValueError(f"a prompt must have 1 to {most} tokens, got {len(ids)}: max_model_len is the limit")
        self._check_words("a prompt", ids)

    def _check_words(self, what: str, ids: list[int]) -> None:
        if wrong := [token for token in ids if not 0 <= token < self.vocabulary]:
            raise ValueError(f"{what} names token {wrong[0]}; the model has 0..{self.vocabulary - 1}")

    def _check_first_part(self, answer: Answer, before: CompletionOutput) -> None:
        """Refuse what cannot be read again: in the batch it would end the engine, and all other requests with it."""
        ids = before.token_ids.tolist()
        self._check_words(f"answer {before.index} to resume", ids)
        if answer.how == "forced" and self.layout is not None and before.routed_experts is not None:
            rows = rows_of_answer(before.routed_experts, self.layout)
            check_rows(rows, len(answer.prompt_ids) + len(ids), self.layout)

    def _check_room(self, answer: Answer) -> None:
        budget, needed = self.arguments.kv_cache_memory_bytes, answer.longest * self.token_bytes
        if budget is not None and needed > budget:
            raise ValueError(
                f"{answer.longest} tokens of prompt and answer need {needed} bytes of keys and values: raise "
                f"kv_cache_memory_bytes={budget}, or lower max_tokens"
            )
