"""How a loss gets log-probs from an actor: from ``score``, or from the ``get_dist`` of TorchRL's wrappers.

The contract is the protocol below; no actor is imported. Letters: B sequences, T tokens of the longest, L decoder
layers, E experts.
"""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from torch import Tensor

from torchrl_moe import _checks

__all__ = ["ScoringActor", "TokenScores", "check_actor", "score_reference", "score_tokens"]


class ScoringActor(Protocol):
    """What a loss calls."""

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


def check_actor(actor: Any) -> None:
    """Raise TypeError unless ``actor`` can score."""
    if not (hasattr(actor, "score") or hasattr(actor, "get_dist")):
        raise TypeError(
            f"actor_network must have a score method (or get_dist, as TorchRL's wrappers), got "
            f"{type(actor).__name__}: wrap the model, TransformersWrapper(model, tokenizer=...)."
        )


def score_tokens(
    actor: Any,
    tensordict: TensorDictBase,
    tokens: Tensor,
    attention_mask_key: NestedKey,
    entropy: bool,
    mask: Tensor | None = None,
    router_logits: bool = False,
) -> TokenScores:
    """Return the actor's log-probs of ``tokens``, with a gradient, and their entropies if ``entropy``.

    Args:
        actor: a :class:`ScoringActor`, or a module with ``get_dist(td)``, such as a TorchRL ``LLMWrapperBase`` with
            ``generate=False`` or a ``ProbabilisticTensorDictSequential``: a distribution over tokens ``[B, T]``.
        tensordict: the batch, batch size ``[B]``.
        tokens: ``[B, T]``, padded on the left.
        attention_mask_key: the mask under which a TorchRL wrapper scores.
        entropy: whether to return entropies.
        mask: bool ``[B, T]``: the tokens that will be read; default: all.
        router_logits: whether to return the routers' logits, which a TorchRL wrapper cannot.

    Raises:
        ValueError: the actor's tensors are not ``[B, T]``, or it returned no entropy although ``entropy`` is set.
    """
    routers = None
    if hasattr(actor, "score"):
        # An actor that always computes entropies, or all tokens, need not accept these arguments.
        asked: dict[str, Any] = {} if entropy else {"entropy": False}
        if mask is not None and "mask" in signature(actor.score).parameters:
            asked["mask"] = mask
        if router_logits:
            asked["router_logits"] = True
        log_probs, spread, routers = actor.score(tensordict, **asked)
    else:
        dist = actor.get_dist(tensordict.copy(), **_dist_arguments(actor, attention_mask_key))
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


def _dist_arguments(actor: Any, attention_mask_key: NestedKey) -> dict[str, Any]:
    """Return the keyword arguments of ``actor.get_dist``.

    The padding side is explicit, because TorchRL's wrappers differ in their default. tensordict's own modules get no
    keywords, because they would pass them to the model.
    """
    asked = {"mask_key": attention_mask_key, "padding_side": "left"}
    takes = signature(actor.get_dist).parameters
    plain = isinstance(actor, ProbabilisticTensorDictModule | ProbabilisticTensorDictSequential)
    if not plain and any(parameter.kind is Parameter.VAR_KEYWORD for parameter in takes.values()):
        return asked
    return {name: value for name, value in asked.items() if name in takes}


def score_reference(
    actor: Any, tensordict: TensorDictBase, tokens: Tensor, attention_mask_key: NestedKey, mask: Tensor | None = None
) -> Tensor:
    """Return the log-probs of ``tokens`` by the actor's model without its adapter, ``[B, T]``, without a gradient.

    The base of a peft model is the reference that its adapter started from, so no second model is needed. The actor
    scores a copy of ``tensordict``, because what it writes there belongs to another policy. If it replays the rollout's
    routes, it does so here too. ``mask`` as for :func:`score_tokens`.

    Raises:
        ValueError: neither the actor nor its ``model`` has a ``disable_adapter`` context, as peft's models do.
    """
    holders = (actor, getattr(actor, "model", None))
    model = next((holder for holder in holders if hasattr(holder, "disable_adapter")), None)
    if model is None:
        raise ValueError(
            f"reference='adapter' needs a model with an adapter that can be switched off (peft's disable_adapter), got "
            f"{type(actor).__name__} of {type(holders[1]).__name__}: use reference='key' and RetrieveLogProb."
        )
    with torch.no_grad(), model.disable_adapter():
        scores = score_tokens(actor, tensordict.copy(), tokens, attention_mask_key, False, mask)
    return scores.log_probs.detach()


_ALIGNED = "An actor scores each token of the input, padded on the left to the longest sequence."
