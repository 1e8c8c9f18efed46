"""The loss, the advantages and the reference that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from inspect import signature
from typing import Any, TypeGuard

from tensordict import TensorDictBase

from torchrl_moe import objectives
from torchrl_moe.modules.policies.adapters import has_adapters
from torchrl_moe.modules.policies.transformers_wrapper import TransformersWrapper
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper
from torchrl_moe.modules.serving.async_vllm import AsyncVLLM
from torchrl_moe.objectives.grpo import GRPOLoss
from torchrl_moe.trainers.config import ConfigError, GRPOConfig
from torchrl_moe.trainers.placement import Placement
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.rollout_scores import REFERENCE_KEY

__all__ = ["Reference", "advantages", "build_loss", "build_reference"]

Reference = Callable[[TensorDictBase], TensorDictBase]


def build_loss(actor: TransformersWrapper, config: GRPOConfig) -> GRPOLoss:
    """Return the loss of a run.

    Raises:
        ConfigError: there is no such loss, or it does not accept an argument.
    """
    name = config.loss.name
    kind = getattr(objectives, name, None)
    if not _is_loss(kind):
        known = [key for key in dir(objectives) if _is_loss(getattr(objectives, key))]
        raise ConfigError(f"loss.name={name} must be one of {', '.join(known)}")
    setting, where = "loss.arguments", _where(config, actor.model)
    try:
        arguments = _arguments(config.loss.arguments)
        if _needs_reference(arguments) and where == "adapter":
            arguments["reference"] = "adapter"
        if config.loss.router:
            setting = "loss.router"
            arguments["router_loss"] = objectives.MoERouterLoss(actor, **_router_arguments(actor, config))
            setting = "loss.arguments"
        known = list(signature(kind).parameters.keys() | signature(GRPOLoss).parameters.keys())
        for name in arguments:
            if name not in known:
                near = get_close_matches(name, known, 1, 0.4)
                raise TypeError(
                    f"{kind.__name__} has no argument {name}" + (f": did you mean {near[0]}?" if near else "")
                )
        return kind(actor, **{"entropy_bonus": False, **arguments})
    except (TypeError, ValueError) as error:
        raise ConfigError.of(setting, error) from error


def _is_loss(kind: Any) -> TypeGuard[type[GRPOLoss]]:
    return isinstance(kind, type) and issubclass(kind, GRPOLoss)


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments as Python objects: YAML has neither tuples nor dataclasses."""
    found = dict(given)
    clip, thresholds = found.get("clip_epsilon"), found.get("thresholds")
    if isinstance(clip, list):
        found["clip_epsilon"] = tuple(clip)
    if isinstance(thresholds, dict):
        found["thresholds"] = objectives.Thresholds(**thresholds)
    return found


def _router_arguments(actor: TransformersWrapper, config: GRPOConfig) -> dict[str, Any]:
    text_config = actor.model.config.get_text_config()  # type: ignore[union-attr, operator]
    top_k = getattr(text_config, "num_experts_per_tok", None) or getattr(text_config, "moe_topk", None)
    return {**({} if top_k is None else {"top_k": top_k}), **config.loss.router}


def _needs_reference(arguments: dict[str, Any]) -> bool:
    return bool(arguments.get("kl_to_ref_coeff")) or arguments.get("kl_mask_threshold") is not None


def _where(config: GRPOConfig, model: Any) -> str:
    """Return which kind of reference to use.

    Raises:
        ConfigError: the adapter is asked for, and the model has none.
    """
    where, adapted = config.loss.reference, has_adapters(model)
    if where == "adapter" and not adapted:
        raise ConfigError("loss.reference=adapter needs an adapter to switch off: set model.lora.rank")
    return ("adapter" if adapted else "model") if where == "auto" else where


def build_reference(
    actor: TransformersWrapper, policy_model: PolicyModel, config: GRPOConfig, placement: Placement | None = None
) -> tuple[Reference | None, Callable[[], None]]:
    """Return what writes the reference's log-probs, if the loss reads any, and a function that shuts it down.

    Raises:
        ConfigError: an engine as reference of a model that is neither in a folder nor on the hub, or of several ranks.
    """
    where = _where(config, policy_model.model) if _needs_reference(config.loss.arguments) else "adapter"
    shared = placement is not None and placement.is_shared  # a sharded model cannot be copied: it is loaded again
    if where == "adapter":  # the loss scores it itself
        return None, _nothing
    if where == "model":
        follows = config.loss.replay != "none"  # as a switched-off adapter does: both score the same routes
        second = PolicyModel.load(policy_model.source, None, config.model, placement).model if shared else None
        return actor.reference(second, replay=follows).get_new_version(log_probs_key=REFERENCE_KEY), _nothing
    if shared:
        raise ConfigError("loss.reference=engine is for one rank: set loss.reference=model, which ranks share")
    if policy_model.source is None:
        raise ConfigError("loss.reference=engine needs a model that is in a folder or on the hub: set model.source")
    which: Any = {"engine": config.engine.kind}
    engine = AsyncVLLM.from_pretrained(policy_model.source, **which, **config.engine.arguments)
    scorer = vLLMWrapper(
        engine,
        tokenizer=policy_model.tokenizer,
        input_mode="tokens",
        generate=False,
        replay="R3" if config.loss.replay == "R3" else "none",  # without R3 the rollouts carry no experts to follow
        log_probs_key=REFERENCE_KEY,
    )
    return scorer, engine.shutdown


def _nothing() -> None:
    return None


def advantages(name: str, batch: TensorDictBase) -> TensorDictBase:
    """Return a batch with ``"advantage"``, one number for each row.

    Args:
        name: ``"grpo"``, ``"rloo"``, ``"dr_grpo"`` or ``"reinforce_plus_plus"``.
        batch: ``[rows]``, whole groups.
    """
    kinds: dict[str, Callable[[], objectives.GroupAdvantage]] = {
        "grpo": objectives.GRPOAdvantage,
        "rloo": objectives.RLOOAdvantage,
        "dr_grpo": objectives.DrGRPOAdvantage,
        "reinforce_plus_plus": lambda: objectives.ReinforcePlusPlusAdvantage(_samples(batch)),
    }
    found: TensorDictBase = kinds[name]().inv(batch)
    return found


def _samples(batch: TensorDictBase) -> int:
    return sum(bool(row.get(("next", "done")).any()) for row in batch.unbind(0))
