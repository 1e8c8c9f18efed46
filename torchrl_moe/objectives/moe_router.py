"""``MoERouterLoss``: keeps the routers' load even and their logits small while a policy is trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from inspect import signature
from typing import Any, get_args

import torch
from tensordict import NestedKey, TensorClass, TensorDictBase
from torch import Tensor
from torchrl.objectives import LossModule

from torchrl_moe import _checks
from torchrl_moe.objectives import load_balancing as balance
from torchrl_moe.objectives.batch import TokenReader


class MoERouterLossOutput(TensorClass["nocast"]):  # type: ignore[name-defined] # mypy takes "nocast" for a type
    """What the loss returns: ``loss_*`` are to be summed, the others are detached. Layers without a router are NaN."""

    loss_load_balancing: Tensor
    loss_z: Tensor
    expert_load: Tensor
    """``[L, E]``: each expert's share of the live router's choices."""
    load_entropy: Tensor
    """``[L]``: entropy of the load over ``log E``; 1 if even, 0 if one expert has all of it."""
    max_load: Tensor
    """``[L]``: load of the busiest expert over the mean load; 1 if even."""
    num_dropped_rows: Tensor
    """Rows (a token in a layer) left out because a logit is NaN or infinite: 0 if all is well."""


class MoERouterLoss(LossModule):
    """Load balancing loss and z-loss on live router logits.

    ``loss_load_balancing`` is ``load_balancing_coeff E Σ_e f_e P_e`` (arXiv 2101.03961, eq. 4-6) and ``loss_z`` is
    ``z_coeff (log Σ_e exp x_e)^2`` (arXiv 2202.08906, eq. 5), means over layers; see
    :mod:`~torchrl_moe.objectives.load_balancing`. They act on the router's own choice, even where the forward pass
    follows the engine's experts. Every attended token counts, prompts included, since a router routes them all; padding
    and layers without a router do not count.

    With ``GRPOLoss(actor, router_loss=...)`` the policy loss returns these terms too, from one forward pass. Called by
    itself, it runs one of the layers without the head: ``actor.score(td, entropy=False, router_logits=True)``, with an
    empty ``mask`` if ``score`` takes one.

    Args:
        actor_network: anything with ``score`` (:class:`~torchrl_moe.objectives.batch.ScoringActor`) that accepts
            ``router_logits``.
        top_k: K, experts per token.
        load_balancing_coeff: 1e-2 is Switch's.
        z_coeff: 1e-3 is ST-MoE's.
        scoring: how the router turns logits into scores: ``"softmax"``, or ``"sigmoid"`` (DeepSeek-V3).
        per_sequence: balance each sequence (DeepSeek-V3, arXiv 2412.19437, eq. 17-20) instead of the batch.

    Keys, for :meth:`set_keys`: ``action``, ``attention_mask``, and two optional ones of the whole batch of which the
    input is a part, see :meth:`totals`: ``expert_counts``, ``num_router_sequences``.

    Raises:
        ValueError: an argument that is not allowed.
        TypeError: an actor without ``score``.

    Example::

        router_loss = MoERouterLoss(actor, top_k=model.config.num_experts_per_tok)
        out = GRPOLoss(actor, router_loss=router_loss)(td)
        sum(value for key, value in out.items() if key.startswith("loss_")).backward()
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        action: NestedKey = ("tokens", "full")
        attention_mask: NestedKey = ("masks", "all_attention_mask")
        expert_counts: NestedKey = "expert_counts"
        num_router_sequences: NestedKey = "num_router_sequences"

    def __init__(
        self,
        actor_network: Any,
        *,
        top_k: int,
        load_balancing_coeff: float = 1e-2,
        z_coeff: float = 1e-3,
        scoring: balance.Scoring = "softmax",
        per_sequence: bool = False,
    ) -> None:
        super().__init__()
        if not hasattr(actor_network, "score"):
            raise TypeError(
                f"actor_network must have a score method that gives router logits, got "
                f"{type(actor_network).__name__}: wrap the model, TransformersWrapper(model, tokenizer=...)."
            )
        _checks.check_choice("scoring", scoring, get_args(balance.Scoring))
        for name, coeff in {"load_balancing_coeff": load_balancing_coeff, "z_coeff": z_coeff}.items():
            _checks.check_number(name, coeff, 0, hint="0 switches it off.")
        _checks.check_number("top_k", top_k, 1, 1 << 16, whole=True, hint="It is the number of experts per token.")
        _checks.check_bool("per_sequence", per_sequence)
        self.actor_network = actor_network
        self.top_k, self.scoring, self.per_sequence = top_k, scoring, per_sequence
        self.load_balancing_coeff, self.z_coeff = load_balancing_coeff, z_coeff
        self._set_in_keys()
        self.out_keys = ["loss_load_balancing", "loss_z", "expert_load", "load_entropy", "max_load", "num_dropped_rows"]

    @property
    def functional(self) -> bool:
        """False: the actor keeps its parameters; the loss does not take them over."""
        return False

    def _set_in_keys(self) -> None:  # set_keys() calls it
        own = [self.tensor_keys.action, self.tensor_keys.attention_mask]
        self.in_keys = list(dict.fromkeys([*getattr(self.actor_network, "in_keys", []), *own]))

    def forward(self, tensordict: TensorDictBase, router_logits: Tensor | None = None) -> MoERouterLossOutput:
        """Return loss terms and metrics of a batch.

        Args:
            tensordict: batch size ``[B]``, ragged (a lazy stack) or dense.
            router_logits: ``[B, T, L, E]``, what the actor's ``score`` returned for this batch; by default ``score`` is
                called.

        Raises:
            ValueError: a key is missing, an entry does not fit the tokens, or the actor gave no router logits.
        """
        keys = self.tensor_keys
        reader = TokenReader(tensordict, keys.action)
        logits, rows, dropped = self._route(tensordict, reader, router_logits)
        layers, experts = logits.shape[2:]
        whole = self._of_batch(tensordict, keys.expert_counts, layers, experts)
        sequences = self._of_batch(tensordict, keys.num_router_sequences, layers)
        if (whole is None) != (sequences is None):
            raise ValueError(
                f"{keys.expert_counts!r} and {keys.num_router_sequences!r} go together, got only one of them: store "
                "all that totals() returns in each part."
            )
        num_rows = None if whole is None else whole.sum(-1) / self.top_k
        balancing = balance.load_balancing_loss(
            logits,
            rows,
            self.top_k,
            scoring=self.scoring,
            per_sequence=self.per_sequence,
            share=None if whole is None or self.per_sequence else balance.load_share(whole),
            num_rows=sequences if self.per_sequence else num_rows,
        )
        counts = balance.choice_counts(logits, rows, self.top_k).sum(0)
        own, live = balance.load_share(counts), counts.any(-1)
        return MoERouterLossOutput(
            loss_load_balancing=self.load_balancing_coeff * balancing,
            loss_z=self.z_coeff * balance.z_loss(logits, rows, num_rows),
            expert_load=own.masked_fill(~live[:, None], float("nan")),
            load_entropy=balance.load_entropy(own),
            max_load=balance.max_load(own),
            num_dropped_rows=dropped.to(counts.dtype),
        )

    def _route(
        self, tensordict: TensorDictBase, reader: TokenReader, logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return live logits ``[B, T, L, E]``, the rows ``[B, T, L]`` that count, and how many ``[]`` do not."""
        mask = self._attended(reader)
        if logits is None:
            asked: dict[str, bool | Tensor] = {"router_logits": True, "entropy": False}
            if "mask" in signature(self.actor_network.score).parameters:
                asked["mask"] = torch.zeros_like(mask)
            _, _, logits = self.actor_network.score(tensordict, **asked)
        if logits is None:
            raise ValueError(
                "the actor's score(td, router_logits=True) returned None for the router logits: the model must be a "
                "MoE, and its wrapper must return them."
            )
        hint = "An actor gives logits for each token of the input, padded on the left to the longest sequence."
        _checks.check_shape("router logits of the actor", logits.shape, (*mask.shape, "L", "E"), hint=hint)
        mask = mask.to(logits.device)
        rows = balance.known_rows(logits, mask)
        dropped = mask[..., None] & balance.router_layers(logits, mask) & ~rows
        return logits, rows, dropped.sum()

    def _attended(self, reader: TokenReader) -> Tensor:
        return reader.per_token_mask(self.tensor_keys.attention_mask, "the mask of all tokens that are no pads")

    def _of_batch(self, tensordict: TensorDictBase, key: NestedKey, *shape: int) -> Tensor | None:
        """Return a value of the whole batch, which each sample of a part holds; ``None`` if it is absent."""
        value: Tensor | None = tensordict.get(key, None)
        if value is None:
            return None
        hint = "It is that of the whole batch, the same for each sample: see MoERouterLoss.totals."
        _checks.check_shape(repr(key), value.shape, (len(tensordict), *shape), hint=hint)
        if not bool(((value >= 0) & value.isfinite()).all()):
            raise ValueError(f"{key!r} holds counts, finite and 0 or more, got {_checks.shown(value)}. {hint}")
        return value[0]

    @torch.no_grad()
    def totals(
        self, parts: Iterable[TensorDictBase], routes: NestedKey | None = None, num_experts: int | None = None
    ) -> dict[NestedKey, Tensor]:
        """Return the routing choices of the whole batch, to be stored in each of its parts.

        With these entries the loss terms of the parts sum to those of the batch, however it is split; without them
        each part is balanced by itself, and both terms are divided by its own rows. The choices are those of the
        current routers, which takes a forward pass per part; or those in ``routes``, which takes none: the experts that
        a replay follows, which differ from the live router's in about a tenth of the rows.

        They are counts. Ranks that share a batch first sum theirs with :func:`torchrl_moe.objectives.sum_over_ranks`.

        Args:
            parts: micro-batches that make up the batch, or this rank's share of it.
            routes: key of choices ``[T, L, K]``, -1 for none, such as ``("routed_experts", "full")``. Rows without any
                choice, such as a sequence's last token, count as the mean of the others.
            num_experts: E, with ``routes``.

        Raises:
            ValueError: no part, ``routes`` without ``num_experts``, or an expert out of range.

        Returns:
            ``expert_counts`` ``[L, E]``, rows that chose each expert; ``num_router_sequences`` ``[L]``, sequences with
            a row. On the CPU.

        Example::

            parts = td.split(4)
            totals = router_loss.totals(parts, routes=("routed_experts", "full"), num_experts=model.config.num_experts)
            for key, value in sum_over_ranks(totals).items():  # without sum_over_ranks on one process
                for part in parts:
                    part[key] = value.expand(len(part), *value.shape)
        """
        if (routes is None) != (num_experts is None):
            raise ValueError(f"routes and num_experts go together, got routes={routes!r}, num_experts={num_experts}.")
        _checks.check_number("num_experts", num_experts, 1, whole=True, none=True)
        counts, sequences, tokens = [], [], 0.0
        for part in parts:
            reader = TokenReader(part, self.tensor_keys.action)
            if routes is not None and num_experts is not None:
                mask = self._attended(reader)
                counts.append(balance.recorded_counts(reader.routes(routes), mask, num_experts).double().cpu())
                sequences.append(mask.any(1).sum().double().cpu())
                tokens += float(mask.sum())
                continue
            logits, rows, _ = self._route(part.copy(), reader)
            counts.append(balance.choice_counts(logits, rows, self.top_k).sum(0).double().cpu())
            sequences.append(rows.any(1).sum(0).double().cpu())
        if not counts:
            raise ValueError("totals() needs at least one part, got none.")
        chosen, whole = torch.stack(counts).sum(0), torch.stack(sequences).sum(0)
        if routes is not None:
            chosen, whole = tokens * self.top_k * balance.load_share(chosen), whole * chosen.any(-1)
        return {self.tensor_keys.expert_counts: chosen, self.tensor_keys.num_router_sequences: whole}
