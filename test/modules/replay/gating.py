"""From router logits and given experts to gating weights, family by family: the reference that replay is held to.

Written from the papers' formulas, with sums over a one-hot mask: nothing of transformers' routers is used but weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Formula = Callable[[Tensor, Tensor, nn.Module], Tensor]


def pick(scores: Tensor, experts: Tensor) -> Tensor:
    """``[N, K]`` of ``[N, E]``."""
    mask = torch.nn.functional.one_hot(experts, scores.shape[-1]).to(scores.dtype)
    return torch.einsum("nke,ne->nk", mask, scores)


def softmax(logits: Tensor, experts: Tensor, _router: nn.Module) -> Tensor:
    """olmoe: probabilities as they are."""
    return pick(logits.float().softmax(-1), experts)


def softmax_normalised(logits: Tensor, experts: Tensor, _router: nn.Module) -> Tensor:
    """qwen3_moe, mixtral: probabilities, normalised over the chosen."""
    scores = pick(logits.float().softmax(-1), experts)
    return scores / scores.sum(-1, keepdim=True)


def sigmoid_normalised(logits: Tensor, experts: Tensor, router: nn.Module) -> Tensor:
    """deepseek_v3: the correction bias only chooses; the weights are of the bare sigmoid, normalised, then scaled."""
    scores = pick(logits.float().sigmoid(), experts)
    return scores / scores.sum(-1, keepdim=True) * router.routed_scaling_factor


FORMULAS: dict[str, Formula] = {
    "qwen3_moe": softmax_normalised,
    "mixtral": softmax_normalised,
    "olmoe": softmax,
    "deepseek_v3": sigmoid_normalised,
}


@contextmanager
def reference_routing(model: nn.Module, routes: Tensor) -> Iterator[None]:
    """Every ``mlp.gate`` answers with the formula's weights of ``routes [B, T, L, K]``, whatever it computed."""
    formula = FORMULAS[model.config.model_type]

    def replace(router: nn.Module, experts: Tensor) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        def hook(_: nn.Module, args: tuple[Tensor], _out: object) -> tuple[Tensor, Tensor, Tensor]:
            hidden = args[0].flatten(0, -2)
            logits = hidden @ router.weight.T
            return logits, formula(logits, experts, router).to(hidden.dtype), experts

        return hook

    hooks = []
    for name, router in model.named_modules():
        if name.endswith(".mlp.gate"):
            experts = routes[:, :, int(name.split(".")[2])].flatten(0, 1)
            hooks.append(router.register_forward_hook(replace(router, experts)))
    yield
    for hook in hooks:
        hook.remove()
