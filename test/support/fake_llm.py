"""A stand-in for ``vllm.LLM``: the names that we use of it, and answers that can be worked out by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from torchrl_moe.testing import ByteTokenizer

LAYERS, TOP_K, EXPERTS = 3, 2, 8
NEW = 3
"""Tokens of an answer: the sum of the prompt's, and one more each time, modulo 256; each has log-prob -1, -2, ..."""


class LLM:
    """Answers with :data:`NEW` tokens; token t of a prompt has log-prob ``-t / 10``, and experts 1 and 2 in all layers.

    Attributes:
        asked: prompts, parameters, adapters and priorities of each call.
        left: outputs that an interrupted call has left behind; they come with those of the next one.
        most: how many calls were in it at a time.
    """

    def __init__(self, routes: bool = False, mode: str = "raw_logprobs", pipeline: int = 1) -> None:
        model = SimpleNamespace(
            logprobs_mode=mode,
            get_total_num_hidden_layers=lambda: LAYERS,
            get_num_experts_per_tok=lambda: TOP_K,
            get_num_experts=lambda: EXPERTS,
        )
        parallel = SimpleNamespace(pipeline_parallel_size=pipeline)
        config = SimpleNamespace(
            model_config=model, parallel_config=parallel, aux_output_config=SimpleNamespace(enabled=routes)
        )
        self.llm_engine = SimpleNamespace(vllm_config=config)
        self.asked: list[tuple[list[Any], list[Any], Any, Any]] = []
        self.left: list[Any] = []
        self.applies: Callable[[], list[Any]] = lambda: [[1, 2]]
        self.tokenizer = ByteTokenizer()
        self.most = 0
        self._routes = routes
        self._inside = 0

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        assert function.__name__ == "router_layer_ids"
        return self.applies()

    def generate(
        self, prompts: Sequence[Any], params: Sequence[Any], *, use_tqdm: bool, lora_request: Any, priority: Any
    ) -> list[Any]:
        self._inside += 1
        self.most = max(self.most, self._inside)
        threading.Event().wait(0.01)  # other threads could come in
        self.asked.append((list(prompts), list(params), lora_request, priority))
        left, self.left = self.left, []
        outputs = [self._output(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        self._inside -= 1
        return left + outputs

    def _output(self, prompt: Any, params: Any) -> Any:
        ids = prompt.get("prompt_token_ids") or self.tokenizer(prompt["prompt"])["input_ids"]
        scores = None
        if params.prompt_logprob_token_ids is not None:
            assert params.prompt_logprob_token_ids[:, 0].tolist() == ids[1:]
            scores = np.array([[-t / 10] for t in range(1, len(ids))])
        return SimpleNamespace(
            prompt=prompt.get("prompt"),
            prompt_token_ids=ids,
            num_cached_tokens=None,
            metrics=None,
            prompt_token_id_logprobs=scores,
            outputs=[self._answer(ids, params, index) for index in range(params.n)],
        )

    def _answer(self, ids: list[int], params: Any, index: int) -> Any:
        routes = np.zeros((len(ids) + NEW - 1, LAYERS, TOP_K), np.uint8)
        routes[:, 1:] = [1, 2]
        logprobs = [{0: SimpleNamespace(logprob=-1.0 - t)} for t in range(NEW)]
        return SimpleNamespace(
            index=index,
            token_ids=[(sum(ids) + t + index) % 256 for t in range(NEW)],
            text="",
            finish_reason="length",
            stop_reason=None,
            logprobs=None if params.logprobs is None else logprobs,
            routed_experts=routes if self._routes else None,
            sampling_mask=None,
        )


LLM.__module__ = "vllm.entrypoints.llm"  # by which it is known
