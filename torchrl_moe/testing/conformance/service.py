"""The adapter of our own services: ``AsyncVLLM`` with any backend and engine, and ``FakeAsyncVLLM``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrl_moe.data.routed_experts import routes_from_vllm
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput
from torchrl_moe.modules.policies.unstack import checkpoint_tensors
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.testing.conformance.adapter import Answer, NotOffered, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ServiceAdapter"]

SECONDS = 60.0


class ServiceAdapter:
    """A service, as the checks use it. Routes are those that ``vLLMWrapper`` would write for training.

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
        return min(entry.replica.weights_version(SECONDS) for entry in self._engine.replica_table)

    def _answer(self, completion: Completion, output: CompletionOutput) -> Answer:
        layout, tokens = self._engine.routing_layout, len(completion.prompt_token_ids) + len(output.token_ids)
        rows: Any = None
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


def _params(sampling: Sampling) -> dict[str, Any]:
    return {
        "max_tokens": sampling.max_tokens,
        "n": sampling.n,
        "logprobs": 0,
        "ignore_eos": True,
        "temperature": 1.0,
        **sampling.changes,
    }
