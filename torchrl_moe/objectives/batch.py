"""The inputs of a loss, read from a tensordict into aligned ``[B, T]`` tensors.

Ragged samples (a lazy stack) are padded on the left to the longest, so that their last tokens share a column; a dense
batch keeps its padding. This module decides which tokens count, not what is computed from them.

Letters: B sequences, T tokens of the longest, P_i prompt and T_i prompt and response tokens of sequence i.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from inspect import Parameter, signature
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.objectives import LossModule

from torchrl_moe import _checks
from torchrl_moe.errors import MissingEntryError

Masking: TypeAlias = Literal["sft", "rlhf", "generic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """What a loss computes with. Where ``mask`` is False, the other values are undefined."""

    tokens: Tensor
    """int64 ``[B, T]``."""
    mask: Tensor
    """bool ``[B, T]``: the tokens to train on whose sample log-prob is known."""
    unsampled: Tensor
    """bool ``[B, T]``: the tokens to train on whose sample log-prob should be known, but is not."""
    advantage: Tensor
    """``[B, T]``."""
    sample_log_probs: Tensor
    """``[B, T]``, of the policy that generated the tokens."""
    ref_log_probs: Tensor | None
    """``[B, T]``, NaN where there is none; ``None`` if no loss term needs it."""
    prox_log_probs: Tensor | None
    """``[B, T]``, of the proximal policy, if it was recomputed; NaN where there is none."""
    staleness: Tensor | None
    """int64 ``[B, T]``, number of weight updates since each token was sampled, if a correction needs it."""
    num_valid_tokens: Tensor | None
    """``[]``, valid tokens of the whole batch, if this is a part of it."""
    num_sequences: Tensor | None
    """``[]``, the same for sequences."""
    sum_weights: Tensor | None
    """``[]``, the same for importance weights."""

    def to(self, device: torch.device) -> TokenBatch:
        """Return the batch on ``device``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in values.items() if value is not None})


class TokenReader:
    """Reads entries with a value per token."""

    def __init__(self, tensordict: TensorDictBase, tokens_key: NestedKey) -> None:
        if tensordict.batch_dims != 1 or not len(tensordict):
            raise ValueError(
                f"the loss takes a batch of sequences, batch size [B] with B >= 1, got {list(tensordict.batch_size)}: "
                "use td.reshape(-1) on a batch of more dimensions, and td.unsqueeze(0) on a single sample."
            )
        self._td = tensordict
        self._hint = f"It has a value for each token of {tokens_key!r}: check that both were cut or padded alike."
        rows = self._rows(tokens_key, "the token ids of prompt and response")
        self.lengths = [len(row) for row in rows]
        self.tokens = _pad_left(rows, 0)
        _checks.check_integer(repr(tokens_key), self.tokens)

    def per_token(self, key: NestedKey, meaning: str, fill: float = 0.0) -> Tensor:
        """Return the ``[T_i]`` rows of ``key`` as ``[B, T]``, with ``fill`` on the left."""
        rows = self._rows(key, meaning)
        self._check_shapes(key, rows)
        return _pad_left(rows, fill)

    def per_token_mask(self, key: NestedKey, meaning: str) -> Tensor:
        """Return the mask ``key`` as bool ``[B, T]``."""
        return _checks.as_mask(repr(key), self.per_token(key, meaning))

    def routes(self, key: NestedKey) -> Tensor:
        """Return the experts ``[T_i, L, K]`` of ``key`` as int64 ``[B, T, L, K]``, -1 on the left."""
        rows = self._rows(key, "the experts that each token was routed to")
        self._check_shapes(key, rows, "L", "K")
        for i, row in enumerate(rows):
            _checks.check_integer(f"{key!r} of sample {i}", row)
        return _pad_left([row.long() for row in rows], -1)

    def _check_shapes(self, key: NestedKey, rows: Sequence[Tensor], *more: str) -> None:
        for i, (row, length) in enumerate(zip(rows, self.lengths, strict=True)):
            _checks.check_shape(f"{key!r} of sample {i}", row.shape, (length, *more), hint=self._hint)

    def mask(self, masking: Masking, prompt: NestedKey, attention: NestedKey, assistant: NestedKey) -> Tensor:
        """Return the tokens to train on, bool ``[B, T]``.

        - ``"sft"``: attended tokens after the first ``len(prompt row)`` positions of the sample;
        - ``"rlhf"``: the tokens of the assistant mask;
        - ``"generic"``: all attended tokens.
        """
        if masking == "rlhf":
            return self.per_token_mask(assistant, "the mask of all assistant tokens (masking_strategy='rlhf')")
        mask = self.per_token_mask(attention, f"the attention mask (masking_strategy={masking!r})")
        if masking == "generic":
            return mask
        meaning = "the prompt's token ids (masking_strategy='sft'); 'rlhf' uses the assistant mask instead"
        responses = []
        for i, (row, length) in enumerate(zip(self._rows(prompt, meaning), self.lengths, strict=True)):
            if len(row) > length:
                raise ValueError(
                    f"{prompt!r} of sample {i} has {len(row)} tokens, got only {length} in all. {self._hint}"
                )
            responses.append(torch.arange(length, device=row.device) >= len(row))
        return mask & _pad_left(responses, False)

    def advantage(self, key: NestedKey) -> Tensor:
        """Return the advantages ``[B, T]`` from ``[T_i, 1]`` per token or ``[1, 1]`` per sample."""
        hint = (
            "It is [1, 1] for a whole sample or [T, 1] per token; MCAdvantage gives the former if the reward is "
            "[*batch, 1, 1]."
        )
        rows = self._rows(key, "the advantages")
        per_token = []
        for i, (row, length) in enumerate(zip(rows, self.lengths, strict=True)):
            name = f"{key!r} of sample {i}"
            if row.shape != (1, 1):
                _checks.check_shape(name, row.shape, (length, 1), hint=hint)
            _checks.check_floating(name, row)
            if row.requires_grad:
                raise ValueError(f"{name} requires grad, but an advantage is a constant: store it detached.")
            per_token.append(row[:, 0].expand(length))
        return _pad_left(per_token, 0.0)

    def constant_log_probs(self, key: NestedKey, meaning: str) -> Tensor:
        """Return log-probs ``[B, T]`` that are data, not results of the model being trained."""
        values = self.per_token(key, f"the log-probs of {meaning}")
        _checks.check_floating(repr(key), values)
        if values.requires_grad:
            raise ValueError(f"{key!r} requires grad, but {meaning} is a constant: store it detached.")
        return values

    def staleness(self, versions_key: NestedKey, current_key: NestedKey, mask: Tensor) -> Tensor:
        """Return how many weight updates ago each token was sampled, int64 ``[B, T]``; 0 outside ``mask``."""
        versions = self.per_token(versions_key, "the version of the weights that sampled each token", fill=-1)
        _checks.check_integer(repr(versions_key), versions)
        current = self.total(current_key)
        if current is None:
            raise MissingEntryError(
                f"the tensordict has no {current_key!r}: the version of the weights being trained, which the age of a "
                "token is counted from. Store the number that the weight sync reports: td['current_version'] = "
                "torch.full(td.batch_size, version)."
            )
        staleness = torch.where(mask, current.long() - versions.long(), 0)
        if bool(((staleness < 0) | (mask & (versions < 0))).any()):
            raise ValueError(
                f"{versions_key!r} must be in 0..{int(current)} ({current_key!r}) where a token counts, got "
                f"{versions[mask].unique().tolist()}: -1 is for tokens that no policy sampled."
            )
        return staleness

    def ref_log_probs(self, key: NestedKey, side: Literal["left", "right"], fill: float) -> Tensor:
        """Return the reference's log-probs ``[B, T]`` from ``[T_i]`` or ``[T_i, 1]``, short rows filled on ``side``."""
        hint = (
            "RetrieveLogProb writes them. For a kl_mask_threshold around the policy that sampled, which is what "
            "TorchRL's code computes, name that policy's: set_keys(ref_log_probs=('log_probs', 'full'))."
        )
        rows = self._rows(key, "the ref log-probs (kl_to_ref_coeff, kl_mask_threshold)", hint)
        complete = []
        for row, length in zip(rows, self.lengths, strict=True):
            values = (row[:, 0] if row.ndim == 2 and row.shape[-1] == 1 else row).detach()
            missing = length - len(values)
            if values.ndim == 1 and missing > 0:
                pads = (missing, 0) if side == "left" else (0, missing)
                values = torch.nn.functional.pad(values, pads, value=fill)
            complete.append(values)
        self._check_shapes(key, complete)
        for i, values in enumerate(complete):
            _checks.check_floating(f"{key!r} of sample {i}", values)
        return _pad_left(complete, fill)

    def total(self, key: NestedKey) -> Tensor | None:
        """Return a number ``[]`` that all samples share; ``None`` if there is none."""
        value: object = self._td.get(key, None)
        if value is None:
            return None
        flat = value.flatten() if isinstance(value, Tensor) else torch.zeros(0)
        if not len(flat) or bool((flat != flat[0]).any()) or not 0 <= float(flat[0]) < float("inf"):
            raise ValueError(
                f"{key!r} must be a tensor of one finite number, 0 or more and the same for each sample, got {value}: "
                "it is of the whole batch, and stored in each of its parts."
            )
        return flat[0]

    def _rows(self, key: NestedKey, meaning: str, hint: str = "") -> list[Tensor]:
        found: Tensor | Sequence[Tensor] | None = self._td.get(key, None, as_list=True)
        if found is None:
            known = sorted(map(repr, self._td.keys(True, True)))
            raise MissingEntryError(
                f"Couldn't find {meaning}: the tensordict has no {key!r}. It has {', '.join(known)}. If it is there "
                f"under another name, tell the loss by set_keys(). {hint}".rstrip()
            )
        rows = list(found.unbind(0)) if isinstance(found, Tensor) else list(found)
        for i, row in enumerate(rows):
            if not isinstance(row, Tensor) or not row.ndim:
                got = _checks.shown(row)
                raise ValueError(f"{key!r} of sample {i} must be a tensor with a value per token, got {got}.")
        return rows


def _pad_left(rows: Sequence[Tensor], fill: float) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=fill, padding_side="left")


# The tensordict keys of a loss, and what it reads of them.


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
        _checks.check_choice("masking_strategy", self.masking, get_args(Masking))
        _checks.check_choice("ref_log_prob_padding_side", self.ref_side, ("left", "right"))
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
        """Return the batch, aligned."""
        reader = TokenReader(tensordict, names.action)
        mask, unsampled, sample_log_probs = self.mask(reader, names, loss_mask)
        advantage = reader.advantage(names.advantage)
        broken = (mask & ~advantage.isfinite()).nonzero()
        if len(broken):
            sample, token = broken[0].tolist()
            raise ValueError(
                f"{names.advantage!r} must be finite where a token counts, got {advantage[sample, token].item()} in "
                f"sample {sample}: check the rewards of its group (a single sample has no standard deviation), or "
                "leave the sample out."
            )
        ref = (names.ref_log_probs, self.ref_side, self.ref_fill)
        batch = TokenBatch(
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
        numbers = {names.num_valid_tokens: batch.num_valid_tokens, names.num_sequences: batch.num_sequences}
        for key, number in numbers.items():  # by 0 nothing is divided: the sum would be the loss
            if number is not None and not bool(number) and bool(mask.any()):
                raise ValueError(
                    f"{key!r} is 0, but {int(mask.sum())} tokens of this part count: it is of the whole batch, see "
                    "denominators()."
                )
        return batch

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
            mask = mask & reader.per_token_mask(loss_mask, "the mask named by loss_mask_key")
        log_probs = reader.constant_log_probs(names.sample_log_prob, "the policy that generated the tokens")
        known = log_probs.isfinite()
        return mask & known, mask & ~known & (self.masking != "generic"), log_probs


class ScoringActor(Protocol):
    """What a loss calls, unless the actor has the ``get_dist`` of TorchRL's wrappers; no actor is imported.

    Letters: B sequences, T tokens of the longest, L decoder layers, E experts.
    """

    def score(
        self, td: TensorDictBase, router_logits: bool = False, entropy: bool = True, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Score the tokens of ``td`` (batch size ``[B]``, ragged or dense).

        Sequences shorter than the longest are padded on the left, as by ``td.get(("tokens", "full"),
        as_padded_tensor=True, padding_side="left")``; a dense batch keeps its own pads.

        Args:
            td: the batch.
            router_logits: whether to return the routers' logits.
            entropy: whether to return entropies.
            mask: bool ``[B, T]``: the only tokens whose scores will be read. An actor may skip the others, and need not
                accept this argument.

        Returns:
            ``[B, T]`` log-probs of token t given those before it, 0 at first tokens and pads; ``[B, T]`` entropies of
            the distributions that token t was drawn from, or ``None`` without ``entropy``; ``[B, T, L, E]`` router
            logits, or ``None`` without ``router_logits``. The actor may write to ``td`` (route agreement, say).
        """
        ...


class TokenScores(NamedTuple):
    """What a loss reads from an actor: ``[B, T]`` each, and the routers' logits ``[B, T, L, E]`` if requested."""

    log_probs: Tensor
    entropy: Tensor | None
    router_logits: Tensor | None = None


def score_tokens(
    actor: Any,
    tensordict: TensorDictBase,
    tokens: Tensor,
    attention_mask_key: NestedKey,
    entropy: bool,
    mask: Tensor | None = None,
    router_logits: bool = False,
) -> TokenScores:
    """Return the actor's log-probs of ``tokens``, with a gradient, and their entropies if ``entropy``."""
    routers = None
    if hasattr(actor, "score"):
        # An actor that always computes entropies, or all tokens, need not accept these arguments.
        asked: dict[str, bool | Tensor] = {} if entropy else {"entropy": False}
        if mask is not None and "mask" in signature(actor.score).parameters:
            asked["mask"] = mask
        if router_logits:
            asked["router_logits"] = True
        log_probs, spread, routers = actor.score(tensordict, **asked)
    else:
        # The padding side is explicit, because TorchRL's wrappers differ in their default. tensordict's own modules get
        # no keywords that they do not name, because they would pass them to the model.
        keywords = {"mask_key": attention_mask_key, "padding_side": "left"}
        takes = signature(actor.get_dist).parameters
        plain = isinstance(actor, ProbabilisticTensorDictModule | ProbabilisticTensorDictSequential)
        if plain or all(parameter.kind is not Parameter.VAR_KEYWORD for parameter in takes.values()):
            keywords = {name: value for name, value in keywords.items() if name in takes}
        dist = actor.get_dist(tensordict.copy(), **keywords)
        logits = getattr(dist, "logits", None)
        if logits is not None:
            _checks.check_shape("logits of the actor", logits.shape, (*tokens.shape, "V"), hint=_ALIGNED)
        log_probs = dist.log_prob(tokens if logits is None else tokens.to(logits.device))
        spread = dist.entropy() if entropy else None
    _checks.check_same_shape({"log-probs of the actor": log_probs, "tokens": tokens}, hint=_ALIGNED)
    if not entropy:
        return TokenScores(log_probs, None, routers)
    if spread is None:
        raise ValueError(
            "entropy_bonus=True needs entropies, and the actor's score() returned None for them: let it compute them, "
            "or pass entropy_bonus=False."
        )
    _checks.check_same_shape({"entropies of the actor": spread, "tokens": tokens}, hint=_ALIGNED)
    return TokenScores(log_probs, spread, routers)


def score_reference(
    actor: Any, tensordict: TensorDictBase, tokens: Tensor, attention_mask_key: NestedKey, mask: Tensor | None = None
) -> Tensor:
    """Return the log-probs of ``tokens`` by the actor's model without its adapter, ``[B, T]``, without a gradient.

    The base of a peft model is the reference that its adapter started from, so no second model is needed. If the actor
    replays the rollout's routes, it does so here too.
    """
    holders = (actor, getattr(actor, "model", None))
    model = next((holder for holder in holders if hasattr(holder, "disable_adapter")), None)
    if model is None:
        raise ValueError(
            f"reference='adapter' needs a model with an adapter that can be switched off (peft's disable_adapter), got "
            f"{type(actor).__name__} of {type(holders[1]).__name__}: use reference='key' and RetrieveLogProb."
        )
    if getattr(actor, "rerecord", False):  # the reference would follow experts of its own
        actor = copy.copy(actor)
        actor.rerecord = False
    # a copy, because what the actor writes there belongs to another policy
    with torch.no_grad(), model.disable_adapter():
        scores = score_tokens(actor, tensordict.copy(), tokens, attention_mask_key, False, mask)
    return scores.log_probs.detach()


_ALIGNED = "An actor scores each token of the input, padded on the left to the longest sequence."
