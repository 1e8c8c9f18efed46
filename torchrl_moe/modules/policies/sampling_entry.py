"""The entry ``"sampling"`` of a rollout, which records how it was sampled: the temperature and the kept words.

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
from torchrl_moe.modules.backends.kept_ids import KeptIds, leaves_words_out

__all__ = ["SAMPLING", "check_earlier_turn", "pad_sampling", "refuse_changed_values", "sampling_entry"]

SAMPLING = "sampling"
CHANGES_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1, 1.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "thinking_token_budget": (None,),  # the end of thinking gets a logit of 1e9, but no other logit is -inf
}
"""Sampling parameters that change logits -> values that switch them off."""
LEAST_TEMPERATURE = 0.01
"""vLLM samples at this temperature if a lower one is requested, except for 0."""


def refuse_changed_values(params: Mapping[str, Any]) -> None:
    """Refuse sampling parameters with which no trainer can compute the engine's log-probs.

    Raises:
        ValueError: a penalty, a bias, or a thinking budget.
    """
    for name, values in CHANGES_NOTHING.items():
        if params.get(name) not in values:
            raise ValueError(
                f"{name}={params[name]!r} changes logits, and log-probs with it, in a way that a trainer does not "
                "replay: leave it out, or pass return_log_probs=False"
            )


def check_earlier_turn(params: Mapping[str, Any], earlier: TensorDictBase, real: Tensor) -> None:
    """Refuse a turn whose answer could not be scored together with the previous turn, which its prompt repeats.

    Args:
        params: sampling parameters of this turn.
        earlier: the previous turn.
        real: bool, tokens of the previous turn that are not padding.

    Raises:
        ValueError: the previous turn was sampled at another temperature, but a sample is scored at one; or its kept
            words do not belong to its tokens.
    """
    now, first = _temperature(params), earlier.get((SAMPLING, "temperature"), None)
    names_words = params.get("logprobs") is not None
    if names_words and first is not None and float(first) != float(torch.tensor(now)):
        raise ValueError(
            f"this turn's temperature is {now:g}, that of the turn before {float(first):g}, and a sample is scored at "
            "one: sample all turns alike, or pass return_log_probs=False"
        )
    kept = earlier.get((SAMPLING, "kept"), None)
    if kept is not None and len(kept.get("sizes")) != len(real):
        raise ValueError(
            f"('{SAMPLING}', 'kept') of the turn before is for {len(kept.get('sizes'))} tokens, and it has "
            f"{len(real)}: both must have been cut or padded alike"
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
        params: sampling parameters of the answer.
        kept: of its ``G`` tokens.
        prompt: P.
        total: T.
        earlier: the turn that the prompt repeats and continues, if there is one.
        real: bool, tokens of the earlier turn that are not padding; ``None`` without one. The caller has run
            :func:`check_earlier_turn`.
    """
    source: dict[str, Any] = {"temperature": torch.tensor(_temperature(params))}
    before = None if earlier is None else earlier.get((SAMPLING, "kept"), None)
    names_words = params.get("logprobs") is not None  # otherwise it is unknown which were kept
    if kept is not None or before is not None or (names_words and leaves_words_out(params.get)):
        source["kept"] = _kept(kept, prompt, total, before, real)
    return TensorDict(source)


def _temperature(params: Mapping[str, Any]) -> float:
    given = params.get("temperature")
    value = 1.0 if given is None else float(given)
    return max(value, LEAST_TEMPERATURE) if value > 0 else value


def _kept(kept: KeptIds | None, prompt: int, total: int, before: Any, real: Tensor | None) -> KeptTokens:
    sizes = torch.zeros(total, dtype=torch.int32)
    ids = torch.zeros(0, dtype=torch.int32)
    if kept is not None:
        sizes[prompt:] = torch.from_numpy(kept.sizes.copy())
        ids = torch.from_numpy(kept.ids.copy())
    own = KeptTokens(ids=ids, sizes=sizes)
    if before is None or real is None:
        return own
    first_ids, first_sizes = select_rows(before.get("ids").cpu(), before.get("sizes").cpu(), real.cpu())
    return KeptTokens(ids=first_ids, sizes=first_sizes).followed_by(own)


def pad_sampling(entries: Sequence[TensorDictBase], prompts: Sequence[int], totals: Sequence[int]) -> TensorDict:
    """Return the entries of a batch, tokens padded around the border between prompt and response.

    Args:
        entries: of each answer.
        prompts: P of each answer.
        totals: T of each answer.
    """
    found = TensorDict({"temperature": torch.stack([entry["temperature"] for entry in entries])}, [len(entries)])
    kept = [entry.get("kept", None) for entry in entries]
    if all(one is None for one in kept):
        return found
    left, right = max(prompts), max(total - prompt for total, prompt in zip(totals, prompts, strict=True))
    most = max(0 if one is None else len(one.ids) for one in kept)
    sizes = torch.zeros(len(entries), left + right, dtype=torch.int32)
    ids = torch.full((len(entries), most), -1, dtype=torch.int32)
    for i, (one, prompt, total) in enumerate(zip(kept, prompts, totals, strict=True)):
        if one is not None:
            sizes[i, left - prompt : left - prompt + total] = one.sizes
            ids[i, : len(one.ids)] = one.ids
    found["kept"] = KeptTokens(ids=ids, sizes=sizes, batch_size=[len(entries)])
    return found
