"""The tensordict keys of a loss, and what it reads of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.objectives import LossModule

from torchrl_moe.objectives.arguments import check_choice
from torchrl_moe.objectives.batch import Masking, TokenBatch, TokenReader

__all__ = ["LossInputs", "LossKeys"]


@dataclass
class LossKeys(LossModule._AcceptedKeys):
    """The keys of a loss's inputs, for ``set_keys``."""

    advantage: NestedKey = "advantage"
    action: NestedKey = ("tokens", "full")
    sample_log_prob: NestedKey = ("log_probs", "full")
    ref_log_probs: NestedKey = ("next", "ref_log_probs", "full")
    prox_log_prob: NestedKey = "prox_log_prob"
    prompt: NestedKey = ("tokens", "prompt")
    attention_mask: NestedKey = ("masks", "all_attention_mask")
    assistant_mask: NestedKey = ("masks", "all_assistant_mask")
    policy_versions: NestedKey = ("policy_versions", "full")
    current_version: NestedKey = "current_version"
    num_valid_tokens: NestedKey = "num_valid_tokens"
    num_sequences: NestedKey = "num_sequences"
    sum_weights: NestedKey = "sum_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a loss reads, besides tokens, sample log-probs and advantages."""

    masking: Masking
    reference: bool
    """Whether the reference's log-probs are read."""
    proximal: bool
    """Whether the proximal policy's log-probs are read."""
    staleness: bool
    """Whether the age of each token is read."""
    ref_side: Literal["left", "right"]
    ref_fill: float

    def __post_init__(self) -> None:
        check_choice("masking_strategy", self.masking, get_args(Masking))
        check_choice("ref_log_prob_padding_side", self.ref_side, ("left", "right"))
        if not isinstance(self.ref_fill, int | float) or isinstance(self.ref_fill, bool):  # any, NaN and infinities too
            raise ValueError(f"ref_log_prob_padding_value must be a number, got {self.ref_fill!r:.60}.")

    def keys(self, names: LossKeys) -> list[NestedKey]:
        """Return the required keys."""
        masks = {"sft": [names.attention_mask, names.prompt], "rlhf": [names.assistant_mask]}
        keys = [names.action, names.sample_log_prob, names.advantage]
        keys += masks.get(self.masking, [names.attention_mask])
        keys += [names.ref_log_probs] if self.reference else []
        keys += [names.prox_log_prob] if self.proximal else []
        return keys + ([names.policy_versions, names.current_version] if self.staleness else [])

    def read(self, tensordict: TensorDictBase, names: LossKeys, loss_mask: NestedKey | None) -> TokenBatch:
        """Return the batch, aligned.

        Raises:
            ValueError: a key is missing, an entry does not fit the tokens, or an advantage is not finite.
        """
        reader = TokenReader(tensordict, names.action)
        mask, unsampled, sample_log_probs = self.mask(reader, names, loss_mask)
        advantage = reader.advantage(names.advantage)
        _check_finite(names.advantage, advantage, mask)
        ref = (names.ref_log_probs, self.ref_side, self.ref_fill)
        return TokenBatch(
            tokens=reader.tokens,
            mask=mask,
            unsampled=unsampled,
            advantage=advantage,
            sample_log_probs=sample_log_probs,
            ref_log_probs=reader.ref_log_probs(*ref) if self.reference else None,
            prox_log_probs=self.prox_log_probs(reader, names),
            staleness=reader.staleness(names.policy_versions, names.current_version, mask) if self.staleness else None,
            num_valid_tokens=reader.total(names.num_valid_tokens),
            num_sequences=reader.total(names.num_sequences),
            sum_weights=reader.total(names.sum_weights),
        )

    def prox_log_probs(self, reader: TokenReader, names: LossKeys) -> Tensor | None:
        """Return the log-probs of the proximal policy, if it is used."""
        return reader.constant_log_probs(names.prox_log_prob, "the proximal policy") if self.proximal else None

    def mask(self, reader: TokenReader, names: LossKeys, loss_mask: NestedKey | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens to train on, those of them that lack a sample log-prob, and the sample log-probs.

        ``"generic"`` also selects prompts, which were not sampled, so no token is reported as lacking. ``loss_mask``
        names a mask of the user's, ``[T]`` per sample.
        """
        mask = reader.mask(self.masking, names.prompt, names.attention_mask, names.assistant_mask)
        if loss_mask is not None:
            mask = mask & reader.per_token(loss_mask, "the mask named by loss_mask_key").bool()
        log_probs = reader.constant_log_probs(names.sample_log_prob, "the policy that generated the tokens")
        known = log_probs.isfinite()
        return mask & known, mask & ~known & (self.masking != "generic"), log_probs


def _check_finite(key: NestedKey, advantage: Tensor, mask: Tensor) -> None:
    broken = (mask & ~advantage.isfinite()).nonzero()
    if len(broken):
        sample, token = broken[0].tolist()
        raise ValueError(
            f"{key!r} must be finite where a token counts, got {advantage[sample, token].item()} in sample {sample}: "
            "check the rewards of its group (a single sample has no standard deviation), or leave the sample out."
        )
