"""From router inputs and given experts to gating weights, family by family: the reference that replay is held to.

Written from the papers' formulas, in float64, with sums over a one-hot mask: nothing of transformers' routers is used
but weights and constants. Letters: N rows, E experts, K experts per row, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_moe.modules.replay.discovery import RouterSite

Formula = Callable[[Tensor, Tensor, nn.Module], Tensor]
LINEARS = ("", "gate", "wg", "proj", "router", "router.layer")
SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")


def pick(scores: Tensor, experts: Tensor) -> Tensor:
    """``[N, K]`` of ``[N, E]``."""
    mask = torch.nn.functional.one_hot(experts, scores.shape[-1]).to(scores.dtype)
    return torch.einsum("nke,ne->nk", mask, scores)


def share(scores: Tensor) -> Tensor:
    """Each row's sum is 1."""
    return scores / scores.sum(-1, keepdim=True)


def scaled(scores: Tensor, router: nn.Module) -> Tensor:
    """Times the router's own constant; where the block multiplies, it does so after the experts."""
    factors = [getattr(router, name) for name in SCALES if hasattr(router, name)]
    return scores * factors[0] if factors else scores


def softmax(logits: Tensor, experts: Tensor, router: nn.Module) -> Tensor:
    """olmoe, deepseek_v2: probabilities as they are; those outside the chosen groups count as well."""
    return scaled(pick(logits.exp() / logits.exp().sum(-1, keepdim=True), experts), router)


def softmax_normalised(logits: Tensor, experts: Tensor, router: nn.Module) -> Tensor:
    """qwen3_moe, mixtral: probabilities, normalised over the chosen. A bias (ernie4_5_moe) only chooses."""
    return scaled(share(pick(logits.exp(), experts)), router)


def softmax_of_chosen(logits: Tensor, experts: Tensor, _: nn.Module) -> Tensor:
    """gpt_oss, granitemoe: softmax over the logits of the chosen alone."""
    return share(pick(logits, experts).exp())


def sigmoid(logits: Tensor, experts: Tensor, _: nn.Module) -> Tensor:
    """kolibri1: sigmoids as they are; the bias is added to logits, and only chooses."""
    return pick(1 / (1 + (-logits).exp()), experts)


def sigmoid_normalised(logits: Tensor, experts: Tensor, router: nn.Module) -> Tensor:
    """deepseek_v3: the correction bias only chooses; the weights are of the bare sigmoid, normalised, then scaled."""
    return scaled(share(sigmoid(logits, experts, router)), router)


def sigmoid_eps(logits: Tensor, experts: Tensor, router: nn.Module) -> Tensor:
    """lfm2_moe: 1e-6 in the denominator."""
    scores = sigmoid(logits, experts, router)
    return scaled(scores / (scores.sum(-1, keepdim=True) + 1e-6), router)


def sigmoid_capped(logits: Tensor, experts: Tensor, router: nn.Module) -> Tensor:
    """laguna: logits softly within a cap."""
    cap = router.router_logit_softcapping
    return sigmoid_normalised((logits / cap).tanh() * cap, experts, router)


def sqrtsoftplus_normalised(logits: Tensor, experts: Tensor, router: nn.Module) -> Tensor:
    """deepseek_v4: the square root of softplus."""
    return scaled(share(pick((1 + logits.exp()).log().sqrt(), experts)), router)


def gemma(logits: Tensor, experts: Tensor, router: nn.Module) -> Tensor:
    """gemma4: probabilities, normalised over the chosen, times each expert's scale."""
    scales = pick(router.per_expert_scale.double().expand(len(experts), -1), experts)
    return softmax_normalised(logits, experts, router) * scales


def llama(logits: Tensor, experts: Tensor, router: nn.Module) -> Tensor:
    """llama4: sigmoids of the chosen, 0 for all others: ``[N, E]``."""
    mask = torch.nn.functional.one_hot(experts, logits.shape[-1]).sum(1)
    return mask * (1 / (1 + (-logits).exp()))


def inkling(logits: Tensor, experts: Tensor, router: nn.Module) -> Tensor:
    """inkling: sigmoids of the chosen and of the shared experts, normalised together: ``[N, K + shared]``."""
    scores = 1 / (1 + (-logits).exp())
    shared = scores[:, router.num_experts :]
    together = share(torch.cat([pick(scores[:, : router.num_experts], experts), shared], -1))
    return scaled(together, router) * router.global_scale.double()


FORMULAS: dict[str, Formula] = {f.__name__: f for f in (softmax, softmax_normalised, softmax_of_chosen, sigmoid)}
FORMULAS |= {f.__name__: f for f in (sigmoid_normalised, sigmoid_eps, sigmoid_capped, sqrtsoftplus_normalised)}
FORMULAS |= {f.__name__: f for f in (gemma, llama, inkling)}


def router_weight(router: nn.Module) -> nn.Parameter:
    """``[E, D]``."""
    names = {name for name, _ in router.named_parameters()}
    return router.get_parameter(next(n for n in (f"{path}.weight".lstrip(".") for path in LINEARS) if n in names))


def router_logits(router: nn.Module, hidden: Tensor) -> Tensor:
    """float64 ``[N, E]`` of ``[N, D]``."""
    x = hidden.double()
    if hasattr(router, "per_expert_scale"):  # gemma4 normalises its input, without a learned scale, and multiplies
        x = x / (x.square().mean(-1, keepdim=True) + router.eps).sqrt() * router.scale * x.shape[-1] ** -0.5
    logits = torch.einsum("nd,ed->ne", x, router_weight(router).double())
    bias = getattr(router, "bias", None)
    return logits if bias is None else logits + bias.double()


def _answer(out: tuple[Any, ...], gates: Tensor, experts: Tensor) -> tuple[Any, ...]:
    """A router's output with other gates and experts; the order is the family's own."""
    if len(out) == 2:  # llama4: scores, logits
        return gates.to(out[0].dtype), out[1]
    k = experts.shape[1]
    answer = [experts if not x.is_floating_point() else x for x in out]
    answer[1] = gates[:, :k].to(out[1].dtype)
    if len(out) == 4:  # inkling: the weights of its shared experts come last
        answer[3] = gates[:, k:].to(out[3].dtype)
    return tuple(answer)


@contextmanager
def reference_routing(model: nn.Module, sites: Sequence[RouterSite], formula: str, routes: Tensor) -> Iterator[None]:
    """Every router answers with the formula's weights of ``routes [B, T, L, K]``, whatever it computed itself."""
    gates = FORMULAS[formula]

    def chosen_by(router: nn.Module, experts: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
        def answer(*args: Tensor) -> tuple[Tensor, Tensor]:
            weights = gates(args[-1].double(), experts, router).to(args[-1].dtype)
            # dbrx takes logits and returns weights first; jamba, until 5.20, takes inputs too and returns ids first
            return (weights, experts) if len(args) == 1 else (experts, weights)

        return answer

    def hook(experts: Tensor) -> Callable[..., tuple[Any, ...]]:
        def answer(router: nn.Module, args: tuple[Tensor, ...], out: tuple[Any, ...]) -> tuple[Any, ...]:
            logits = router_logits(router, args[0].flatten(0, -2))
            return _answer(out, gates(logits, experts, router), experts)

        return answer

    with ExitStack() as stack:
        for site in sites:
            router = model.get_submodule(site.name)
            experts = routes[:, :, site.layer, : site.top_k].flatten(0, 1)
            if hasattr(router, "route_tokens_to_experts"):  # the block chooses
                router.route_tokens_to_experts = chosen_by(router, experts)
                stack.callback(delattr, router, "route_tokens_to_experts")
            else:
                stack.callback(router.register_forward_hook(hook(experts)).remove)
        yield
