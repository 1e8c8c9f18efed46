"""Finding the routers of a model by running it once: a router is the module whose own code ranks the experts.

There is no table of families: the modules of a small forward pass are observed, and every ``topk`` is attributed to the
innermost running module. Routers of new architectures and of remote code are found in the same way, or refused by
name.

Letters: N rows of a batch, E experts, K experts per row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules.replay.interception import OWN_CODE, ScoreTracer, TopKObserver, describe_scoring

# Properties of a model that several ranks share: the device it computes on, and whether replay supports it.
#
# Sharded parameters are DTensors, whose mesh names the device and, if it was given names, the axes.


REFUSED_AXES = {
    "cp": "context parallelism: a rank sees a part of each sequence, and routes are laid out as the whole",
    "sp": "sequence parallelism: a rank sees a part of each sequence, and routes are laid out as the whole",
    "pp": "pipeline parallelism: a rank has a part of the layers, and runs no whole forward pass",
    "etp": "expert-tensor parallelism: the experts of an expert-parallel rank are cut over ranks once more",
}
"""Names of mesh axes, as torchtitan, accelerate and transformers have them."""


def computing_device(model: nn.Module) -> torch.device:
    """Return the device on which a model runs.

    That of its parameters; of sharded ones, the mesh's: under ``CPUOffloadPolicy`` FSDP2 keeps parameters in host
    memory, and brings them to the device when they are needed.
    """
    first = next(model.parameters())
    kind = getattr(getattr(first, "device_mesh", None), "device_type", first.device.type)
    return first.device if kind == first.device.type else torch.device(kind)


def refused_parallelism(model: nn.Module) -> str:
    """Return the kind of parallelism that replay does not support in a model, and why; empty if there is none."""
    axes = [("pp", getattr(_distributed_config(model), "pp_size", 1))]
    for parameter in model.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            axes += zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)
    return next((REFUSED_AXES[name] for name, size in axes if name in REFUSED_AXES and size > 1), "")


def summed_again(model: nn.Module) -> str:
    """Return the name of a parameter whose gradient the next backward pass would corrupt; empty if there is none.

    Under tensor parallelism transformers sums the gradients of norms over ranks after each backward pass, including
    what earlier passes accumulated (5.23, style ``replicated_with_grad_allreduce``), unless FSDP also shards them.
    """
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, dict) or getattr(_distributed_config(model), "tp_size", 1) == 1:
        return ""
    for name, parameter in model.named_parameters():
        module = re.sub(r"\.\d+\.", ".*.", name.rpartition(".")[0])
        grad = parameter.grad if plan.get(module) == "replicated_with_grad_allreduce" else None
        if grad is not None and not hasattr(parameter, "device_mesh") and bool(grad.any()):
            return name
    return ""


def _distributed_config(model: nn.Module) -> Any:
    return getattr(getattr(model, "config", None), "distributed_config", None)


LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NESTED = ("text_config", "ffn_config", "llm_config")
DRY_TOKENS = 7
# Routers whose choice is more than a set of experts, or cannot be seen: the reason is the message.
REFUSED = {
    "PhimoeTopKRouter": "sparsemixer: two ordered slots, whose weights depend on the order, which engines do not keep",
    "LongcatFlashTopkRouter": "zero-computation experts: engines report them as expert 0",
    "ZayaRouter": "it may choose to skip, which no expert id expresses",
    "DogeCDMoE": "product keys: its topk ranks places in a table, not experts",
}
# Routers that choose nothing, because the token determines the experts. Their layers have experts, but no routes.
FIXED = {"DeepseekV4HashRouter"}


@dataclass(frozen=True, slots=True)
class RouterSite:
    """One router: its decoder layer, its module's name, E, K, the rank of its scores, and how it makes them."""

    layer: int
    name: str
    num_experts: int
    top_k: int
    rank: int
    scoring: str = OWN_CODE

    @property
    def layer_name(self) -> str:
        """The name of the decoder layer's module."""
        match = LAYER.search(f"{self.name}.")
        assert match is not None
        return self.name[: match.end(1)]

    def trains(self, model: nn.Module) -> bool:
        """Whether the router's logits depend on a trained parameter: of a layer before it, or of its own up to it."""
        block, stack = self.name.rpartition(".")[0], self.layer_name.rpartition(".")[0]
        for name, parameter in model.named_parameters():
            path = f".{name}"  # peft puts names of its own before these
            layer = re.search(rf"\.{re.escape(stack)}\.(\d+)\.", path)
            if not parameter.requires_grad or layer is None or int(layer[1]) > self.layer:
                continue
            if int(layer[1]) < self.layer or f".{self.name}." in path or f".{block}." not in path:
                return True
        return False


def expert_counts(config: object) -> set[int]:
    """Return every number of experts that a config names."""
    found: set[int] = set()
    for part in [config, *(getattr(config, name, None) for name in NESTED)]:
        for name in EXPERT_COUNTS:
            value = getattr(part, name, None)
            values = value if isinstance(value, list | tuple) else [value]
            found |= {count for count in values if isinstance(count, int) and count > 1}
    return found


def has_experts(model: nn.Module) -> bool:
    """Whether a model's config names a number of experts; no forward pass is run."""
    return bool(expert_counts(getattr(model, "config", None)))


def number_of_layers(model: nn.Module) -> int:
    """Return L, the number of decoder layers, dense ones included."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    return int(text.num_hidden_layers)  # type: ignore[union-attr]


def dry_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Return the inputs of a small forward pass, on the device on which the model runs."""
    device = computing_device(model)
    counts = expert_counts(getattr(model, "config", None))
    # a length that is no number of experts, so that scores over tokens are not mistaken for scores over experts
    length = next(length for length in range(DRY_TOKENS, DRY_TOKENS + len(counts) + 1) if length not in counts)
    ids = torch.arange(1, length + 1, device=device).unsqueeze(0)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextmanager
def _running(model: nn.Module, stack: list[str]) -> Iterator[Counter[str]]:
    """Track the names of the running modules, innermost last, and count how often each of them runs."""
    runs: Counter[str] = Counter()

    def begin(name: str, *_: object) -> None:
        stack.append(name)
        runs[name] += 1

    def end(*_: object) -> None:
        stack.pop()

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(begin, name)))
        handles.append(module.register_forward_hook(end, always_call=True))
    try:
        yield runs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def arriving(model: nn.Module) -> Iterator[dict[int, list[Tensor]]]:
    """Collect the tensors that each layer's experts are called with."""
    arrived: dict[int, list[Tensor]] = {}

    def keep(layer: int, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        values = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        arrived.setdefault(layer, []).extend(x.clone() for x in values)

    with ExitStack() as stack:
        for layer, _, module in _experts(model):
            hook = module.register_forward_pre_hook(partial(keep, layer), with_kwargs=True)
            stack.callback(hook.remove)
        yield arrived


def _experts(model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Layer, name and module of everything called ``experts``."""
    for name, module in model.named_modules():
        match = LAYER.search(name)
        if match is not None and name.rpartition(".")[2] == "experts":
            yield int(match[1]), name, module


@dataclass(frozen=True, slots=True)
class _Ranking:
    """One ``topk`` over as many scores as there are experts: where, of what, and what it chose ``[N, K]``."""

    name: str
    num_experts: int
    rank: int
    steps: tuple[str, ...]
    chosen: Tensor


def discover(model: nn.Module) -> list[RouterSite]:
    """Return the routers of a model, by layer; runs one small forward pass without gradients."""
    # a model that is known not to support replay is refused before it runs
    counts, kind = expert_counts(getattr(model, "config", None)), type(model).__name__
    if not counts:
        raise UnsupportedRouterError(
            f"{kind} has no experts by its config ({', '.join(EXPERT_COUNTS)}): it is a dense model, and there is "
            "nothing to replay: set loss.replay=none in a trainer, replay='none' in a wrapper"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedRouterError(
            f"{kind} is an encoder-decoder: its layers see rows of two sequences, and routes are of one"
        )
    fixed = set()
    for name, module in model.named_modules():
        reason, match = REFUSED.get(type(module).__name__), LAYER.search(name)
        if reason is not None:
            raise UnsupportedRouterError(f"{name} ({type(module).__name__}) cannot be replayed: {reason}")
        if type(module).__name__ in FIXED and match is not None:
            fixed.add(int(match[1]))
    inputs = dry_inputs(model)
    running: list[str] = []
    rankings: list[_Ranking] = []
    tracer = ScoreTracer(counts, running)

    def note(x: Tensor, chosen: Tensor) -> None:
        if running and x.shape[-1] in counts and x.numel() // x.shape[-1] == inputs["input_ids"].numel():
            rankings.append(_Ranking(running[-1], x.shape[-1], x.ndim, tracer.steps(x), chosen.flatten(0, -2)))

    with (
        torch.no_grad(),
        _running(model, running) as runs,
        arriving(model) as arrived,
        tracer,
        TopKObserver(note),
    ):
        model(**inputs)
    routers: dict[int, _Ranking] = {}
    for ranking in rankings:
        match = LAYER.search(f"{ranking.name}.")
        if match is None:
            continue
        layer = int(match[1])
        if layer in routers and routers[layer].name != ranking.name:
            raise UnsupportedRouterError(
                f"layer {layer} has two modules that rank {ranking.num_experts} experts: {routers[layer].name} and "
                f"{ranking.name}"
            )
        routers[layer] = ranking  # the last one: groups are ranked before
    # every layer that has experts must have shown a router
    for layer, name, module in _experts(model):
        if layer not in routers and layer not in fixed:
            raise UnsupportedRouterError(
                f"{name} ({type(module).__name__}) has experts, but nothing in layer {layer} ranks them with topk: "
                "its router cannot be replayed"
            )
    if not routers:
        raise UnsupportedRouterError(f"{kind}: no module ranks experts with topk in a forward pass")
    sites = []
    for layer, router in sorted(routers.items()):
        module, count = model.get_submodule(router.name), runs[router.name]
        where = f"{router.name} ({type(module).__name__})"
        if count > 1:
            raise UnsupportedRouterError(
                f"{where} cannot be replayed: a forward pass runs layer {layer} {count} times, and routes have one row "
                "per token and layer"
            )
        # what topk chose must be what reaches the experts, if ids are visible at all
        ids = _ids(arrived.get(layer, ()), router.chosen)
        if ids and not _rewritten(module) and not any(torch.equal(x, router.chosen) for x in ids):
            raise UnsupportedRouterError(
                f"{where}: other ids reach the experts of layer {layer} than its topk chose, so routes cannot be put "
                "in the place of that choice"
            )
        scoring = describe_scoring(router.steps, tracer.weights.get(router.name, ()))
        sites.append(RouterSite(layer, router.name, router.num_experts, router.chosen.shape[1], router.rank, scoring))
    return sites


def _ids(arrived: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Return the tensors that may be ids ``[N, K]``; none if the experts are not called with ids."""
    same = [x for x in arrived if x.dtype == torch.long and x.numel() == like.numel()]
    return [x.reshape(like.shape).to(like.device) for x in same]


def _rewritten(router: nn.Module) -> bool:
    """Whether a hook changes what a router returns, as expert parallelism does: to a rank's own ids."""
    return bool(router._forward_hooks)


def check_replayed(
    model: nn.Module, sites: Sequence[RouterSite], arrived: dict[int, list[Tensor]], routes: Tensor
) -> None:
    """Check, if it is visible, that the replayed ids reached the experts in a replay, in any order.

    Each must have a nonzero, finite weight: a router that masks experts in an unknown way gives 0 or NaN to a replayed
    expert that it would not have chosen.
    """
    for site in sites:
        module = model.get_submodule(site.name)
        given = routes[:, site.layer, : site.top_k].long()
        tensors = arrived.get(site.layer, [])
        ids = _ids(tensors, given)
        if not ids or _rewritten(module):
            continue
        where = f"{site.name} ({type(module).__name__}), layer {site.layer}"
        if not any(torch.equal(x.sort(-1).values, given.sort(-1).values) for x in ids):
            raise UnsupportedRouterError(f"{where}: under a replay, other ids reach its experts than were given")
        for weights in tensors:
            beside = weights.is_floating_point() and weights.numel() == given.numel()
            if beside and not bool((weights.isfinite() & (weights != 0)).all()):
                raise UnsupportedRouterError(
                    f"{where}: under a replay, experts get a weight that is 0 or not finite if the router would not "
                    "have chosen them. It masks scores, by groups or by a threshold, in a way that cannot be opened."
                )


# Freezing routers: training continues with fixed router weights.


def freeze_routers(model: nn.Module) -> list[str]:
    """Set ``requires_grad=False`` on the parameters of every router; return their names.

    A frozen router still chooses other experts when its hidden states change. Call this before the optimizer is made;
    ``parameter.requires_grad_(True)`` undoes it. Runs a small forward pass to find the routers. Where a family ranks
    experts in the block that holds them, experts and shared experts stay trainable.

    Args:
        model: a transformers MoE for causal language modelling, with a ``RouterReplay`` or without.

    Raises:
        UnsupportedRouterError: no router was found, or the family cannot be replayed.

    >>> from torchrl_moe.testing import make_tiny_moe
    >>> freeze_routers(make_tiny_moe("mixtral", num_hidden_layers=2))
    ['model.layers.0.mlp.gate.weight', 'model.layers.1.mlp.gate.weight']
    """
    modules = dict(model.named_modules())
    frozen = []
    for site in discover(model):
        for name, parameter in modules[site.name].named_parameters():
            if "expert" not in name:
                parameter.requires_grad_(False)
                frozen.append(f"{site.name}.{name}")
    return frozen
