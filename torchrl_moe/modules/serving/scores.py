"""Scores of given tokens: from the arguments of ``score`` to requests, and from completions to tensors.

Letters: T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_moe._checks import check_number, shown
from torchrl_moe._errors import EngineError
from torchrl_moe.data import KeptTokens
from torchrl_moe.modules.backends.kept_ids import KeptIds
from torchrl_moe.modules.backends.replica import Completion, Scoring
from torchrl_moe.modules.serving.prompts import PromptBatch

__all__ = ["ONE_TOKEN", "scores_of", "scorings"]

LEAST = 1e-20
"""Temperature: a float32 logit that is divided by less is infinite."""
ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
"""Sampling of the extra token, which is dropped: vLLM generates at least one token per prompt."""


def scorings(batch: PromptBatch, temperature: Any, kept: Any) -> list[Scoring]:
    """Return how each sequence is scored.

    Args:
        batch: the sequences.
        temperature: of all, or of each.
        kept: the ids that each token was sampled from: :class:`~torchrl_moe.data.KeptTokens` for one sequence; a list
            for several, with ``None`` where no id was cut off; ``None`` if none was in any.

    Raises:
        ValueError: text, a temperature that is not positive, a list of another length, or kept ids for another number
            of tokens.
    """
    count = len(batch.prompts)
    sequences = [prompt for prompt in batch.prompts if isinstance(prompt, np.ndarray)]
    if len(sequences) < count:
        raise ValueError("score takes token ids: text may be encoded to others than those that were sampled")
    values = _numbers(temperature)
    if values.ndim > 1:
        raise ValueError(f"temperature must be a number, or one per sequence, got shape {list(values.shape)}")
    temperatures = [float(values)] * count if values.ndim == 0 else values.tolist()
    if not batch.single and kept is not None and not isinstance(kept, list | tuple):
        raise ValueError(f"kept must be a list with KeptTokens or None for each sequence, got {shown(kept)}")
    words = [None] * count if kept is None else [kept] if batch.single else list(kept)
    for name, given in (("temperature", temperatures), ("kept", words)):
        if len(given) != count:
            raise ValueError(f"{name} must have one entry per sequence: got {len(given)} for {count} sequences")
    return [
        Scoring(temperature=value, kept=_ids(one, len(ids), i))
        for i, (ids, value, one) in enumerate(zip(sequences, temperatures, words, strict=True))
    ]


def _numbers(temperature: Any) -> NDArray[np.float64]:
    """Return a temperature, or one per sequence, as an array."""
    listed = temperature.tolist() if hasattr(temperature, "tolist") else temperature
    for one in listed if isinstance(listed, list | tuple) else [listed]:
        if not isinstance(one, list | tuple):  # of another rank: refused by its shape
            check_number("temperature", one, above=0, hint="At 0 every log-prob is 0.")
            check_number("temperature", one, LEAST, hint="Below, logits are infinite.")
    return np.asarray(listed, np.float64)


def _ids(kept: Any, tokens: int, position: int) -> KeptIds | None:
    if kept is None:
        return None
    if not isinstance(kept, KeptTokens) or kept.batch_dims:
        raise ValueError(f"kept[{position}] must be the KeptTokens of one sequence, or None, got {shown(kept)}")
    if len(kept.sizes) != tokens:
        raise ValueError(f"kept[{position}] is for {len(kept.sizes)} tokens, and there are {tokens}")
    ids, sizes = (np.asarray(part.cpu(), np.int32) for part in (kept.ids, kept.sizes))
    said = int(np.abs(sizes).sum())
    if said > len(ids):
        raise ValueError(f"kept[{position}] has {len(ids)} ids, and its sizes say {said}: cut both at the same token")
    return KeptIds(ids[:said], sizes)


def scores_of(completions: Sequence[Completion]) -> list[Tensor]:
    """Return the log-probs of each sequence, float32 ``[T]``.

    Raises:
        EngineError: a request was aborted, and has none.
    """
    found = []
    for completion in completions:
        if completion.prompt_logprobs is None:
            raise EngineError(f"request {completion.request_id!r} was aborted before its tokens had scores")
        found.append(torch.from_numpy(completion.prompt_logprobs.copy()))
    return found
