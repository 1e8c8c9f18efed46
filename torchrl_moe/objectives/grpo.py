"""``GRPOLoss``: the clipped policy-gradient loss of GRPO, on TorchRL's keys.

It reads a tensordict and gets log-probs from the actor (:mod:`.batch`), calls the maths (:mod:`.functional`) and writes
named outputs. The losses derived from it replace only the surrogate, :meth:`GRPOLoss._surrogate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeVar, cast, get_args

import torch
from tensordict import NestedKey, TensorClass, TensorDictBase
from torch import Tensor, distributed
from torchrl.objectives import LossModule

from torchrl_moe import _checks
from torchrl_moe.objectives import functional as F
from torchrl_moe.objectives.batch import (
    LossInputs,
    LossKeys,
    Masking,
    TokenBatch,
    TokenReader,
    score_reference,
    score_tokens,
)
from torchrl_moe.objectives.corrections import (
    Correction,
    Corrections,
    PolicyRatios,
    Proximal,
    Thresholds,
    policy_ratios,
)
from torchrl_moe.objectives.moe_router import MoERouterLoss
from torchrl_moe.ops.divergence import masked_mean


class LLMLossOutput(TensorClass["nocast"]):  # type: ignore[name-defined] # mypy takes "nocast" for a type
    """What a loss returns: ``loss_*`` are to be summed, the others are detached and describe the valid tokens."""

    loss_objective: Tensor
    clip_fraction: Tensor
    """Share of tokens whose ratio lies outside the clip range, or that the loss's own trust region blocks."""
    kl_approx: Tensor
    """Mean of ``log μ - log π``."""
    ESS: Tensor
    """Effective sample size of the ratios π/μ, as a share of the tokens."""
    num_dropped_tokens: Tensor
    """Number of tokens with a value that is NaN or infinite, 0 if all is well: a log-prob of the actor or the proximal
    policy, a sample log-prob where the masking strategy names responses, or an entropy (left out of the entropy terms
    only)."""
    masked_fraction: Tensor | None = None
    """Share of tokens that the corrections leave out."""
    mean_weight: Tensor | None = None
    """Mean weight of the tokens; masked tokens count as 0."""
    entropy: Tensor | None = None
    loss_entropy: Tensor | None = None
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    loss_kl_to_inference: Tensor | None = None
    kl_to_inference: Tensor | None = None
    loss_load_balancing: Tensor | None = None
    """This and the next ones need a ``router_loss``, see :class:`~torchrl_moe.objectives.MoERouterLossOutput`."""
    loss_z: Tensor | None = None
    expert_load: Tensor | None = None
    load_entropy: Tensor | None = None
    max_load: Tensor | None = None
    num_dropped_rows: Tensor | None = None


class GRPOLossOutput(LLMLossOutput):
    """Output of :class:`~torchrl_moe.objectives.GRPOLoss`, and of derived losses without their own class."""


class DAPOLossOutput(LLMLossOutput):
    """Of :class:`~torchrl_moe.objectives.DAPO`."""


class CISPOLossOutput(LLMLossOutput):
    """Of :class:`~torchrl_moe.objectives.CISPOLoss`."""


Key = TypeVar("Key")
Number = TypeVar("Number", float, Tensor)


def sum_over_ranks(
    denominators: Mapping[Key, Number],
    group: distributed.ProcessGroup | None = None,
    *,
    gradients_are_averaged: bool = True,
    device: torch.device | str = "cpu",
) -> dict[Key, Number]:
    """Sum the denominators of each rank's part of a batch, in one collective.

    With the result in each part, data parallel training gets the gradients of the whole batch, however it is split.

    Args:
        denominators: of this rank's part, see :meth:`torchrl_moe.objectives.GRPOLoss.denominators` and
            :meth:`torchrl_moe.objectives.MoERouterLoss.totals`; numbers, or tensors of counts. The same keys and shapes
            on each rank, in the same order.
        group: the ranks that share the batch; default: all.
        gradients_are_averaged: whether gradients are averaged over ranks, as DDP and FSDP do; the sums are then divided
            by the number of ranks. ``False`` if gradients are summed.
        device: of the message: one that the group's backend supports, ``"cuda"`` for NCCL.

    Returns:
        The sums: numbers for numbers; for tensors, float64 tensors on the same device.

    Raises:
        ValueError: no process group is initialised.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            "sum_over_ranks needs a process group, and none is initialised: call torch.distributed.init_process_group "
            "first. A single process can use the denominators of its batch directly."
        )
    given = list(denominators.values())
    tensors = [torch.as_tensor(value, dtype=torch.float64) for value in given]
    numbers = torch.cat([tensor.flatten().to(device) for tensor in tensors])
    distributed.all_reduce(numbers, group=group)
    if gradients_are_averaged:
        numbers /= distributed.get_world_size(group)
    sums = []
    for value, tensor, part in zip(given, tensors, numbers.split([t.numel() for t in tensors]), strict=True):
        total = part.view(tensor.shape).to(tensor.device)
        sums.append(cast(Number, total if isinstance(value, Tensor) else total.item()))
    return dict(zip(denominators, sums, strict=True))


class GRPOLoss(LossModule):
    """GRPO: ``-min(r A, clip(r, 1 - low, 1 + high) A)`` per token, ``r = π(token) / μ(token)``.

    `arXiv 2402.03300 <https://arxiv.org/abs/2402.03300>`_, eq. 3; ``low != high`` is DAPO's Clip-Higher, arXiv
    2503.14476, eq. 10. π is the actor, μ the policy that generated the tokens. With ``proximal_policy`` the objective
    is decoupled: ``r = π / prox``, see :mod:`torchrl_moe.objectives.corrections`.

    TorchRL's ``GRPOLoss``, with these differences:

    - every loss term and metric is a mean over valid tokens: TorchRL's KL terms, ``kl_approx``, ``entropy`` and
      ``clip_fraction`` average over prompts and pads too. All loss terms follow ``aggregation``;
    - a token's KL penalty is bounded, see ``kl_clamp``;
    - ``kl_mask_threshold`` compares with the reference, as TorchRL documents, not with the rollout policy, as it does;
    - a part of a batch can be normalised by the denominators of the whole batch, see :meth:`denominators`;
    - advantages per token are padded on the same side as the tokens;
    - arguments that TorchRL's loss accepts but never reads are refused: ``gamma``, ``clip_value``, any other keyword.

    A token counts if ``masking_strategy`` selects it and its sample log-prob is finite (TorchRL writes NaN where
    nothing was sampled). It may still contribute 0, if the actor's log-prob is not finite or a mask drops it. The
    denominators count these tokens too, so they depend on the data alone.

    Args:
        actor_network: π: anything with ``score`` (:class:`~torchrl_moe.objectives.batch.ScoringActor`), or TorchRL's
            wrappers with ``generate=False``.
        clip_epsilon: one number for both ``low`` and ``high``, or a pair. They become the buffers ``clip_epsilon_low``
            and ``clip_epsilon_high``, which may be assigned numbers.
        dual_clip: c: where ``A < 0`` the loss is at most ``-c A`` (arXiv 1912.09729).
        kl_mask_threshold: a token with ``(log π - log ref)^2 / 2`` above this contributes 0 to every loss term.
        aggregation: how tokens become one loss, see :func:`~torchrl_moe.objectives.functional.aggregate`; ``"none"``
            gives ``[B, T, 1]``, ``None`` means ``"token_mean"``.
        correction: for the mismatch between policies, by name or names, see :mod:`torchrl_moe.objectives.corrections`.
        thresholds: of the corrections.
        proximal_policy: ``"recomputed"`` reads its log-probs, the actor's at the start of the step, from
            ``prox_log_prob``; ``"interpolated"`` is A-3PO's (arXiv 2512.06547), computed from versions without a
            forward pass.
        entropy_bonus: whether to add ``loss_entropy``.
        samples_mc_entropy: has no effect: the entropies of tokens are exact, not estimated from samples.
        entropy_coeff: its coefficient.
        gamma: ``None``: there is no value function.
        reduction: ``"none"`` means ``aggregation="none"``, ``"mean"`` changes nothing. ``"sum"``, which is a mean in
            TorchRL, is refused.
        clip_value: ``None`` or ``False``: there is no value function.
        kl_to_ref_coeff: adds ``loss_kl_to_ref``, the KL to the reference. ``None`` or 0 switch it off.
        kl_to_inference_coeff: adds ``loss_kl_to_inference``, to the rollout policy. With 0 it is only measured.
        kl_estimator: of both: ``"k1"``, ``"k2"`` or ``"k3"``; docs/objectives.md has their gradients.
        kl_off_policy: whether to weight both by π/μ, so that their gradient is that of the KL off policy too.
        kl_clamp: clamps both per token to ``±kl_clamp``, before the coefficient; a clamped token has no gradient from
            them. ``None`` switches it off.
        reference: ``"key"`` reads ``ref_log_probs``; ``"adapter"`` scores with the actor's peft adapter switched off.
        device: of the buffers; default: the actor's.
        masking_strategy: ``"sft"`` (attended tokens after the prompt), ``"rlhf"`` (those of the assistant mask) or
            ``"generic"`` (all attended tokens).
        ref_log_prob_padding_side: the side on which a row of reference log-probs shorter than its tokens is padded.
        ref_log_prob_padding_value: the value. NaN: such a token has no KL to the reference, and with
            ``kl_mask_threshold`` is in no term of the loss. (TorchRL's default is 0.)
        fixed_length: tokens to divide each sequence by, with ``aggregation="fixed_length"`` only.
        router_loss: a :class:`~torchrl_moe.objectives.MoERouterLoss` of the same actor: its terms are returned too,
            from the router logits of the one forward pass. It has keys of its own, for its own ``set_keys``.

    Keys, for :meth:`set_keys`: those of :class:`~torchrl_moe.objectives.batch.LossKeys`. ``advantage`` is ``[T, 1]``
    per token or ``[1, 1]`` per sample; ``num_valid_tokens``, ``num_sequences`` and ``sum_weights`` may be absent.

    Raises:
        ValueError: an argument that is not allowed, or two that do not go together.
        TypeError: an actor without ``score`` or ``get_dist``.

    Example::

        loss = GRPOLoss(actor, clip_epsilon=(0.2, 0.28), kl_to_ref_coeff=1e-3)
        out = loss(td)
        sum(value for key, value in out.items() if key.startswith("loss_")).backward()
    """

    output_type: type[LLMLossOutput] = GRPOLossOutput
    _AcceptedKeys = LossKeys
    _schedulable_buffers = frozenset({"clip_epsilon_low", "clip_epsilon_high"})
    clip_epsilon_low: Tensor
    clip_epsilon_high: Tensor
    router_loss: MoERouterLoss | None
    _takes_dual_clip = True

    def __init__(
        self,
        actor_network: object,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        dual_clip: float | None = None,
        kl_mask_threshold: float | None = None,
        aggregation: F.Aggregation | None = "token_mean",
        correction: Correction | Sequence[Correction] | None = None,
        thresholds: Thresholds | None = None,
        proximal_policy: Proximal | None = None,
        entropy_bonus: bool = True,
        samples_mc_entropy: int = 1,
        entropy_coeff: float = 0.01,
        gamma: float | None = None,
        reduction: Literal["mean", "none"] | None = None,
        clip_value: bool | float | None = None,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        kl_estimator: F.KLEstimator = "k3",
        kl_off_policy: bool = False,
        kl_clamp: float | None = 10.0,
        reference: Literal["key", "adapter"] = "key",
        device: torch.device | None = None,
        masking_strategy: Masking = "sft",
        ref_log_prob_padding_side: Literal["left", "right"] = "left",
        ref_log_prob_padding_value: float = float("nan"),
        fixed_length: int | None = None,
        router_loss: MoERouterLoss | None = None,
    ) -> None:
        super().__init__()
        if not (hasattr(actor_network, "score") or hasattr(actor_network, "get_dist")):
            raise TypeError(
                f"actor_network must have a score method (or get_dist, as TorchRL's wrappers), got "
                f"{type(actor_network).__name__}: wrap the model, TransformersWrapper(model, tokenizer=...)."
            )
        if gamma is not None:
            raise ValueError(
                f"gamma must be None, got {gamma}: GRPO has no value function, and TorchRL's loss never reads it. "
                "Discount rewards before the advantage is computed."
            )
        if clip_value is not None and clip_value is not False:
            raise ValueError(
                f"clip_value must be None or False, got {clip_value}: GRPO has no value function to clip, and "
                "TorchRL's loss never reads it. clip_epsilon is the range of the ratio."
            )
        if dual_clip is not None and not self._takes_dual_clip:
            raise ValueError(
                f"{type(self).__name__} has no dual_clip, got {dual_clip}: it bounds the clipped surrogate of GRPOLoss,"
                " DAPO and GSPOLoss."
            )
        if router_loss is not None and getattr(router_loss, "actor_network", None) is not actor_network:
            raise ValueError(
                f"router_loss must be a MoERouterLoss of this loss's actor, got {type(router_loss).__name__} of "
                "another: its terms come from the actor's one forward pass."
            )
        _checks.check_number("samples_mc_entropy", samples_mc_entropy, 1, whole=True)
        _checks.check_choice("proximal_policy", proximal_policy, (None, *get_args(Proximal)))
        _checks.check_choice("reference", reference, ("key", "adapter"))
        off = "None switches it off."
        for name, bound in {"kl_mask_threshold": kl_mask_threshold, "kl_clamp": kl_clamp}.items():
            _checks.check_number(name, bound, above=0, none=True, infinite=True, hint=off)
        for name, coeff in {"kl_to_ref_coeff": kl_to_ref_coeff, "kl_to_inference_coeff": kl_to_inference_coeff}.items():
            _checks.check_number(name, coeff, 0, none=True, hint=off)
        _checks.check_number("dual_clip", dual_clip, above=1, none=True, infinite=True, hint=f"3 is usual, {off}")
        _checks.check_bool("kl_off_policy", kl_off_policy)
        _checks.check_choice("kl_estimator", kl_estimator, ("k1", "k2", "k3"))
        if kl_estimator == "k1" and not kl_off_policy:
            raise ValueError(
                "kl_estimator='k1' as a plain loss has an expected gradient of 0 on policy: use 'k2', pass "
                "kl_off_policy=True, or put it into the reward (functional.kl_reward)."
            )
        _checks.check_bool("entropy_bonus", entropy_bonus)
        _checks.check_number("entropy_coeff", entropy_coeff)
        self.actor_network, self.reference = actor_network, reference
        self.aggregation = _aggregation_of(aggregation, reduction, fixed_length)
        self.fixed_length, self.reduction, self.dual_clip = fixed_length, reduction or "mean", dual_clip
        self.entropy_bonus, self.entropy_coeff = entropy_bonus, entropy_coeff
        self.samples_mc_entropy = samples_mc_entropy
        self.kl_mask_threshold, self.kl_estimator, self.kl_off_policy = kl_mask_threshold, kl_estimator, kl_off_policy
        self.kl_to_ref_coeff, self.kl_to_inference_coeff = kl_to_ref_coeff, kl_to_inference_coeff
        self.kl_clamp, self.masking_strategy, self.proximal_policy = kl_clamp, masking_strategy, proximal_policy
        self.corrections = Corrections(correction, thresholds, proximal_policy)
        self.ref_log_prob_padding_side = ref_log_prob_padding_side
        self.ref_log_prob_padding_value = ref_log_prob_padding_value
        self.__dict__["router_loss"] = router_loss  # not a submodule: the actor already is one
        clip = tuple(clip_epsilon) if isinstance(clip_epsilon, tuple | list) else (clip_epsilon, clip_epsilon)
        if len(clip) != 2:
            raise ValueError(f"clip_epsilon must be a number, or (low, high), got {_checks.shown(clip_epsilon)}.")
        _checks.check_number("clip_epsilon (low)", clip[0], 0, 1)
        _checks.check_number("clip_epsilon (high)", clip[1], 0, infinite=True)
        if device is None:
            device = getattr(self.actor_network, "device", None)  # its parameters may be offloaded
        if device is None:
            device = next((parameter.device for parameter in self.parameters()), torch.get_default_device())
        for name, epsilon in zip(("low", "high"), clip, strict=True):
            try:
                self.register_buffer(f"clip_epsilon_{name}", torch.tensor(float(epsilon), device=device))
            except (RuntimeError, TypeError, AssertionError) as error:
                raise ValueError(f"device={device!r}: {str(error).splitlines()[0]}") from error
        self._set_in_keys()
        keys = ["loss_objective", "clip_fraction", "kl_approx", "ESS", "num_dropped_tokens"]
        keys += ["masked_fraction", "mean_weight"] if self.corrections else []
        keys += ["entropy", "loss_entropy"] if entropy_bonus else []
        keys += ["loss_kl_to_ref", "kl_to_ref"] if kl_to_ref_coeff else []
        keys += ["loss_kl_to_inference", "kl_to_inference"] if kl_to_inference_coeff is not None else []
        self.out_keys = keys + getattr(router_loss, "out_keys", [])

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Raise TypeError if a subclass overrides a method that TorchRL's losses call and these losses never do."""
        super().__init_subclass__(**kwargs)
        hooks = {"_compute_policy_objective", "_get_cur_log_prob", "_log_weight"}
        hooks |= {"_aggregate_loss_value", "_get_entropy", "_kl_to_ref"}
        if found := sorted(hooks & set(vars(cls))):
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(found)}, which TorchRL's losses call and these never do: "
                "override _surrogate(ratios, advantage), the loss per token, or let the actor's score() return other "
                "log-probs."
            )

    @property
    def functional(self) -> bool:
        """False: the actor keeps its parameters; the loss does not take them over."""
        return False

    @property
    def inputs(self) -> LossInputs:
        """What is read from a batch, by the current attributes: a coefficient may be assigned at any time."""
        return LossInputs(
            masking=self.masking_strategy,
            reference=self._needs_reference and self.reference == "key",
            proximal=self.proximal_policy == "recomputed",
            staleness=self.proximal_policy == "interpolated" or self.corrections.needs_staleness,
            ref_side=self.ref_log_prob_padding_side,
            ref_fill=self.ref_log_prob_padding_value,
        )

    def _set_in_keys(self) -> None:  # set_keys() calls it
        own = [*self.inputs.keys(self.tensor_keys), *getattr(self.router_loss, "in_keys", [])]
        self.in_keys = list(dict.fromkeys([*getattr(self.actor_network, "in_keys", []), *own]))

    @property
    def _needs_reference(self) -> bool:
        return bool(self.kl_to_ref_coeff) or self.kl_mask_threshold is not None

    def forward(self, tensordict: TensorDictBase) -> LLMLossOutput:
        """Return the loss terms and metrics of a batch.

        Args:
            tensordict: batch size ``[B]``, ragged (a lazy stack) or dense. The loss writes nothing to it; an actor may.

        Raises:
            ValueError: a key is missing, an entry does not fit the tokens, or an advantage is not finite.
        """
        batch, mean_weight = self._read(tensordict)
        ask = (tensordict, batch.tokens, self.tensor_keys.attention_mask)
        scores = score_tokens(self.actor_network, *ask, self.entropy_bonus, batch.mask, self.router_loss is not None)
        batch = batch.to(scores.log_probs.device)
        ratios = policy_ratios(scores.log_probs, batch, self.proximal_policy)
        advantage = torch.where(ratios.mask, batch.advantage, 0)  # it may be NaN where no token counts
        surrogate, clipped = self._surrogate(ratios, advantage)
        weight, within, kept = self._correct(scores.log_probs, batch, ratios, mean_weight)
        metrics = {}
        if self.corrections:
            surrogate = surrogate * weight
            metrics = {
                "masked_fraction": _mean((~within).to(weight.dtype), ratios.mask),
                "mean_weight": _mean(weight * within, ratios.mask),
            }
        # by their name after "loss_"
        terms = {"objective": _Term(surrogate, None, ratios.mask)}
        if scores.entropy is not None:
            known = ratios.mask & scores.entropy.isfinite()
            terms["entropy"] = _Term(F.entropy_bonus(scores.entropy, self.entropy_coeff), scores.entropy, known)
        others = {
            "kl_to_ref": (batch.ref_log_probs, self.kl_to_ref_coeff or None),
            "kl_to_inference": (batch.sample_log_probs, self.kl_to_inference_coeff),
        }
        how = (self.kl_estimator, ratios.sample_log_ratio if self.kl_off_policy else None, self.kl_clamp)
        for name, (other, coeff) in others.items():
            if other is not None and coeff is not None:
                penalty, known = F.kl_penalty(scores.log_probs, other, ratios.mask, *how)
                terms[name] = _Term(coeff * penalty, penalty, known)
        losses = {f"loss_{name}": self._aggregate(term.loss, kept & term.mask, batch) for name, term in terms.items()}
        means = {name: _mean(term.metric, term.mask) for name, term in terms.items() if term.metric is not None}
        routing = {} if self.router_loss is None else self.router_loss(tensordict, scores.router_logits).items()
        finite = ratios.mask if scores.entropy is None else ratios.mask & scores.entropy.isfinite()
        return self.output_type(
            **losses,
            **means,
            **metrics,
            **dict(routing),
            clip_fraction=_mean(clipped.to(ratios.log_ratio.dtype), ratios.mask),
            kl_approx=_mean(-ratios.sample_log_ratio, ratios.mask),
            ESS=F.effective_sample_size(ratios.sample_log_ratio, ratios.mask),
            num_dropped_tokens=(batch.unsampled | batch.mask & ~finite).sum().to(ratios.log_ratio.dtype),
        )

    @torch.no_grad()
    def kept(self, tensordict: TensorDictBase, log_probs: Tensor) -> Tensor:
        """Return the tokens that corrections and ``kl_mask_threshold`` leave in the loss, bool ``[B, T]``.

        Args:
            tensordict: as for :meth:`forward`.
            log_probs: of the actor, ``[B, T]``, padded on the left: what ``score`` returns.
        """
        batch, mean_weight = self._read(tensordict)
        _checks.check_same_shape({"log_probs": log_probs, "tokens": batch.tokens})
        batch = batch.to(log_probs.device)
        ratios = policy_ratios(log_probs, batch, self.proximal_policy)
        return self._correct(log_probs, batch, ratios, mean_weight)[2]

    def _read(self, tensordict: TensorDictBase) -> tuple[TokenBatch, Tensor | None]:
        """Return the batch, and the mean importance weight of the whole batch."""
        batch = self.inputs.read(tensordict, self.tensor_keys, self._user_mask)
        mean_weight = self._mean_weight(batch)
        if self._needs_reference and self.reference == "adapter":
            ask = (tensordict, batch.tokens, self.tensor_keys.attention_mask)
            batch = replace(batch, ref_log_probs=score_reference(self.actor_network, *ask, batch.mask))
        return batch, mean_weight

    def _correct(
        self, log_probs: Tensor, batch: TokenBatch, ratios: PolicyRatios, mean_weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights, the tokens inside the corrections' bounds, and the tokens that are in the loss."""
        weight, within, kept = torch.ones_like(ratios.log_rho), torch.ones_like(ratios.mask), ratios.mask
        if self.corrections:
            advantage = torch.where(ratios.mask, batch.advantage, 0)
            weight, within = self.corrections(ratios, advantage, batch.staleness, mean_weight)
            kept = kept & within
        if self.kl_mask_threshold is not None and batch.ref_log_probs is not None:
            kept = kept & F.trust_region(log_probs, batch.ref_log_probs, ratios.mask, self.kl_mask_threshold)
        return weight, within, kept

    def _surrogate(self, ratios: PolicyRatios, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Return the policy's loss per token, and the tokens that it clips; other losses override this."""
        clip = (self.clip_epsilon_low, self.clip_epsilon_high)
        loss = F.clipped_surrogate(ratios.log_ratio, advantage, *clip, self.dual_clip)
        return loss, F.outside_clip_range(ratios.log_ratio, *clip)

    def _aggregate(self, loss: Tensor, kept: Tensor, batch: TokenBatch) -> Tensor:
        total = F.aggregate(
            F.select(kept, loss),
            batch.mask,
            self.aggregation,
            num_tokens=batch.num_valid_tokens,
            num_sequences=batch.num_sequences,
            fixed_length=self.fixed_length,
        )
        return total.unsqueeze(-1) if self.aggregation == "none" else total

    def denominators(self, tensordict: TensorDictBase) -> dict[NestedKey, float]:
        """Return the denominators of a whole batch, to be stored in each of its parts.

        With these keys in every part, the loss terms of the parts sum to those of the batch, however it is split. A
        trainer that averages over n parts instead of summing (TorchRL's ``GRPOTrainer`` divides the loss by
        ``gradient_accumulation_steps``) needs these numbers divided by n. Ranks that share a batch first sum theirs
        with :func:`torchrl_moe.objectives.sum_over_ranks`. Metrics remain means over the part.

        Example::

            for key, number in loss.denominators(td).items():
                td[key] = torch.full(td.batch_size, number)
            for part in td.split(4):
                out = loss(part)
        """
        keys = self.tensor_keys
        reader = TokenReader(tensordict, keys.action)
        mask, _, sample_log_probs = self.inputs.mask(reader, keys, self._user_mask)
        numbers = {
            keys.num_valid_tokens: float(mask.sum()),
            keys.num_sequences: float(F.sequence_count(mask, self.aggregation)),
        }
        prox = self.inputs.prox_log_probs(reader, keys)
        if self.corrections.normalises and prox is not None:
            weights = self.corrections.importance_weight(*F.log_ratio(prox, sample_log_probs, mask))
            numbers[keys.sum_weights] = float(weights.sum())
        return numbers

    def _mean_weight(self, batch: TokenBatch) -> Tensor | None:
        """Return the mean importance weight of the batch that this is a part of, if a correction needs it."""
        if not self.corrections.normalises or batch.prox_log_probs is None:
            return None
        if batch.sum_weights is not None and batch.num_valid_tokens is not None:
            return batch.sum_weights / batch.num_valid_tokens
        if batch.sum_weights is not None or batch.num_valid_tokens is not None:
            raise ValueError(
                f"correction 'snis' needs {self.tensor_keys.num_valid_tokens!r} and {self.tensor_keys.sum_weights!r} "
                "of the whole batch, got only one of them: store all that denominators() returns in each part."
            )
        rho = F.log_ratio(batch.prox_log_probs, batch.sample_log_probs, batch.mask)
        return self.corrections.importance_weight(*rho).sum() / batch.mask.sum()

    @property
    def _user_mask(self) -> NestedKey | None:
        # loss_mask_key belongs to LossModule, whose "auto" finds no mask of tokens
        return None if self.loss_mask_key in (None, "auto") else self.loss_mask_key


class _Term(NamedTuple):
    """A term of the loss, ``[B, T]`` each; ``metric`` is reported as its mean over ``mask``."""

    loss: Tensor
    metric: Tensor | None
    mask: Tensor


def _mean(value: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(value.detach(), mask, mask.sum())


def _aggregation_of(aggregation: str | None, reduction: str | None, fixed_length: int | None) -> F.Aggregation:
    """Return the aggregation, from the three arguments that set it.

    >>> _aggregation_of(None, None, None), _aggregation_of("prompt_mean", "none", None)
    ('token_mean', 'none')
    """
    chosen = cast(F.Aggregation, "token_mean" if aggregation is None else aggregation)
    _checks.check_choice("aggregation", chosen, F.AGGREGATIONS)
    if (chosen == "fixed_length") != (fixed_length is not None):
        raise ValueError(
            f"fixed_length and aggregation='fixed_length' go together, got fixed_length={fixed_length} and "
            f"aggregation={chosen!r}: give the greatest number of tokens that a response may have."
        )
    _checks.check_number("fixed_length", fixed_length, 1, whole=True, none=True)
    if reduction == "sum":
        raise ValueError(
            "reduction must be one of [None, 'mean', 'none'], got 'sum': TorchRL's loss is a mean then too. For a sum "
            "over tokens divided by a number of your choice use aggregation='fixed_length', fixed_length=...."
        )
    _checks.check_choice("reduction", reduction, (None, "mean", "none"))
    return "none" if reduction == "none" else chosen
