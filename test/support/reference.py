"""What a stock transformers model makes of a sequence: its log-probs, and the experts that its own routers chose.

The reference of the parity tests; it uses nothing of torchrl_moe.

Once in a million rows or so the last expert chosen and the first left out score the same to the last bits, and another
order of addition may choose the other one: the sequence goes another way from there, and nobody is wrong. So a
test gives the engine's routes too, and at such a tie, and only there, the reference sides with the engine. Ties between
groups of experts are not looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5
"""Of log-probs in float32."""

TIE = 5e-6
"""Twice what float32 adds up to in these models' router logits."""


@dataclass(frozen=True, slots=True)
class Router:
    """How a family's router chooses and weighs."""

    scores: Callable[[Any, Tensor], Tensor] = lambda _router, logits: logits
    """Of router and logits ``[T, E]``, the scores by which it chooses."""
    weights: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    """Of experts ``[T, K]``; ``None`` where experts that score alike have the same."""


def _biased(router: Any, logits: Tensor) -> Tensor:
    return logits.sigmoid() + router.e_score_correction_bias


def _unbiased_weights(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.sigmoid().gather(1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor


def _softmax_weights(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.float().softmax(-1).gather(1, experts)
    is_mixtral = not hasattr(router, "norm_topk_prob")  # which always normalises
    return weights / weights.sum(-1, keepdim=True) if is_mixtral or router.norm_topk_prob else weights


ROUTERS = {name: Router(weights=_softmax_weights) for name in ("qwen3_moe", "mixtral", "olmoe")}
ROUTERS["deepseek_v3"] = Router(_biased, _unbiased_weights)


class Reference:
    """A saved model, run teacher-forced on one sequence at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._router = ROUTERS[self.model.config.model_type]
        self._seen: dict[int, Tensor] = {}
        self._theirs: Tensor | None = None
        self._followed: Tensor | None = None
        self._ties: list[tuple[int, int, Tensor]] | None = None
        for layer, block in enumerate(self.model.model.layers):
            router = getattr(block.mlp, "gate", None)
            if "Router" in type(router).__name__:  # a dense layer's gate is a projection
                router.register_forward_hook(self._keep(layer))
        self.num_layers = self.model.config.num_hidden_layers

    def _keep(self, layer: int) -> Callable[..., Any]:
        def hook(router: nn.Module, _arguments: object, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
            logits, weights, experts = out
            if self._theirs is not None:
                own = experts
                experts = side_at_ties(own, self._router.scores(router, logits), self._theirs[:, layer])
                if self._followed is not None:
                    rows = self._followed.nonzero()[:, 0]
                    experts[rows] = self._theirs[rows, layer]
                sided = (experts != own).any(-1, keepdim=True)
                if self._router.weights is not None and sided.any():
                    weights = torch.where(sided, self._router.weights(router, logits, experts), weights)
            if self._ties is not None:
                others = runner_ups(experts, self._router.scores(router, logits))
                self._ties += [(row, layer, chosen) for row, chosen in others.items()]
            self._seen[layer] = experts
            return logits, weights, experts

        return hook

    @torch.no_grad()
    def __call__(
        self,
        ids: Tensor | Sequence[int],
        temperature: float = 1.0,
        routes: Any = None,
        followed: Tensor | None = None,
        words: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return log-probs ``[T]``, those of token t given the tokens before it (NaN for the first), and routes.

        Routes are ``[T, K]`` by layer; dense layers are absent. ``routes [R, L, K]``, R <= T, are an engine's, to side
        with at ties; -1 where it has none. In the rows of ``followed [R]`` the model takes them, whatever it would
        choose. ``words [T, V]``: which words each token is one of; by default all.
        """
        row = torch.as_tensor(ids).view(1, -1)
        self._seen.clear()
        self._theirs = None if routes is None else torch.from_numpy(np.asarray(routes).astype(np.int64))
        self._followed = followed
        try:
            logits = self.model(row).logits[0].float() / temperature
        finally:
            self._theirs = self._followed = None  # others run the model too
        if words is not None:
            logits[:-1] = logits[:-1].masked_fill(~words[1:], float("-inf"))
        log_probs = logits.log_softmax(-1)[:-1].gather(1, row[0, 1:, None])[:, 0]
        return torch.cat([log_probs.new_full((1,), float("nan")), log_probs]), dict(self._seen)

    def ties(self, ids: Tensor, routes: Tensor) -> list[tuple[int, int, Tensor]]:
        """Return where two experts score the same for the last place: row, layer, and the choice with the other one."""
        self._ties = []
        try:
            self(ids, routes=routes)
            return self._ties
        finally:
            self._ties = None

    def expected(self, completion: Any, output: Any, since: int | None = None) -> tuple[Tensor, dict[int, Tensor]]:
        """Return log-probs of one of an engine's answers, and routes of the whole.

        Tokens of versions before ``since`` are read by the experts that the engine recorded for them.
        """
        ids = np.concatenate([completion.prompt_token_ids, output.token_ids])
        made_by = torch.from_numpy(output.policy_versions.astype(np.int64))
        row_by = torch.cat([made_by[:1].expand(len(completion.prompt_token_ids) - 1), made_by])
        followed = None if since is None else row_by < since
        log_probs, routes = self(torch.from_numpy(ids), routes=output.routed_experts, followed=followed)
        return log_probs[len(completion.prompt_token_ids) :], routes

    def distance(self, *completions: Any) -> float:
        """Return the largest difference between the log-probs that an engine gave and those of the model as it is."""
        return max(
            float((torch.from_numpy(output.logprobs.copy()) - self.expected(completion, output)[0]).abs().max())
            for completion in completions
            for output in completion.outputs
        )

    @torch.no_grad()
    def change(self, seed: int, only: str = "", scale: float = 0.1) -> None:
        """Move every weight with a certain name, buffers too, by a share of their spread."""
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.model.state_dict().items():
            if only in name:
                tensor.add_(scale * tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator))


def side_at_ties(ours: Tensor, scores: Tensor, theirs: Tensor) -> Tensor:
    """Return chosen experts ``[T, K]``, with theirs in place of ours where one differs and scores the same.

    ``scores [T, E]`` are those by which ours were chosen; theirs are ``[R, K]``, R <= T, in any order, -1 for none.
    """
    rows = len(theirs)
    members = [
        torch.zeros(rows, scores.shape[-1] + 1, dtype=torch.bool).scatter(1, chosen % (scores.shape[-1] + 1), True)
        for chosen in (ours[:rows], theirs)
    ]  # the last column is that of -1
    lost, won = members[0] & ~members[1], members[1] & ~members[0]
    out, to = lost.int().argmax(-1, keepdim=True), won.int().argmax(-1, keepdim=True)
    padded = torch.cat([scores[:rows].float(), torch.full((rows, 1), torch.inf)], -1)
    near = (padded.gather(1, out) - padded.gather(1, to)).abs() <= TIE
    tied = near & (lost.sum(-1, keepdim=True) == 1) & (won.sum(-1, keepdim=True) == 1)
    sided = torch.where(tied & (ours[:rows] == out), to, ours[:rows])
    return torch.cat([sided, ours[rows:]])


def runner_ups(chosen: Tensor, scores: Tensor) -> dict[int, Tensor]:
    """Return, for rows in which an expert ties with one that was not chosen, the choice with that: row -> ``[K]``."""
    scores = scores.float()
    gaps = (scores.gather(1, chosen)[:, :, None] - scores[:, None, :]).abs()
    gaps.scatter_(2, chosen[:, None, :].expand(-1, chosen.shape[1], -1), torch.inf)
    found = {}
    for row, place, other in (gaps <= TIE).nonzero().tolist():
        found[row] = chosen[row].clone()
        found[row][place] = other
    return found


def route_mismatches(routes: Tensor, reference: dict[int, Tensor], rows: slice = slice(None)) -> tuple[int, int]:
    """Count rows ``[T, L, K]`` that name other experts than the reference, as sets, and the rows compared.

    A row that is unset is a mismatch; only rows of layers that have a router are compared.
    """
    wrong = total = 0
    for layer, expected in reference.items():
        got = routes[: len(expected), layer].long().sort(-1).values[rows]
        wrong += int((got != expected.sort(-1).values[rows]).any(-1).sum())
        total += len(got)
    return wrong, total
