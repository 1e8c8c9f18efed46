"""Log-probs of a prompt's own tokens: what vLLM is asked for, and how its worker adjusts logits as the rollout's were.

vLLM normalises prompt log-probs over all words at temperature 1, whatever a request samples with. Temperature and words
travel in the request's ``SamplingParams``, as its rows do (``forced_rows``).

Letters: P prompt tokens, N tokens of a step, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchrl_moe.modules.backends.replica import Scoring

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["adjusted", "prompt_logprobs", "scoring_params"]

KEY = "torchrl_moe_scoring"


def scoring_params(params: Any, scoring: Scoring, tokens: int) -> Any:
    """Return ``SamplingParams`` that ask for the log-probs of a prompt of ``tokens`` tokens, and for no routes."""
    params = params.clone()
    params.prompt_logprobs, params.flat_logprobs = 0, True
    params.routed_experts_prompt_start = tokens
    params.skip_reading_prefix_cache = True  # a token that is not computed has no log-prob
    packed: dict[str, Any] = {"temperature": scoring.temperature}
    if scoring.kept is not None:
        packed |= {"ids": scoring.kept.ids.tobytes(), "sizes": scoring.kept.sizes.tobytes()}
    params.extra_args = {**(params.extra_args or {}), KEY: packed}
    return params


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
    """Return vLLM's log-probs of a prompt's tokens, float32 ``[P]``, NaN for the first; ``None`` if it was cut."""
    if given is None or len(given.start_indices) < tokens:
        return None
    scores = np.full(tokens, np.nan, np.float32)
    scores[1:] = np.array(given.logprobs, np.float32)[np.array(given.start_indices, np.int64)[1:]]
    return scores
