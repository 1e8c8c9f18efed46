"""Which placements are impossible, and what to do instead."""

from __future__ import annotations

import torch

from torchrl_moe.trainers.config import ConfigError, GRPOConfig
from torchrl_moe.weight_update.options import SwapOptions

__all__ = ["check_axes", "check_placement"]


def check_placement(size: int, config: GRPOConfig) -> None:
    """Refuse settings under which this many ranks cannot share the model, or not correctly.

    Args:
        size: number of ranks.
        config: of the run.

    Raises:
        ConfigError: the first such setting, with what to do instead.
    """
    if size == 1:
        _check_single(config)
        return
    check_axes(size, config)
    _check_model(size, config)
    _check_shares(size // config.placement.tensor_parallel, config)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _check_single(config: GRPOConfig) -> None:
    own = config.placement
    for name in ("tensor_parallel", "expert_parallel", "replicate"):
        count = getattr(own, name)
        _require(count == 1, f"placement.{name}={count} needs several ranks: start it by torchrun --nproc-per-node N")
    _require(not own.cpu_offload, "placement.cpu_offload=True is FSDP2's, which needs several ranks")


def check_axes(size: int, config: GRPOConfig) -> None:
    """Refuse parallel sizes that do not fit the number of ranks; ``ConfigError`` as in :func:`check_placement`."""
    own = config.placement
    tensor, expert, copies = own.tensor_parallel, own.expert_parallel, own.replicate
    _require(
        size % (tensor * copies) == 0,
        f"placement: {size} ranks are no multiple of tensor_parallel={tensor} times replicate={copies}",
    )
    of_copy = size // copies
    _require(
        copies == 1 or of_copy > tensor,
        f"placement.replicate={copies} leaves {of_copy} rank(s) for a copy, over which FSDP2 shards: at least "
        f"{2 * tensor} are needed",
    )
    _require(
        expert == 1 or (expert % tensor == 0 and of_copy % expert == 0),
        f"placement.expert_parallel={expert} must be a multiple of tensor_parallel={tensor} that divides the "
        f"{of_copy} ranks of a copy",
    )


def _check_model(size: int, config: GRPOConfig) -> None:
    own = config.placement
    has_fsdp = size > own.tensor_parallel
    _require(not own.cpu_offload or has_fsdp, "placement.cpu_offload=True is FSDP2's: give it ranks beside TP")
    _require(
        not own.cpu_offload or torch.cuda.is_available(),
        "placement.cpu_offload=True needs GPUs to offload from: without any, weights are in the host's memory anyway",
    )
    _require(
        config.model.lora.rank == 0 or own.tensor_parallel == own.expert_parallel == own.replicate == 1,
        "model.lora.rank goes with plain FSDP2: set placement.tensor_parallel, expert_parallel and replicate to 1",
    )
    _require(
        config.engine.sync.get("lora") != "adapter",
        "engine.sync.lora=adapter is for one rank: leave it out, and ranks send weights with the adapter added",
    )
    _require(
        has_fsdp or config.optim.max_tokens is None,
        "tensor parallelism alone needs optim.max_tokens=null: transformers sums the gradients of norms again in each "
        "backward pass, so a step may have only one",
    )
    swap, limit = config.engine.sync.get("timeout_seconds", SwapOptions().timeout_seconds), own.collective_timeout
    _require(
        limit > swap,
        f"placement.collective_timeout={limit:g} must be above engine.sync.timeout_seconds={swap:g}: while rank 0 "
        "waits so long for readers of the weight store, the others wait in a collective",
    )
    _require(not config.engine.sleep, "engine.sleep=True is for one GPU that one rank shares with the engine")


def _check_shares(count: int, config: GRPOConfig) -> None:
    prompts, parts = config.rollout.prompts_per_step, config.optim.minibatches
    _require(
        prompts >= count,
        f"rollout.prompts_per_step={prompts} is too few: each of {count} shares of a batch has a whole group",
    )
    answers = prompts // count * config.rollout.group_size
    _require(
        answers >= parts,
        f"optim.minibatches={parts} is too many: a rank has {answers} answers of a step, or a few more",
    )
