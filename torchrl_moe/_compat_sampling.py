"""The parts of vLLM that recording kept tokens needs, private names included; all others are in ``_compat.py``.

vLLM 0.30 has ``return_sampling_mask``: its scheduler and its output processor carry masks, but only its newer model
runner, which has no CPU, fills them, and only for requests with a top_k. Here a hook in the worker's sampler fills
them, and our scheduler sets the switch after vLLM's own checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchrl_moe import _compat_routing

__all__ = [
    "adjust_prompt_logits",
    "carries_masks",
    "fill_masks",
    "keep_masks_as_arrays",
    "leave_masks",
    "why_unscored",
]

Name = Callable[[Any, Sequence[int]], Any]

WORK = {
    "MinPLogitsProcessor": "min_p_count",
    "LogitBiasLogitsProcessor": "biases",
    "MinTokensLogitsProcessor": "min_toks",
}
"""vLLM's own logits processors -> their attribute that is empty, or 0, while they have nothing to do."""


def carries_masks(config: Any) -> bool:
    """Whether an engine core built from ``config`` returns masks that are all a trainer needs to know.

    They are not if the user has logits processors, which may change values, or if log-probs are not those of the
    sampled distribution.
    """
    model = config.model_config
    return (
        _compat_routing.has_scheduler(config)
        and not model.logits_processors
        and model.logprobs_mode == "processed_logprobs"
    )


def keep_masks_as_arrays() -> None:
    """Make vLLM's output processor keep the masks of an answer as arrays, not as lists of lists (0.30)."""
    from vllm.v1.engine.output_processor import RequestState

    whole = RequestState._new_completion_output
    if hasattr(whole, "torchrl_moe"):
        return

    def with_arrays(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps, self.sampling_mask_chunks = self.sampling_mask_chunks, []
        output = whole(self, *args, **kwargs)
        self.sampling_mask_chunks, output.sampling_mask = steps, [step.token_ids for step in steps]
        return output

    with_arrays.torchrl_moe = True  # type: ignore[attr-defined]
    RequestState._new_completion_output = with_arrays


def fill_masks(runner: Any, name: Name) -> None:
    """Make a worker's model runner report which token ids its sampler kept (0.30).

    Nothing is computed or sent in a step in which no id can be cut off, or no log-prob is wanted.

    Args:
        runner: the worker's.
        name: turns log-probs ``[R, V]`` and the tokens' positions in their answers into ids and offsets, or ``None``.
    """
    from vllm.v1.outputs import SamplingMaskLists

    sampler, sample_tokens = runner.sampler, runner.sample_tokens
    sample = sampler.sample
    has_grammar, masks = False, None

    def sample_and_name(logits: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal masks
        tokens, log_probs = sample(logits, metadata, *args, **kwargs)
        wanted = log_probs is not None and metadata.max_num_logprobs is not None
        if wanted and (has_grammar or _leaves_words_out(metadata)):
            requests = [runner.requests[request] for request in runner.input_batch.req_ids]
            named = name(log_probs, [len(request.output_token_ids) for request in requests])
            masks = None if named is None else SamplingMaskLists(*named)
        return tokens, log_probs

    def sample_tokens_with_masks(grammar_output: Any) -> Any:
        nonlocal has_grammar, masks
        has_grammar, masks = grammar_output is not None, None
        output = sample_tokens(grammar_output)
        if masks is not None:  # with asynchronous scheduling the output comes later, inside another object
            getattr(output, "_model_runner_output", output).sampling_masks = masks
        return output

    sampler.sample, runner.sample_tokens = sample_and_name, sample_tokens_with_masks


def leave_masks(runner: Any) -> None:
    """Undo :func:`fill_masks`."""
    del runner.sampler.sample, runner.sample_tokens


def why_unscored(config: Any) -> str:
    """Return why an engine of this configuration cannot score prompts as they were sampled, or ""."""
    if config.use_v2_model_runner:
        return "vLLM's Model Runner V2 computes them elsewhere: VLLM_USE_V2_MODEL_RUNNER=0 turns it off"
    mode = config.model_config.logprobs_mode
    return "" if mode.endswith("logprobs") else f"logprobs_mode={mode!r} gives logits"


def adjust_prompt_logits(runner: Any, adjusted: Callable[[Any, Any, int], Any]) -> None:
    """Make a worker's model runner normalise log-probs of a prompt over the logits that ``adjusted`` returns (0.30).

    vLLM handles one request after another; here each is handled in its own call, so that it is known whose logits these
    are.

    Args:
        runner: the worker's.
        adjusted: called with logits ``[N, V]``, the request's sampling parameters, and the number of tokens before
            these.
    """
    sampler, whole = runner.sampler, runner._get_prompt_logprobs_dict
    compute = sampler.compute_logprobs

    def one_by_one(hidden_states: Any, num_scheduled_tokens: Any) -> dict[str, Any]:
        asked = runner.num_prompt_logprobs
        if not asked:  # nearly every step
            return {}
        found: dict[str, Any] = {}
        try:
            for name in list(asked):
                request, runner.num_prompt_logprobs = runner.requests[name], {name: asked[name]}
                start, params = request.num_computed_tokens, request.sampling_params
                sampler.compute_logprobs = lambda logits, a=params, b=start: compute(adjusted(logits, a, b))
                found |= whole(hidden_states, num_scheduled_tokens)
                if not runner.num_prompt_logprobs:
                    del asked[name]
        finally:
            runner.num_prompt_logprobs, sampler.compute_logprobs = asked, compute
        return found

    runner._get_prompt_logprobs_dict = one_by_one


def _leaves_words_out(metadata: Any) -> bool:
    """Whether a request of a batch may be sampled from less than the whole vocabulary."""
    processors = (*metadata.logitsprocs.argmax_invariant, *metadata.logitsprocs.non_argmax_invariant)
    return (
        metadata.top_k is not None
        or metadata.top_p is not None
        or metadata.allowed_token_ids_mask is not None
        or bool(metadata.bad_words_token_ids)
        or any(_is_busy(processor) for processor in processors)
    )


def _is_busy(processor: Any) -> bool:
    """Whether a logits processor is active; one that is not vLLM's own always counts as active."""
    attribute = WORK.get(type(processor).__name__)
    return attribute is None or bool(getattr(processor, attribute))
