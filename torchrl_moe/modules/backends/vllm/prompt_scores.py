"""Log-probs of a prompt's own tokens: what vLLM is asked for, and how its worker adjusts logits as the rollout's were.

vLLM scores any words that a request names for each position (``prompt_logprob_token_ids``), normalised over all words
at temperature 1, whatever it samples with. Here a request names its own next token. Temperature and kept words travel
in its ``SamplingParams``, as its rows do (``forced_rows``), and the worker divides and masks logits by them. (Naming
all kept words instead would need no hook, but a rectangle of ids as wide as the longest list.)

Letters: P prompt tokens, N tokens of a step, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchrl_moe.modules.backends.replica import Scoring

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["adjust_scores", "adjusted", "prompt_logprobs", "scoring_params", "why_unscored"]

KEY = "torchrl_moe_scoring"


def scoring_params(params: Any, scoring: Scoring, token_ids: NDArray[Any]) -> Any:
    """Return ``SamplingParams`` that ask for the log-probs of a prompt's tokens, and for no routes."""
    params = params.clone()
    params.routed_experts_prompt_start = len(token_ids)
    params.skip_reading_prefix_cache = True  # a token that is not computed has no log-prob
    if len(token_ids) > 1:
        params.prompt_logprob_token_ids = np.ascontiguousarray(token_ids[1:, None], np.int32)
    packed: dict[str, Any] = {"temperature": scoring.temperature}
    if scoring.kept is not None:
        packed |= {"ids": scoring.kept.ids.tobytes(), "sizes": scoring.kept.sizes.tobytes()}
    if scoring.temperature != 1 or scoring.kept is not None:
        params.extra_args = {**(params.extra_args or {}), KEY: packed}
    return params


def adjust_scores(runner: Any) -> None:
    """Make a worker's model runner score each request by its own temperature and kept words. Idempotent.

    vLLM computes the logits of one request after another, but does not say whose they are. So each request that has
    something to adjust is handled in a call of its own.
    """
    worker = runner.prompt_logprobs_worker
    if "torchrl_moe_params" in vars(worker):
        return
    params: dict[str, Any] = {}
    worker.torchrl_moe_params = params
    add_request, remove_request = worker.add_request, worker.remove_request
    compute = worker.compute_prompt_token_id_logprobs

    def add_and_note(req_id: str, req_idx: int, sampling_params: Any) -> None:
        add_request(req_id, req_idx, sampling_params)
        if KEY in (sampling_params.extra_args or {}):
            params[req_id] = sampling_params

    def remove_and_forget(req_id: str) -> None:
        params.pop(req_id, None)
        remove_request(req_id)

    def compute_one_by_one(logits_fn: Any, hidden_states: Any, batch: Any, prompt_lens: Any) -> dict[str, Any]:
        asked = worker.token_id_scores
        if not any(name in params for name in asked):  # nearly every step
            return compute(logits_fn, hidden_states, batch, prompt_lens)
        starts = dict(zip(batch.req_ids, batch.num_computed_prefill_tokens_np.tolist(), strict=False))
        adjusting = [name for name in asked if name in params and name in starts]  # in the same order on each rank
        worker.token_id_scores = {name: scores for name, scores in asked.items() if name not in adjusting}
        found = compute(logits_fn, hidden_states, batch, prompt_lens)
        unfinished = worker.token_id_scores
        for name in adjusting:
            at = starts[name]  # position of the next logits

            def of_request(hidden: Any, name: str = name) -> Any:
                nonlocal at
                at += len(hidden)
                return adjusted(logits_fn(hidden), params[name], at - len(hidden))

            worker.token_id_scores = {name: asked[name]}
            found |= compute(of_request, hidden_states, batch, prompt_lens)
            unfinished |= worker.token_id_scores
        worker.token_id_scores = unfinished
        return found

    worker.add_request, worker.remove_request = add_and_note, remove_and_forget
    worker.compute_prompt_token_id_logprobs = compute_one_by_one


def adjusted(logits: Tensor, params: Any, start: int) -> Tensor:
    """Return the logits ``[N, V]`` from which a prompt's tokens ``start + 1`` to ``start + N`` were drawn."""
    packed = (params.extra_args or {}).get(KEY)
    if packed is None:
        return logits
    logits = logits.float() / packed["temperature"]
    if "sizes" not in packed:
        return logits
    import torch

    from torchrl_moe.data.kept_tokens import dense_mask, select_rows

    sizes = torch.from_numpy(np.frombuffer(packed["sizes"], np.int32).copy())
    ids = torch.from_numpy(np.frombuffer(packed["ids"], np.int32).copy())
    wanted = torch.zeros(len(sizes), dtype=torch.bool)
    wanted[start + 1 : start + 1 + len(logits)] = True
    mask = dense_mask(*select_rows(ids, sizes, wanted), logits.shape[1])
    return logits.masked_fill(~mask.to(logits.device), float("-inf"))


def prompt_logprobs(given: Any, tokens: int) -> NDArray[np.float32] | None:
    """Return vLLM's log-probs of a prompt's tokens, float32 ``[P]``, NaN for the first; ``None`` if it was cut.

    Args:
        given: ``[P - 1, 1]``, or nothing.
        tokens: P.
    """
    if given is None and tokens > 1:
        return None
    scores = np.full(tokens, np.nan, np.float32)
    scores[1:] = () if given is None else np.asarray(given, np.float32)[:, 0]
    return scores


def why_unscored(model_config: Any) -> str:
    """Return why an engine cannot score prompts as they were sampled, or ""."""
    mode = model_config.logprobs_mode
    return "" if mode.endswith("logprobs") else f"logprobs_mode={mode!r} gives logits"
