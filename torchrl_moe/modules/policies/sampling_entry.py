"""What a rollout says of how it was sampled: the entry ``"sampling"``, with a temperature and the words that were kept.

Letters: P prompt tokens, G response tokens, T = P + G.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_moe.data import KeptTokens
from torchrl_moe.data.kept_tokens import select_rows
from torchrl_moe.modules.backends.kept_ids import KeptIds

__all__ = ["SAMPLING", "leaves_words_out", "pad_sampling", "refuse_changed_values", "sampling_entry"]

SAMPLING = "sampling"
KEEPS_ALL: Mapping[str, tuple[Any, ...]] = {
    "top_k": (None, 0, -1),
    "top_p": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "min_tokens": (None, 0),
    "bad_words": (None, [], ()),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
}
"""Sampling parameters that leave words out -> values with which they do not."""
CHANGES_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1, 1.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}),
}
"""Sampling parameters that change logits -> values with which they do not."""


def leaves_words_out(params: Mapping[str, Any]) -> bool:
    """Whether sampling parameters may leave words out of the distribution that a token is drawn from.

    >>> leaves_words_out({"top_p": 0.95}), leaves_words_out({"top_p": 1.0, "top_k": -1})
    (True, False)
    """
    return any(params.get(name) not in values for name, values in KEEPS_ALL.items())


def refuse_changed_values(params: Mapping[str, Any]) -> None:
    """Refuse sampling parameters after which no trainer can compute the log-probs that the engine gives.

    Raises:
        ValueError: a penalty or a bias.
    """
    for name, values in CHANGES_NOTHING.items():
        if params.get(name) not in values:
            raise ValueError(
                f"{name}={params[name]!r} changes logits, and log-probs with it, in a way that a trainer does not "
                "replay: leave it out, or pass return_log_probs=False"
            )


def sampling_entry(
    params: Mapping[str, Any],
    kept: KeptIds | None,
    prompt: int,
    total: int,
    earlier: TensorDictBase | None,
    real: Tensor | None,
) -> TensorDict:
    """Return the entry of one answer.

    Args:
        params: it was sampled with.
        kept: of its ``G`` tokens.
        prompt: P.
        total: T.
        earlier: the turn that the prompt repeats and goes on from, if there is one.
        real: bool, tokens of the earlier turn that are no pads; ``None`` without one.

    Raises:
        ValueError: the earlier turn was sampled at another temperature: a sample is scored at one.
    """
    temperature = params.get("temperature")
    source: dict[str, Any] = {"temperature": torch.tensor(1.0 if temperature is None else float(temperature))}
    before = None if earlier is None else earlier.get((SAMPLING, "kept"), None)
    if kept is not None or before is not None or leaves_words_out(params):
        source["kept"] = _kept(kept, prompt, total, before, real)
    first = None if earlier is None else earlier.get((SAMPLING, "temperature"), None)
    if first is not None and float(first) != float(source["temperature"]):
        raise ValueError(
            f"this turn's temperature is {float(source['temperature']):g}, that of the turn before {float(first):g}"
        )
    return TensorDict(source)


def _kept(kept: KeptIds | None, prompt: int, total: int, before: Any, real: Tensor | None) -> KeptTokens:
    sizes = torch.zeros(total, dtype=torch.int32)
    ids = torch.zeros(0, dtype=torch.int32)
    if kept is not None:
        sizes[prompt:] = torch.from_numpy(kept.sizes.copy())
        ids = torch.from_numpy(kept.ids.copy())
    own = KeptTokens(ids=ids, sizes=sizes)
    if before is None or real is None:
        return own
    first_ids, first_sizes = select_rows(before.ids.cpu(), before.sizes.cpu(), real.cpu())
    return KeptTokens(ids=first_ids, sizes=first_sizes).followed_by(own)


def pad_sampling(entries: Sequence[TensorDictBase], prompts: Sequence[int]) -> TensorDict:
    """Return the entries of a batch, tokens padded around the border between prompt and response.

    Args:
        entries: of each answer.
        prompts: P of each answer.
    """
    found = TensorDict({"temperature": torch.stack([entry["temperature"] for entry in entries])}, [len(entries)])
    kept = [entry.get("kept", None) for entry in entries]
    if all(one is not None for one in kept):  # as they are if sampled alike
        left, right = max(prompts), max(len(one.sizes) - cut for one, cut in zip(kept, prompts, strict=True))
        most = max(len(one.ids) for one in kept)
        sizes = torch.zeros(len(entries), left + right, dtype=torch.int32)
        ids = torch.full((len(entries), most), -1, dtype=torch.int32)
        for i, (one, cut) in enumerate(zip(kept, prompts, strict=True)):
            sizes[i, left - cut : left - cut + len(one.sizes)] = one.sizes
            ids[i, : len(one.ids)] = one.ids
        found["kept"] = KeptTokens(ids=ids, sizes=sizes, batch_size=[len(entries)])
    return found
