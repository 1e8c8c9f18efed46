"""Judges whether an answer is correct: by the model, which follows the engine's routes, and by the shape of routes.

Each router is judged given the engine's own routes of all earlier rows, so one wrong row does not make later rows
wrong, and a tie affects only its own row.

Letters: P prompt tokens, G generated tokens, T = P + G, V vocabulary, L decoder layers, K experts per token, E experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torchrl_moe.data import RoutingLayout
from torchrl_moe.errors import RoutingError, UnsupportedRouterError
from torchrl_moe.modules.replay import router_replay as handles
from torchrl_moe.modules.replay.interception import TopKObserver
from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.testing.conformance.adapter import Answer, NotOffered, Sampling, Values
from torchrl_moe.testing.conformance.report import DoesNotHold, RouteFaults, Settings


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
        self._why_not = ""
        # A model has at most one RouterReplay: a user's own is used, and stays.
        owner = handles.owner_of(model)
        self._replay = owner if isinstance(owner, RouterReplay) else None
        self._owns = self._replay is None
        if self._replay is None:
            try:
                self._replay = RouterReplay(model)
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
        if self._owns and self._replay is not None:
            self._replay.remove()
        self.model.train(self._was_training)


def _gaps(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return ``[T]``, see :class:`Followed`, of scores ``[T, E]`` and the experts ``[T, K]``, -1 for none."""
    experts = scores.shape[-1]
    member = torch.zeros(len(scores), experts + 1, dtype=torch.bool)
    member.scatter_(1, chosen % (experts + 1), True)  # the last column is that of -1
    member = member[:, :experts]
    worst = scores.masked_fill(~member, torch.inf).amin(-1)
    best = scores.masked_fill(member, -torch.inf).amax(-1)
    return torch.where(member.any(-1), best - worst, -torch.inf)


@dataclass(frozen=True, slots=True)
class Sampled:
    """An answer together with its prompt."""

    prompt: tuple[int, ...]
    sampling: Sampling
    answer: Answer

    @property
    def tokens(self) -> list[int]:
        return [int(token) for token in self.answer.token_ids]

    @property
    def ids(self) -> Tensor:
        """Prompt and answer, int64 ``[T]``."""
        return torch.tensor([*self.prompt, *self.tokens])

    def with_routes(self, routes: Values) -> Sampled:
        return replace(self, answer=replace(self.answer, routed_experts=routes))

    @property
    def log_probs(self) -> Tensor:
        """Log-probs of the answer's tokens, float32 ``[G]``."""
        return torch.tensor([float(value) for value in self._of_each_token("log-probs", self.answer.log_probs)])

    @property
    def versions(self) -> list[int]:
        return [int(value) for value in self._of_each_token("versions", self.answer.versions)]

    def scored(self, logits: Tensor) -> Tensor:
        """Log-probs ``[G]`` of the answer's tokens by a model's logits ``[T, V]``, sampled as they were."""
        return sampled_log_probs(logits, self.ids, len(self.prompt), self.sampling)

    def _of_each_token(self, name: str, values: Values | None) -> Values:
        if values is None:
            raise NotOffered(f"answers have no {name}")
        if len(values) != len(self.tokens):
            raise DoesNotHold(f"{len(values)} {name} for {len(self.tokens)} tokens")
        return values


def sampled_log_probs(logits: Tensor, ids: Tensor, prompt_tokens: int, sampling: Sampling) -> Tensor:
    """Return the log-probs float32 ``[G]`` of an answer's tokens under the distribution that each was sampled from.

    Penalties come first, then the temperature, then top-k, top-p and min-p, by transformers' own processors where it
    has them. A token that they exclude has -inf.

    >>> logits = torch.tensor([[0.0, 0.0, -9.0]]).expand(3, 3)
    >>> sampled_log_probs(logits, torch.tensor([2, 0, 1]), 1, Sampling(top_k=2)).exp()
    tensor([0.5000, 0.5000])
    """
    repeated = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(int(sampling.top_k)))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(float(sampling.top_p)))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(float(sampling.min_p)))
    found = []
    # One position at a time: penalties depend on the tokens before it.
    for place in range(prompt_tokens, len(ids)):
        seen = ids[None, :place]
        row = repeated(seen, logits[None, place - 1].clone())
        # the other penalties, which count the answer's tokens, come before the temperature, as in vLLM
        counts = torch.bincount(ids[prompt_tokens:place], minlength=row.shape[-1]).to(row)
        row = row - sampling.presence_penalty * (counts > 0) - sampling.frequency_penalty * counts
        for warper in warpers:
            row = warper(seen, row)
        found.append(row.log_softmax(-1)[0, ids[place]])
    return torch.stack(found) if found else logits.new_zeros(0)


@dataclass(frozen=True, slots=True)
class Judge:
    settings: Settings
    given_layout: RoutingLayout | None
    given_reference: Reference | None

    def by(self, reference: Reference) -> Judge:
        return replace(self, given_reference=reference)

    @property
    def layout(self) -> RoutingLayout:
        if self.given_layout is None:
            raise NotOffered("nothing says which layers have routers: pass model= or layout=, of a model that has some")
        return self.given_layout

    @property
    def reference(self) -> Reference:
        if self.given_reference is None:
            raise NotOffered("there is no model to compare with: pass model=")
        return self.given_reference

    def routes(self, sampled: Sampled) -> NDArray[np.int64]:
        """Return an answer's routes as delivered, int64 ``[R, L, K]``."""
        if sampled.answer.routed_experts is None:
            raise NotOffered("answers have no routed_experts")
        given = np.asarray(sampled.answer.routed_experts)
        wanted = (self.layout.num_layers, self.layout.top_k)
        if given.ndim != 3 or given.shape[1:] != wanted or given.dtype.kind not in "iu":
            raise DoesNotHold(
                f"routes are {given.dtype} {list(given.shape)}, not integers [tokens - 1, {wanted[0]}, {wanted[1]}]: "
                "all decoder layers count, also those without a router"
            )
        return given.astype(np.int64)

    def known(self, sampled: Sampled) -> NDArray[np.bool_]:
        """Return a mask of the first T - 1 tokens and the layers with a router: True where there is a route."""
        rows = self.routes(sampled)[: len(sampled.ids) - 1, list(self.layout.moe_layers)]
        known = np.zeros((len(sampled.ids) - 1, rows.shape[1]), bool)
        known[: len(rows)] = (rows >= 0).any(-1)
        return known

    def follow(self, sampled: Sampled, tokens: int | None = None) -> Followed:
        """Run the model over an answer, following the routes that came with it."""
        count = len(sampled.ids) if tokens is None else tokens
        # what stands on layers without a router is another check's finding
        rows = torch.from_numpy(self.routes(sampled))[: count - 1].clone()
        rows[:, list(self.layout.dense_layers)] = -1
        try:
            return self.reference.follow(sampled.ids[:count], rows)
        except RoutingError as error:
            raise DoesNotHold(str(error)) from error

    def faults(self, sampled: Sampled, tokens: int | None = None) -> RouteFaults:
        """Return how correct an answer's routes are; arguments as of :meth:`follow`."""
        count = len(sampled.ids) if tokens is None else tokens
        known = self.known(sampled)[: count - 1]
        missing = int((~known).sum())
        if self.given_reference is None:
            return RouteFaults(known.size, missing, None, first=_first(~known, self.layout.moe_layers))
        # A row is wrong if its worst expert scores less than the best one left out by more than a tie.
        gaps = self.follow(sampled, tokens).gaps[: count - 1, list(self.layout.moe_layers)].numpy()
        wrong = gaps > self.settings.tie
        ties = int(((gaps > 0) & ~wrong).sum())
        first = _first(wrong | ~known, self.layout.moe_layers)
        return RouteFaults(known.size, missing, int(wrong.sum()), ties, float(gaps.max(initial=0.0)), first)

    def parity(self, sampled: Sampled, since: int = 0, tokens: int | None = None) -> float:
        """Return max |log-prob, engine - model that follows the routes|."""
        count = len(sampled.ids) if tokens is None else tokens
        logits, prompt = self.follow(sampled, count).logits, len(sampled.prompt)
        own = sampled_log_probs(logits, sampled.ids[:count], prompt, sampled.sampling)
        return _largest((sampled.log_probs[: count - prompt] - own)[since:])

    def gap(self, sampled: Sampled) -> tuple[float, float]:
        """Return max |log-prob, engine - model|, and what it would be if the engine returned unprocessed log-probs.

        The model chooses its own routes. Only at a tie it follows the engine.
        """
        given, prompt = sampled.log_probs, len(sampled.prompt)
        logits = self.reference.logits(sampled.ids)
        processed = sampled.scored(logits)
        # Rounding may have decided a tie otherwise in the engine: its choice is then as right as the model's.
        if _largest(given - processed) > self.settings.tolerance and sampled.answer.routed_experts is not None:
            sided = self._sided(sampled)
            if sided is not None:
                logits, processed = sided, sampled.scored(sided)
        own = logits[prompt - 1 : -1].log_softmax(-1).gather(1, sampled.ids[prompt:, None])[:, 0]
        return _largest(given - processed), _largest(own - processed)

    def fitting(self, sampled: Sampled) -> int:
        """Return how many leading tokens of a plain answer have log-probs of these weights; ties as in :meth:`gap`."""
        count = self._fitting(self.reference.logits(sampled.ids), sampled)
        sided = None if count == len(sampled.tokens) else self._sided(sampled)
        return count if sided is None else max(count, self._fitting(sided, sampled))

    def _fitting(self, logits: Tensor, sampled: Sampled) -> int:
        other = ((sampled.scored(logits) - sampled.log_probs).abs() > self.settings.tolerance).nonzero()
        return int(other[0]) if len(other) else len(sampled.tokens)

    def _sided(self, sampled: Sampled) -> Tensor | None:
        """Return logits of the model that follows the engine only in tied rows; ``None`` if there are none."""
        try:
            gaps = self.follow(sampled).gaps
        except (DoesNotHold, NotOffered):  # another check reports faults of the routes
            return None
        tied = (gaps > 0) & (gaps <= self.settings.tie)
        if not tied.any():
            return None
        rows = torch.from_numpy(self.routes(sampled))[: len(gaps) - 1]
        return self.reference.follow(sampled.ids, rows.masked_fill(~tied[: len(rows), :, None], -1)).logits


def _largest(difference: Tensor) -> float:
    """Return the largest absolute value; infinite if one is NaN."""
    size = difference.abs()
    return float(torch.where(size.isnan(), torch.inf, size).max()) if len(size) else 0.0


def _first(faulty: NDArray[np.bool_], layers: Sequence[int]) -> str:
    """Return a text that says where the first fault is."""
    places = np.argwhere(faulty)
    if not len(places):
        return ""
    token, place = (int(value) for value in places[0])
    return f"; the first at token {token}, layer {layers[place]}"
