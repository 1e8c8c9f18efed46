"""One run of the checks over one engine: its requests, and the weights that the engine has.

Answers that several checks use are generated once. A check that changes the weights restores them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchrl_moe.data import RoutingLayout
from torchrl_moe.data.routed_experts import routes_from_vllm
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput
from torchrl_moe.modules.policies.unstack import checkpoint_tensors
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.testing.conformance.adapter import (
    Answer,
    EngineAdapter,
    NotOffered,
    ReportsVersion,
    Sampling,
    UpdatesWeights,
)
from torchrl_moe.testing.conformance.judge import Judge, Reference, Sampled
from torchrl_moe.testing.conformance.report import DoesNotHold, Settings, in_thread, result

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SECONDS = 60.0  # that a replica gets to name its version
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
Made = TypeVar("Made")


class ServiceAdapter:
    """The adapter of our own services: ``AsyncVLLM`` with any backend and engine, and ``FakeAsyncVLLM``.

    Routes are those that ``vLLMWrapper`` would write for training.

    Args:
        engine: the service.
        update: sends a model's weights to the service, and returns once they are served. Default: the sender that has
            this engine; without one, checks of updates are not offered.
    """

    def __init__(self, engine: GenerationService, update: Callable[[PreTrainedModel], object] | None = None) -> None:
        self._engine = engine
        self._update = update
        self.name = f"{type(engine).__name__}({engine.infos[0].model!r})"

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, request_ids: Sequence[str] | None = None
    ) -> list[list[Answer]]:
        """Answer prompts; see :class:`~torchrl_moe.testing.conformance.adapter.EngineAdapter`."""
        completions = self._engine.generate(
            prompt_token_ids=[list(prompt) for prompt in prompts],
            sampling_params=_params(sampling),
            request_ids=None if request_ids is None else list(request_ids),
            use_tqdm=False,
        )
        return [[self._answer(one, output) for output in one.outputs] for one in completions]  # type: ignore[union-attr]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests."""
        self._engine.abort(request_ids)

    def resume(self, prompt: Sequence[int], answer: Answer, sampling: Sampling) -> Answer:
        """Continue an answer; the service keeps what it knows of its first part."""
        del prompt  # the completion has it
        (whole,) = self._engine.generate(  # type: ignore[misc]
            resume=[answer.native], sampling_params=_params(sampling), use_tqdm=False
        )
        return self._answer(whole, whole.outputs[0])

    def update_weights(self, model: PreTrainedModel) -> None:
        """Send a model's weights to the service.

        Raises:
            NotOffered: there is neither ``update`` nor a sender.
        """
        if self._update is not None:
            self._update(model)
        elif self._engine.weight_sync is not None:
            self._engine.update_weights(checkpoint_tensors(model))
        else:
            raise NotOffered("no sender has this engine, and ServiceAdapter was given no update=")

    def weights_version(self) -> int:
        """Return the oldest version that a replica has."""
        return min(entry.replica.call(Engine.weights_version, SECONDS) for entry in self._engine.replica_table)

    def _answer(self, completion: Completion, output: CompletionOutput) -> Answer:
        layout, tokens = self._engine.routing_layout, len(completion.prompt_token_ids) + len(output.token_ids)
        rows: NDArray[np.integer] | None = None
        # with -1 for dense layers and the last token, which vLLM's own arrays cannot say
        if layout is not None and output.routed_experts is not None:
            rows = routes_from_vllm(output.routed_experts, tokens, layout)
        return Answer(
            token_ids=output.token_ids,
            log_probs=output.logprobs,
            routed_experts=rows,
            versions=output.policy_versions,
            finish_reason=output.finish_reason,
            num_cached_tokens=completion.num_cached_tokens,
            native=replace(completion, outputs=[output]),
        )


def _params(sampling: Sampling) -> dict[str, object]:
    return {
        "max_tokens": sampling.max_tokens,
        "n": sampling.n,
        "logprobs": 0,
        "ignore_eos": True,  # or answers end early, and checks that interrupt them have nothing to cut
        "temperature": 1.0,  # not the model's generation_config's
        **sampling.changes,
    }


class Trial:
    """The checks' access to an engine."""

    def __init__(
        self, adapter: EngineAdapter, reference: Reference | None, layout: RoutingLayout | None, settings: Settings
    ) -> None:
        self.adapter = adapter
        self.settings = settings
        # the model's own layout wins over a given one
        known = layout if reference is None or reference.layout is None else reference.layout
        self.judge = Judge(settings, known, reference)
        self._reference = reference
        self.serving = reference  # whose weights the engine has now
        self._altered: Reference | None = None
        self._made: dict[Any, Future[Any]] = {}

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """Return a prompt of random ids, none of them special."""
        special: set[int | None] = set()
        vocabulary = self.settings.vocabulary
        if self._reference is not None:
            config = self._reference.model.config
            vocabulary = min(vocabulary, int(config.vocab_size))
            for value in (getattr(config, name, None) for name in SPECIAL):
                special.update(value if isinstance(value, list) else [value])
        ids = [token for token in range(vocabulary) if token not in special]
        return random.Random(f"{self.settings.seed} {seed} {length}").choices(ids, k=length)

    def ask(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, request_ids: Sequence[str] | None = None
    ) -> list[Sampled]:
        # in a thread: an engine that hangs is a finding, not the end of the run
        asked = in_thread(lambda: self.adapter.generate(prompts, sampling, request_ids))
        groups = result(asked, self.settings.patience)
        if [len(group) for group in groups] != [sampling.n] * len(prompts):
            raise DoesNotHold(
                f"generate gave {[len(group) for group in groups]} answers to {len(prompts)} prompts, wanted "
                f"{sampling.n} to each"
            )
        found = [
            Sampled(tuple(prompt), sampling, answer)
            for prompt, group in zip(prompts, groups, strict=True)
            for answer in group
        ]
        # a named request may have been aborted before its first token; others may not be empty
        empty = sum(not sampled.tokens for sampled in found)
        if empty and request_ids is None:
            raise DoesNotHold(f"{empty} of {len(found)} answers have no token")
        return found

    @cached_property
    def plain(self) -> list[Sampled]:
        """Answers sampled from the model's own distribution, to prompts of several lengths."""
        prompts = [self.prompt(length) for length in self.settings.prompts]
        return self.ask(prompts, Sampling(max_tokens=self.settings.answer))

    @cached_property
    def repeated(self) -> tuple[Sampled, Sampled]:
        """Answers to one long prompt, sent twice in a row: the second time it is cached, if the engine caches."""
        prompt, sampling = self.prompt(self.settings.long_prompt, seed=1), Sampling(max_tokens=self.settings.answer)
        (first,), (second,) = self.ask([prompt], sampling), self.ask([prompt], sampling)
        return first, second

    def once(self, make: Callable[[Trial], Made]) -> Made:
        """Return the cached result of a function of this trial; it is called once, and its error is raised again."""
        if make not in self._made:
            made: Future[Made] = Future()
            try:
                made.set_result(make(self))
            except (DoesNotHold, NotOffered) as error:
                made.set_exception(error)
            self._made[make] = made
        return self._made[make].result()

    @property
    def judge_now(self) -> Judge:
        """A judge with the weights that the engine has now."""
        return self.judge if self.serving is None else self.judge.by(self.serving)

    def check_updates(self) -> UpdatesWeights:
        """Return the adapter, if it takes weights."""
        if not isinstance(self.adapter, UpdatesWeights):
            raise NotOffered("the adapter has no update_weights(model)")
        return self.adapter

    def switch_weights(self) -> Reference:
        """Send other weights to the engine, alternately altered ones and the model's own; return those it has then.

        :attr:`judge` still uses the model's own.
        """
        engine, own = self.check_updates(), self.judge.reference
        if self._altered is None:  # made once: it copies the model
            self._altered = own.altered(self.settings.seed + 1)
        target = self._altered if self.serving is own else own
        engine.update_weights(target.model)
        self.serving = target
        return target

    def restore_weights(self) -> None:
        """Restore the model's own weights, if the engine has others."""
        if self.serving is not self._reference:
            self.switch_weights()

    def version(self) -> int | None:
        """Return the version of the engine's weights, if it reports one."""
        return self.adapter.weights_version() if isinstance(self.adapter, ReportsVersion) else None

    def close(self) -> None:
        try:
            self.restore_weights()
        finally:
            if self._reference is not None:
                self._reference.close()
