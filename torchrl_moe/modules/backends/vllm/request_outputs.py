"""From our :class:`Completion` to vLLM's ``RequestOutput``, for code that reads vLLM's own objects, in the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_moe.modules.backends.replica import Completion, CompletionOutput

__all__ = ["generate_request_outputs", "request_output"]


def generate_request_outputs(engine: Any, prompts: Any = None, sampling_params: Any = None, **kwargs: Any) -> Any:
    """Generate, with vLLM's own ``RequestOutput`` for an answer; arguments as in the engine's ``generate``.

    Args:
        engine: the service.
        prompts: see there.
        sampling_params: vLLM's; ``logprobs=1`` gives the sampled tokens' own log-probs and no others,
            ``prompt_logprobs`` those of the prompt's tokens, at temperature 1, for which they are read once more.
        **kwargs: see there.

    Returns:
        One for one prompt, else a list in input order.
    """
    params, of_prompt = _own_log_probs_only(sampling_params)
    answer = engine.generate(prompts, params, **{"use_tqdm": False, **kwargs})
    completions = [answer] if isinstance(answer, Completion) else answer
    scores: Sequence[Any] = [None] * len(completions)
    if of_prompt:
        asked = {name: kwargs[name] for name in ("actor_index", "lora_request", "timeout_seconds") if name in kwargs}
        scores = engine.score([one.prompt_token_ids.tolist() for one in completions], **asked)
    outputs = [request_output(one, log_probs) for one, log_probs in zip(completions, scores, strict=True)]
    return outputs[0] if isinstance(answer, Completion) else outputs


def _own_log_probs_only(params: Any) -> tuple[Any, bool]:
    """Return parameters that ask for no log-probs but the tokens' own, and whether the prompt's are wanted."""
    from vllm import SamplingParams

    if not isinstance(params, SamplingParams):
        return params, False
    of_prompt = params.prompt_logprobs in (0, 1)
    params = params.clone()
    if of_prompt:
        params.prompt_logprobs = None
    if params.logprobs == 1:  # the most likely one's beside the sampled one's
        params.logprobs = 0
    return params, of_prompt


def request_output(completion: Completion, prompt_log_probs: Any = None) -> Any:
    """Return vLLM's ``RequestOutput`` of a completion.

    Args:
        completion: the completion.
        prompt_log_probs: of the prompt's tokens, float ``[P]``, if they are known; the first is not read.
    """
    from vllm.outputs import RequestOutput

    ids = completion.prompt_token_ids.tolist()
    of_prompt = None if prompt_log_probs is None else [None, *_positions(ids[1:], prompt_log_probs.tolist()[1:])]
    return RequestOutput(
        request_id=completion.request_id,
        prompt=completion.prompt,
        prompt_token_ids=ids,
        prompt_logprobs=of_prompt,
        outputs=[_output(one) for one in completion.outputs],
        finished=completion.finished,
        num_cached_tokens=completion.num_cached_tokens,
    )


def _output(output: CompletionOutput) -> Any:
    from vllm.outputs import CompletionOutput as Output

    ids = output.token_ids.tolist()
    log_probs = None if output.logprobs is None else output.logprobs.tolist()
    return Output(
        index=output.index,
        text=output.text,
        token_ids=ids,
        cumulative_logprob=None if log_probs is None else sum(log_probs),
        logprobs=None if log_probs is None else _positions(ids, log_probs),
        routed_experts=output.routed_experts,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )


def _positions(ids: Sequence[int], log_probs: Sequence[float]) -> list[Any]:
    from vllm.logprobs import Logprob

    return [{token: Logprob(logprob=value)} for token, value in zip(ids, log_probs, strict=True)]
