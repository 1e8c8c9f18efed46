"""What the model computes: log-probs by itself and under an engine's routes, and whether those routes are right.

Each router is judged given the engine's own routes of all earlier rows, so one wrong row does not make later rows
wrong, and a tie affects only its own row.

Letters: T tokens, V vocabulary, L decoder layers, K experts per token, E experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_moe.data import RoutingLayout
from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules.replay import router_replay as handles
from torchrl_moe.modules.replay.interception import TopKObserver
from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.testing.conformance.adapter import NotOffered


@dataclass(frozen=True, slots=True)
class Followed:
    """What the model computes under given routes: logits ``[T, V]``, and by how much each row is not the best.

    A gap ``[T, L]`` is the highest score of an expert left out minus the lowest of one chosen: at most 0 if the router
    itself would choose the row, and -inf where there is none.
    """

    logits: Tensor
    gaps: Tensor


class Reference:
    """A transformers model, run on one sequence at a time; the independent side of every comparison."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._was_training = model.training
        model.eval()
        self._replay: RouterReplay | None = None
        self._why_not = ""
        self._owns = False
        # A model has at most one RouterReplay: a user's own is used, and stays.
        try:
            before = _replay_of(model)
            self._replay = before or RouterReplay(model)
            self._owns = before is None
        except UnsupportedRouterError as error:
            self._why_not = str(error)

    @property
    def layout(self) -> RoutingLayout | None:
        """The layout of the model's routers; ``None`` if it has none that can be replayed."""
        if self._replay is None:
            return None
        return RoutingLayout(
            num_layers=self._replay.num_layers,
            moe_layers=self._replay.layers,
            top_k=self._replay.top_k,
            num_experts=self._replay.num_experts,
        )

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits float32 ``[T, V]`` of a sequence ``[T]``: a plain forward pass of transformers."""
        return self._forward(ids)

    @torch.no_grad()
    def follow(self, ids: Tensor, routes: Tensor) -> Followed:
        """Run a sequence, following given experts."""
        if self._replay is None:
            raise NotOffered(f"routes cannot be replayed in this model: {self._why_not}")
        # rows that are not given are -1: there the model chooses
        rows = torch.full((len(ids), *routes.shape[1:]), -1)
        rows[: len(routes)] = routes[: len(ids)]
        with self._scores(len(ids)) as scores, self._replay.replay(rows[None], measure=True):
            logits = self._forward(ids)
        gaps = torch.full(rows.shape[:2], -torch.inf)
        for layer, of_layer in scores.items():
            gaps[:, layer] = _gaps(of_layer, rows[:, layer])
        return Followed(logits, gaps)

    @contextmanager
    def _scores(self, tokens: int) -> Iterator[dict[int, Tensor]]:
        """Collect, by layer, the scores ``[T, E]`` by which each router ranks the experts for every token."""
        assert self._replay is not None
        modules = dict(self.model.named_modules())
        sites = {site.layer: site for site in self._replay.sites}
        scores: dict[int, Tensor] = {}
        entered: list[int] = []

        def enter(layer: int) -> Callable[[nn.Module, object], None]:
            return lambda _module, _args: entered.append(layer)

        def note(ranked: Tensor, chosen: Tensor) -> None:
            layer = entered[-1] if entered else -1
            if layer not in sites or layer in scores:
                return
            # some routers call topk on groups of experts first: only the call over all experts ranks them
            experts, top_k = sites[layer].num_experts, sites[layer].top_k
            if (ranked.numel(), ranked.shape[-1], chosen.shape[-1]) == (tokens * experts, experts, top_k):
                scores[layer] = ranked.detach().reshape(tokens, experts).float().cpu()

        hooks = [modules[site.name].register_forward_pre_hook(enter(layer)) for layer, site in sites.items()]
        try:
            with TopKObserver(note):
                yield scores
        finally:
            for hook in hooks:
                hook.remove()

    def _forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids[None].to(self.model.device)).logits
        return logits[0].float().cpu()

    @torch.no_grad()
    def altered(self, seed: int, share: float = 0.1) -> Reference:
        """Return a reference over a copy of the model whose parameters are perturbed by a fraction of their spread."""
        model = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(seed)
        # relative to each parameter's spread: one absolute size would drown some and not touch others
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(share * parameter.float().std(correction=0).to(parameter) * noise)
        return Reference(model)

    def close(self) -> None:
        """Restore the model's state."""
        if self._owns and self._replay is not None:
            self._replay.remove()
        self.model.train(self._was_training)


def _replay_of(model: nn.Module) -> RouterReplay | None:
    """Return the existing ``RouterReplay`` of a model."""
    owner = handles.owner_of(model)
    return owner if isinstance(owner, RouterReplay) else None


def _gaps(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return ``[T]``, see :class:`Followed`, of scores ``[T, E]`` and the experts ``[T, K]``, -1 for none."""
    experts = scores.shape[-1]
    member = torch.zeros(len(scores), experts + 1, dtype=torch.bool)
    member.scatter_(1, chosen % (experts + 1), True)  # the last column is that of -1
    member = member[:, :experts]
    worst = scores.masked_fill(~member, torch.inf).amin(-1)
    best = scores.masked_fill(member, -torch.inf).amax(-1)
    return torch.where(member.any(-1), best - worst, -torch.inf)
