"""What a request may ask of an engine besides answers: to follow recorded experts, and to score its prompt.

Letters: P prompt tokens, G tokens so far, N tokens of a step, L decoder layers, K experts per token, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from torchrl_moe import _checks
from torchrl_moe.data import UNSET_EXPERT, RoutingLayout
from torchrl_moe.errors import RouteShapeError, RouteValueError
from torchrl_moe.modules.backends.replica import CompletionOutput, OnResume, Request, Scoring


class RequestRoutes:
    """Decides whether requests to one engine may, and checks their rows."""

    def __init__(
        self,
        layout: RoutingLayout | None,
        forced_routing_unavailable_reason: str = "",
        why_unscored: str = "",
        vocabulary: int | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._layout = layout
        self.forced_routing_unavailable_reason = forced_routing_unavailable_reason
        self._why_unscored = why_unscored

    def checked(self, request: Request) -> Request:
        """Return a request with its rows in the engine's dtype."""
        # what needs no rows comes first: scores, and how a resumed answer is read again
        if request.scoring is not None and self._why_unscored:
            raise ValueError(f"this engine cannot score: {self._why_unscored}")
        kept = None if request.scoring is None else request.scoring.kept
        if kept is not None and self._vocabulary is not None:
            wrong = kept.ids[(kept.ids < 0) | (kept.ids >= self._vocabulary)]
            if len(wrong):
                raise ValueError(f"kept names token id {wrong[0]}; this engine has 0..{self._vocabulary - 1}")
        if request.on_resume == "forced" and self.forced_routing_unavailable_reason:
            raise ValueError(
                "on_resume='forced', but this engine cannot follow recorded experts: "
                f"{self.forced_routing_unavailable_reason}"
            )
        if request.on_resume == "forced" and not request.return_routed_experts:
            raise ValueError("on_resume='forced' needs return_routed_experts=True: else there is nothing to follow")
        # then the rows themselves, against the model's layers
        rows, ids = request.routed_experts, request.prompt_token_ids
        if rows is None:
            return request
        if self.forced_routing_unavailable_reason or self._layout is None:
            raise ValueError(
                f"routed_experts: this engine cannot follow recorded experts: {self.forced_routing_unavailable_reason}"
            )
        if ids is None:
            raise ValueError("routed_experts has a row per token: pass token ids in place of text")
        return replace(request, routed_experts=check_rows(rows, len(ids), self._layout))

    def of_part(self, request: Request, first: CompletionOutput | None) -> NDArray[np.integer] | None:
        """Return the rows that the rest of an answer follows; ``None`` if the model routes.

        They are ``[P + G - 1, L, K]``; fewer if its last tokens were only streamed when its replica died.
        """
        if first is None or first.routed_experts is None or self._layout is None or self._is_live(request):
            return None
        return rows_of_answer(first.routed_experts, self._layout)

    def how_read(self, request: Request, prompt_tokens: int, first: CompletionOutput | None) -> OnResume:
        """Return how all tokens of an answer's first part are read again."""
        rows = self.of_part(request, first)
        if rows is None or first is None or len(rows) < prompt_tokens + len(first.token_ids) - 1:
            return "live"
        return "forced"

    def how(self, request: Request) -> OnResume:
        """Return how tokens of a request are read again by the engine itself."""
        return "live" if self._is_live(request) else "forced"

    def _is_live(self, request: Request) -> bool:
        return bool(self.forced_routing_unavailable_reason) or request.on_resume == "live"


def rows_of_answer(rows: NDArray[np.generic], layout: RoutingLayout) -> NDArray[np.integer]:
    """Return what an engine recorded ``[rows, L, K]`` as rows to follow: layers without a router are -1."""
    followed = rows.astype(layout.numpy_dtype)
    if layout.dense_layers:
        followed[:, layout.dense_layers] = UNSET_EXPERT
    return followed


def check_rows(rows: NDArray[np.generic], prompt_tokens: int, layout: RoutingLayout) -> NDArray[np.integer]:
    """Return rows to follow in the layout's dtype, checked."""
    name = "routed_experts"
    _checks.check_integer(
        name, rows, signed=True, error=RouteValueError, hint="For what an engine returned, RoutedExperts.from_vllm."
    )
    tail = (layout.num_layers, layout.top_k)
    _checks.check_shape(name, rows.shape, ("rows", *tail), error=RouteShapeError, hint="L counts dense layers, too.")
    if len(rows) > prompt_tokens:
        raise RouteShapeError(f"{name} must have at most a row per prompt token, {prompt_tokens}, got {len(rows)}.")
    given = torch.from_numpy(np.array(rows))  # a copy: it may be read-only
    _checks.check_routes(given, layout.moe_layers, layout.num_experts, where="token {}".format)
    return rows.astype(layout.numpy_dtype)


def drawn_from(logits: torch.Tensor, scoring: Scoring, start: int) -> torch.Tensor:
    """Return the logits ``[N, V]`` from which a prompt's tokens ``start + 1`` to ``start + N`` were drawn."""
    logits = logits.float() / scoring.temperature
    if scoring.kept is None:
        return logits
    from torchrl_moe.data.kept_tokens import dense_mask  # with tensordict, which a request without does not need

    kept = scoring.kept.after(start + 1).first(len(logits))
    mask = dense_mask(torch.from_numpy(kept.ids.copy()), torch.from_numpy(kept.sizes.copy()), logits.shape[1])
    return logits.masked_fill(~mask.to(logits.device), float("-inf"))
