"""``GRPOLoss``: the clipped policy-gradient loss of GRPO, on TorchRL's keys.

It reads a tensordict (:mod:`.batch`), asks the actor for log-probs (:mod:`.actors`), calls the maths
(:mod:`.functional`) and writes named outputs. It computes no advantage and no log-prob.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from tensordict import NestedKey, TensorClass, TensorDictBase
from torch import Tensor
from torchrl.objectives import LossModule

from torchrl_moe.objectives import functional as F
from torchrl_moe.objectives.actors import TokenScores, score_tokens
from torchrl_moe.objectives.arguments import check_choice, check_coefficients, check_fixed_length, clip_range
from torchrl_moe.objectives.batch import Masking, TokenBatch, TokenReader
from torchrl_moe.ops.masked import masked_mean

__all__ = ["GRPOLoss", "GRPOLossOutput"]


class GRPOLossOutput(TensorClass["nocast"]):  # type: ignore[name-defined] # mypy takes "nocast" for a type
    """What a loss returns: ``loss_*`` are to be summed, the others are detached and describe the valid tokens."""

    loss_objective: Tensor
    clip_fraction: Tensor
    """Share of tokens whose ratio lies outside the clip range."""
    kl_approx: Tensor
    """Mean of ``log μ - log π``."""
    ESS: Tensor
    """Effective sample size of the ratios, as a share of the tokens."""
    num_dropped_tokens: Tensor
    """Tokens left out because the actor's log-prob is NaN or infinite: 0 if all is well."""
    entropy: Tensor | None = None
    loss_entropy: Tensor | None = None
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    loss_kl_to_inference: Tensor | None = None
    kl_to_inference: Tensor | None = None


class GRPOLoss(LossModule):
    """GRPO: ``-min(r A, clip(r, 1 - low, 1 + high) A)`` per token, ``r = π(token) / μ(token)``.

    arXiv 2402.03300, eq. 3; ``low != high`` is DAPO's Clip-Higher, arXiv 2503.14476, eq. 10. π is the actor, μ the
    policy that generated the tokens. TorchRL's ``GRPOLoss``, with these differences:

    - every loss term and metric is a mean over valid tokens: TorchRL's KL terms, ``kl_approx``, ``entropy`` and
      ``clip_fraction`` average over prompts and pads too. All loss terms follow ``aggregation``;
    - ``kl_mask_threshold`` compares with the reference, as TorchRL documents, not with the rollout policy;
    - a part of a batch can be normalised by the whole batch, see :meth:`denominators`;
    - advantages per token are padded on the side on which the tokens are;
    - arguments that TorchRL's takes without reading (``gamma``, ``clip_value``, any other keyword) do not exist, nor
      does ``samples_mc_entropy``: the actor gives exact entropies.

    A token counts if ``masking_strategy`` names it and its sample log-prob is finite (TorchRL writes NaN where nothing
    was sampled). One whose log-prob by the actor is not finite is dropped, and counted in ``num_dropped_tokens``.

    Args:
        actor_network: π: anything with ``score`` (:class:`~torchrl_moe.objectives.actors.ScoringActor`), or TorchRL's
            wrappers with ``generate=False``.
        clip_epsilon: ``low`` and ``high`` at once, or the pair. They are the buffers ``clip_epsilon_low`` and
            ``clip_epsilon_high``, to which a number may be assigned.
        kl_mask_threshold: a token with ``(log π - log ref)^2 / 2`` above this contributes 0 to every loss term. It
            still counts in the denominators and in the metrics.
        aggregation: how tokens become one loss, see :func:`~torchrl_moe.objectives.functional.aggregate`; ``"none"``
            gives ``[B, T, 1]``.
        entropy_bonus: whether to add ``loss_entropy``.
        entropy_coeff: its coefficient.
        reduction: ``"none"`` means ``aggregation="none"``, ``"mean"`` nothing. TorchRL's ``"sum"`` is a mean: refused.
        kl_to_ref_coeff: adds ``loss_kl_to_ref``, k3 to the reference. ``None`` or 0 switch it off.
        kl_to_inference_coeff: adds ``loss_kl_to_inference``, k3 to the rollout policy. With 0 it is only measured.
        device: of the buffers; default: the actor's.
        masking_strategy: ``"sft"`` (attended tokens after the prompt), ``"rlhf"`` (those of the assistant mask) or
            ``"generic"`` (all attended tokens).
        ref_log_prob_padding_side: where a row of reference log-probs that is shorter than its tokens is filled up.
        ref_log_prob_padding_value: with what. NaN: such a token has no KL to the reference. (TorchRL's default is 0.)
        fixed_length: tokens to divide each sequence by, with ``aggregation="fixed_length"`` only.

    Keys, for :meth:`set_keys`: ``advantage`` (``[T, 1]`` per token or ``[1, 1]`` per sample), ``action``,
    ``sample_log_prob``, ``ref_log_probs``, ``prompt``, ``attention_mask``, ``assistant_mask``, and two that may be
    absent, ``num_valid_tokens`` and ``num_sequences``.

    Example::

        loss = GRPOLoss(actor, clip_epsilon=(0.2, 0.28), kl_to_ref_coeff=1e-3)
        out = loss(td)
        sum(value for key, value in out.items() if key.startswith("loss_")).backward()
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        advantage: NestedKey = "advantage"
        action: NestedKey = ("tokens", "full")
        sample_log_prob: NestedKey = ("log_probs", "full")
        ref_log_probs: NestedKey = ("next", "ref_log_probs", "full")
        prompt: NestedKey = ("tokens", "prompt")
        attention_mask: NestedKey = ("masks", "all_attention_mask")
        assistant_mask: NestedKey = ("masks", "all_assistant_mask")
        num_valid_tokens: NestedKey = "num_valid_tokens"
        num_sequences: NestedKey = "num_sequences"

    _schedulable_buffers = frozenset({"clip_epsilon_low", "clip_epsilon_high"})
    clip_epsilon_low: Tensor
    clip_epsilon_high: Tensor

    def __init__(
        self,
        actor_network: Any,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        kl_mask_threshold: float | None = None,
        aggregation: F.Aggregation = "token_mean",
        entropy_bonus: bool = True,
        entropy_coeff: float = 0.01,
        reduction: Literal["mean", "none"] | None = None,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        device: torch.device | None = None,
        masking_strategy: Masking = "sft",
        ref_log_prob_padding_side: Literal["left", "right"] = "left",
        ref_log_prob_padding_value: float = float("nan"),
        fixed_length: int | None = None,
    ) -> None:
        super().__init__()
        if not (hasattr(actor_network, "score") or hasattr(actor_network, "get_dist")):
            raise TypeError(
                f"actor_network must have a score method (or get_dist, as TorchRL's wrappers), got "
                f"{type(actor_network).__name__}: wrap the model, TransformersWrapper(model, tokenizer=...)."
            )
        check_choice("aggregation", aggregation, get_args(F.Aggregation))
        check_choice("masking_strategy", masking_strategy, get_args(Masking))
        check_choice("reduction", reduction, (None, "mean", "none"))
        check_choice("ref_log_prob_padding_side", ref_log_prob_padding_side, ("left", "right"))
        check_coefficients(kl_mask_threshold, kl_to_ref_coeff, kl_to_inference_coeff)
        check_fixed_length(aggregation, fixed_length)
        self.actor_network = actor_network
        self.aggregation = "none" if reduction == "none" else aggregation
        self.fixed_length, self.reduction = fixed_length, reduction or "mean"
        self.entropy_bonus, self.entropy_coeff = entropy_bonus, entropy_coeff
        self.kl_mask_threshold = kl_mask_threshold
        self.kl_to_ref_coeff, self.kl_to_inference_coeff = kl_to_ref_coeff, kl_to_inference_coeff
        self.masking_strategy = masking_strategy
        self.ref_log_prob_padding_side = ref_log_prob_padding_side
        self.ref_log_prob_padding_value = ref_log_prob_padding_value
        if device is None:
            device = next((parameter.device for parameter in self.parameters()), torch.get_default_device())
        for name, epsilon in zip(("low", "high"), clip_range(clip_epsilon), strict=True):
            self.register_buffer(f"clip_epsilon_{name}", torch.tensor(epsilon, device=device))
        self._set_in_keys()
        self.out_keys = self._out_keys()

    @property
    def functional(self) -> bool:
        """False: the actor keeps its own parameters."""
        return False

    def _set_in_keys(self) -> None:  # set_keys() calls it
        keys = self.tensor_keys
        masks = {"sft": [keys.attention_mask, keys.prompt], "rlhf": [keys.assistant_mask]}
        own = [keys.action, keys.sample_log_prob, keys.advantage]
        own += masks.get(self.masking_strategy, [keys.attention_mask])
        own += [keys.ref_log_probs] if self._needs_ref else []
        self.in_keys = list(dict.fromkeys([*getattr(self.actor_network, "in_keys", []), *own]))

    def _out_keys(self) -> list[str]:
        keys = ["loss_objective", "clip_fraction", "kl_approx", "ESS", "num_dropped_tokens"]
        keys += ["entropy", "loss_entropy"] if self.entropy_bonus else []
        keys += ["loss_kl_to_ref", "kl_to_ref"] if self.kl_to_ref_coeff else []
        return keys + (["loss_kl_to_inference", "kl_to_inference"] if self.kl_to_inference_coeff is not None else [])

    @property
    def _needs_ref(self) -> bool:
        return bool(self.kl_to_ref_coeff) or self.kl_mask_threshold is not None

    # -- the loss ---------------------------------------------------------------------------------------------------

    def forward(self, tensordict: TensorDictBase) -> GRPOLossOutput:
        """Return the loss terms and metrics of a batch.

        Args:
            tensordict: batch size ``[B]``, ragged (a lazy stack) or dense. The loss writes nothing to it; an actor may.

        Raises:
            ValueError: a key is missing, or an entry does not fit the tokens.
        """
        batch, attention = self._read(tensordict), self.tensor_keys.attention_mask
        scores = score_tokens(self.actor_network, tensordict, batch.tokens, attention, self.entropy_bonus)
        batch = batch.to(scores.log_probs.device)
        log_ratio, valid = F.log_ratio(scores.log_probs, batch.sample_log_probs, batch.mask)
        terms = self._terms(batch, scores, log_ratio, valid)
        kept, ref = valid, batch.ref_log_probs
        if self.kl_mask_threshold is not None and ref is not None:
            kept = F.trust_region(scores.log_probs, ref, valid, self.kl_mask_threshold)
        losses = {f"loss_{name}": self._aggregate(term.loss, kept, term.mask, batch) for name, term in terms.items()}
        means = {name: _mean(term.metric, term.mask) for name, term in terms.items() if term.metric is not None}
        clipped = F.outside_clip_range(log_ratio, self.clip_epsilon_low, self.clip_epsilon_high)
        return GRPOLossOutput(
            **losses,
            **means,
            clip_fraction=_mean(clipped.to(log_ratio.dtype), valid),
            kl_approx=_mean(-log_ratio, valid),
            ESS=F.effective_sample_size(log_ratio, valid),
            num_dropped_tokens=(batch.mask & ~valid).sum().to(log_ratio.dtype),
        )

    def _terms(self, batch: TokenBatch, scores: TokenScores, log_ratio: Tensor, valid: Tensor) -> dict[str, _Term]:
        """Return the summands of the loss, by the name that follows ``loss_``."""
        terms = {"objective": _Term(self._objective(log_ratio, batch.advantage), None, valid)}
        if scores.entropy is not None:
            terms["entropy"] = _Term(F.entropy_bonus(scores.entropy, self.entropy_coeff), scores.entropy, valid)
        others = {
            "kl_to_ref": (batch.ref_log_probs, self.kl_to_ref_coeff or None),
            "kl_to_inference": (batch.sample_log_probs, self.kl_to_inference_coeff),
        }
        for name, (other, coeff) in others.items():
            if other is not None and coeff is not None:
                penalty, known = F.kl_penalty(scores.log_probs, other, valid)
                terms[name] = _Term(coeff * penalty, penalty, known)
        return terms

    def _objective(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return the policy's loss per token: what another loss of this family replaces."""
        return F.clipped_surrogate(log_ratio, advantage, self.clip_epsilon_low, self.clip_epsilon_high)

    def _aggregate(self, loss: Tensor, kept: Tensor, mask: Tensor, batch: TokenBatch) -> Tensor:
        loss = torch.where(kept, loss, loss.new_zeros(()))
        total = F.aggregate(
            loss,
            mask,
            self.aggregation,
            num_tokens=batch.num_valid_tokens,
            num_sequences=batch.num_sequences,
            fixed_length=self.fixed_length,
        )
        return total.unsqueeze(-1) if self.aggregation == "none" else total

    # -- its input --------------------------------------------------------------------------------------------------

    def denominators(self, tensordict: TensorDictBase) -> dict[str, float]:
        """Return what the means of a whole batch divide by, to be stored in each of its parts.

        With both keys in every part, the loss terms of the parts sum to those of the batch, however it is split. A
        trainer that averages over n parts instead of summing (TorchRL's ``GRPOTrainer`` divides the loss by
        ``gradient_accumulation_steps``) wants these numbers divided by n. Metrics stay means over the part.

        Example::

            for key, number in loss.denominators(td).items():
                td[key] = torch.full(td.batch_size, number)
            for part in td.split(4):
                out = loss(part)
        """
        mask, _ = self._mask(TokenReader(tensordict, self.tensor_keys.action))
        return {
            self.tensor_keys.num_valid_tokens: float(mask.sum()),
            self.tensor_keys.num_sequences: float(F.sequence_count(mask, self.aggregation)),
        }

    def _read(self, tensordict: TensorDictBase) -> TokenBatch:
        keys = self.tensor_keys
        reader = TokenReader(tensordict, keys.action)
        mask, sample_log_probs = self._mask(reader)
        ref = (keys.ref_log_probs, self.ref_log_prob_padding_side, self.ref_log_prob_padding_value)
        return TokenBatch(
            tokens=reader.tokens,
            mask=mask,
            advantage=reader.advantage(keys.advantage),
            sample_log_probs=sample_log_probs,
            ref_log_probs=reader.ref_log_probs(*ref) if self._needs_ref else None,
            num_valid_tokens=reader.total(keys.num_valid_tokens),
            num_sequences=reader.total(keys.num_sequences),
        )

    def _mask(self, reader: TokenReader) -> tuple[Tensor, Tensor]:
        """Return the tokens to train on, and the sample log-probs that say so."""
        keys = self.tensor_keys
        mask = reader.mask(self.masking_strategy, keys.prompt, keys.attention_mask, keys.assistant_mask)
        if self.loss_mask_key not in (None, "auto"):  # of LossModule; "auto" knows no mask of tokens
            mask = mask & reader.per_token(self.loss_mask_key, "the mask named by loss_mask_key").bool()
        sample_log_probs = reader.sample_log_probs(keys.sample_log_prob)
        return mask & sample_log_probs.isfinite(), sample_log_probs


class _Term(NamedTuple):
    """A summand of the loss, ``[B, T]`` each; ``metric`` is reported as its mean over ``mask``."""

    loss: Tensor
    metric: Tensor | None
    mask: Tensor


def _mean(value: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(value.detach(), mask, mask.sum())
