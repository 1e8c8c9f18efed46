"""A synchronous ``vllm.LLM`` as an engine of ours: requests in, completions out, in the thread that calls.

It runs without our worker extension. So it follows no recorded experts, does not say which words sampling left out,
scores prompts at temperature 1 only, and knows no versions: a request for one of these is refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torchrl_moe import _compat
from torchrl_moe._errors import EngineError
from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.kept_ids import leaves_words_out
from torchrl_moe.modules.backends.replica import Completion, Request
from torchrl_moe.modules.backends.vllm.adapters import build_lora_request
from torchrl_moe.modules.backends.vllm.outputs import completion_from_vllm
from torchrl_moe.modules.backends.vllm.prompt_scores import scoring_params
from torchrl_moe.modules.backends.vllm.sampling import SamplingParamsBuilder

__all__ = ["NO_VERSION", "SyncLLM"]

NO_VERSION = -1
"""The version of weights whose updates are not counted."""
LOCKS: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
"""One for each ``vllm.LLM``: two calls at the same time would step one engine, and get each other's outputs."""
SERVED = "AsyncVLLM.from_pretrained(path) can"


class SyncLLM:
    """Runs requests on a ``vllm.LLM``.

    Args:
        llm: the engine; it stays the caller's.

    Raises:
        ValueError: it gives logits instead of log-probs, or captures routes that cannot be read.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._lock = LOCKS.setdefault(llm, threading.Lock())
        self._mode = llm.llm_engine.vllm_config.model_config.logprobs_mode
        if not self._mode.endswith("logprobs"):
            raise ValueError(
                f"the vllm.LLM gives logits, logprobs_mode={self._mode!r}: make it with 'processed_logprobs'"
            )
        self._sampling = SamplingParamsBuilder()
        self.layout = _layout_of(llm)

    def complete(self, requests: Sequence[Request], use_tqdm: bool = False) -> list[Completion]:
        """Run requests to their ends; other calls on the same ``vllm.LLM`` wait meanwhile.

        Raises:
            ValueError: a request asks for what this engine cannot do, or vLLM refuses it.
            EngineError: an earlier call was interrupted, and its answers came with these.
        """
        params = [self._params(request) for request in requests]
        prompts: list[Any] = [
            {"prompt": one.prompt}
            if one.prompt_token_ids is None
            else {"prompt_token_ids": one.prompt_token_ids.tolist()}
            for one in requests
        ]
        lora = [build_lora_request(one.lora_request) for one in requests]
        priority = [one.priority for one in requests]
        with self._lock:
            outputs = self.llm.generate(
                prompts,
                params,
                use_tqdm=use_tqdm,
                lora_request=None if all(one is None for one in lora) else lora,
                priority=priority if any(priority) else None,
            )
        _check_answered(prompts, outputs)
        return [
            completion_from_vllm(output, request, NO_VERSION) for output, request in zip(outputs, requests, strict=True)
        ]

    def _params(self, request: Request) -> Any:
        """Return vLLM's ``SamplingParams`` of a request."""
        params = self._sampling(request.sampling_params, request.guided_options)
        if request.routed_experts is not None or request.on_resume is not None or request.resume is not None:
            raise ValueError(f"a vllm.LLM follows no recorded experts, and resumes nothing; {SERVED}")
        if request.scoring is not None:
            if request.scoring.temperature != 1 or request.scoring.kept is not None:
                raise ValueError(
                    "a vllm.LLM scores at temperature 1 and over all words, and these tokens were sampled at "
                    f"{request.scoring.temperature:g}{'' if request.scoring.kept is None else ', over fewer'}: "
                    f"exclude 'sampling' if that is meant; {SERVED}"
                )
            assert request.prompt_token_ids is not None  # the wrapper makes such requests this way
            return scoring_params(params, request.scoring, request.prompt_token_ids)
        if params.logprobs is not None:
            self._refuse_other_distributions(params)
        return params.clone()  # vLLM writes into it

    def _refuse_other_distributions(self, params: Any) -> None:
        """Refuse to sample from another distribution than log-probs are of, or from one that cannot be known."""
        name = leaves_words_out(partial(getattr, params))
        if name is not None:
            raise ValueError(
                f"{name}={getattr(params, name)!r} leaves words out, and a vllm.LLM does not say which: leave it "
                f"out, or pass return_log_probs=False; {SERVED}"
            )
        if params.temperature not in (0, 1) and self._mode.startswith("raw"):
            raise ValueError(
                f"temperature={params.temperature:g}, and this vllm.LLM's log-probs are of temperature 1: make it with "
                f"LLM(..., logprobs_mode='processed_logprobs'), or pass return_log_probs=False; {SERVED}"
            )


def _layout_of(llm: Any) -> RoutingLayout | None:
    """Return the routers of a ``vllm.LLM`` that captures routes, from the model that runs; else ``None``."""
    config = llm.llm_engine.vllm_config
    model = config.model_config
    if not config.aux_output_config.enabled:
        return None
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("the vllm.LLM captures routes on one of its pipeline stages only: use tensor_parallel_size")
    try:
        layers = llm.apply_model(_compat.router_layer_ids)[0]
    except TypeError as error:  # by default vLLM does not send functions to its other processes
        raise ValueError(
            "the vllm.LLM captures routes, and cannot be asked for its routers: set "
            f"VLLM_ALLOW_INSECURE_SERIALIZATION=1 before it is made, or use an AsyncVLLM ({error})"
        ) from error
    return RoutingLayout(
        num_layers=model.get_total_num_hidden_layers(),
        moe_layers=tuple(layers),
        top_k=model.get_num_experts_per_tok(),
        num_experts=model.get_num_experts(),
    )


def _check_answered(prompts: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Refuse outputs that are not, one by one, those of the prompts: vLLM returns all that its engine had."""
    asked = [prompt.get("prompt_token_ids") for prompt in prompts]
    given = [output.prompt_token_ids for output in outputs]
    if len(asked) != len(given) or any(a is not None and list(a) != list(b) for a, b in zip(asked, given, strict=True)):
        raise EngineError(
            f"vLLM gave {len(given)} answers to {len(asked)} prompts, some to others: an earlier call was interrupted, "
            "and left its requests. They are gone now; call again."
        )
