"""Answers of a model's own generation as TensorDicts, with the keys of an engine's rollouts as far as they apply.

A weight version, segments, a finish reason and cached tokens are an engine's to say, and are not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_moe.data import UNSET_EXPERT, RoutedExperts
from torchrl_moe.data.segments import first_writer_wins
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput
from torchrl_moe.modules.policies.generation_settings import GenerationSettings, temperature_of
from torchrl_moe.modules.policies.prompt_reading import Source
from torchrl_moe.modules.policies.prompts import Prompts, history_entry, text_entry
from torchrl_moe.modules.policies.rollout import RolloutKeys, answer_tensordict, check_prompts, repeated
from torchrl_moe.modules.policies.sampling_entry import SAMPLING
from torchrl_moe.modules.policies.transformers_generation import generate_answers
from torchrl_moe.modules.replay.router_replay import RouterReplay

__all__ = ["Generation"]

OF_ENGINES = ("policy_versions", "policy_version", "num_segments", "resume", "finish_reason", "num_cached_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How prompts become answers, and where these are written.

    Attributes:
        model: samples them.
        source: of the prompts.
        settings: how to sample.
        answers: to each prompt.
        keys: of tensors.
        text_key: of the text; ``None`` for tokens alone.
        history_key: of the chat; ``None`` if prompts are none.
        recorder: of the experts; ``None`` for none.
    """

    model: nn.Module
    source: Source
    settings: GenerationSettings
    answers: int
    keys: RolloutKeys
    text_key: str | None
    history_key: str | None
    recorder: RouterReplay | None

    @property
    def pad(self) -> int:
        """What stands where there is no token."""
        return self.source.pad or 0

    def run(self, samples: Sequence[TensorDictBase]) -> list[TensorDictBase]:
        """Return one TensorDict for each answer, batch size ``[]``, prompt by prompt.

        Args:
            samples: the input; what an earlier turn wrote there for tokens that its prompt repeats is kept.

        Raises:
            ValueError: a prompt is missing or empty, or continues from a turn of another temperature; another number of
                answers than the wrapper's; log-probs that no trainer can compute.
        """
        if self.settings.samples not in (1, self.answers):
            raise ValueError(f"num_return_sequences={self.settings.samples} differs from num_samples={self.answers}")
        config = self.settings.config(self.model)
        if config.pad_token_id is None:
            config.pad_token_id = self.pad
        params = {"temperature": temperature_of(config), "logprobs": 0, "top_k": config.top_k, "top_p": config.top_p}
        prompts = self.source.prompts(samples)
        check_prompts(prompts.ids, self.keys, params, samples)
        completions = generate_answers(
            self.model,
            prompts.ids,
            config,
            self.answers,
            log_probs=self.keys.log_probs is not None,
            replay=self.recorder,
            tokenizer=self.source.tokenizer,
        )
        found = [
            self._answer(completion, output, prompts, i, samples[i], params)
            for i, completion in enumerate(completions)
            for output in completion.outputs
        ]
        if all(float(one[SAMPLING, "temperature"]) == 1 and "kept" not in one[SAMPLING] for one in found):
            for one in found:
                del one[SAMPLING]  # all words, as the model has them: what is meant where nothing is said
        return found

    def _answer(
        self,
        completion: Completion,
        output: CompletionOutput,
        prompts: Prompts,
        i: int,
        sample: TensorDictBase,
        params: Mapping[str, Any],
    ) -> TensorDictBase:
        answer = answer_tensordict(completion, output, None, self.keys, params, sample).exclude(*OF_ENGINES)
        if self.keys.routed_experts is not None:
            answer[self.keys.routed_experts] = self._routes(output, sample, answer[self.keys.tokens, "prompt"])
        if self.text_key is not None:
            self._add_text(answer, output.token_ids.tolist(), prompts, i)
        return answer

    def _routes(self, output: CompletionOutput, sample: TensorDictBase, prompt: Tensor) -> RoutedExperts:
        assert output.routed_experts is not None
        assert self.recorder is not None
        fed = torch.from_numpy(output.routed_experts)
        routes = torch.cat([fed, torch.full_like(fed[:1], UNSET_EXPERT)])  # the last token was never fed
        routes = routes.to(torch.int8 if self.recorder.num_experts <= 128 else torch.int16)
        real = repeated(sample, prompt, self.keys)
        known = sample.get((str(self.keys.routed_experts), "full"), None)
        if real is not None and known is not None and len(known) == len(real):
            routes = first_writer_wins(known[real].to(routes), routes)
        return RoutedExperts(full=routes)

    def _add_text(self, answer: TensorDictBase, ids: list[int], prompts: Prompts, i: int) -> None:
        tokenizer, skip = self.source.tokenizer, self.settings.skip_special_tokens
        response = tokenizer.decode(ids, skip_special_tokens=skip)
        answer.set(self.text_key, text_entry(prompts.texts[i], response))
        if self.history_key is not None:
            # the template writes the end-of-turn token after the content: it is no part of it
            if ids and ids[-1] == tokenizer.eos_token_id:
                response = tokenizer.decode(ids[:-1], skip_special_tokens=skip)
            answer.set(self.history_key, history_entry(prompts.histories[i], response))
