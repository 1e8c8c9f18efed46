"""``Placement``: which rank holds what of the model, and which samples it sees."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout  # there is no public way
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from torchrl_moe.modules.policies.unstack import base_model
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, PlacementConfig
from torchrl_moe.trainers.ranks import Ranks
from torchrl_moe.weight_update.options import SwapOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Placement", "check_axes", "check_placement", "decoder_layers"]


# Which placements are impossible, and what to do instead.
def check_placement(size: int, config: GRPOConfig) -> None:
    """Refuse settings under which this many ranks cannot share the model, or not correctly."""
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
    # with as many ranks as tensor parallelism takes, none are left to shard over
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


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Placement:
    """How the ranks of a run share its model: ``replicate * shards * tensor_parallel`` of them.

    By default a single process has the whole model.
    """

    ranks: Ranks = field(default_factory=Ranks)
    config: PlacementConfig = field(default_factory=PlacementConfig)

    @classmethod
    def of(cls, ranks: Ranks, config: GRPOConfig) -> Placement:
        """Return the placement of a run."""
        check_placement(ranks.size, config)
        return cls(ranks, config.placement)

    @property
    def is_shared(self) -> bool:
        """Whether there are several ranks."""
        return self.ranks.size > 1

    @property
    def data_size(self) -> int:
        """Number of shares of a batch; the ranks of a tensor-parallel group see the same share."""
        return self.ranks.size // self.config.tensor_parallel

    @property
    def shards(self) -> int:
        """Number of ranks that FSDP2 shards over."""
        return self.data_size // self.config.replicate

    def to_ranks(self, shares: Sequence[T]) -> list[T]:
        """Return the part of each rank, given ``data_size`` shares."""
        return [shares[rank // self.config.tensor_parallel] for rank in range(self.ranks.size)]

    def gather(self, value: T) -> list[T]:
        """Return one small value per share, from one of the ranks that see it; all ranks must call."""
        return self.ranks.gather(value)[:: self.config.tensor_parallel]

    def load(
        self, pretrained: Callable[..., PreTrainedModel], dtype: torch.dtype, rounds: bool = True
    ) -> PreTrainedModel:
        """Load a model of which each rank reads its part only; ``rounds``: whether it is gathered in ``dtype``."""
        from transformers.distributed import DistributedConfig

        config = self.config
        # what the installed transformers can do is told by the parameters that its config has
        known = inspect.signature(DistributedConfig).parameters
        newer = "or use a newer transformers (5.24 has it), which vLLM 0.33 does not take beside it"
        if config.replicate > 1 and "dp_replicate_size" not in known:
            raise ConfigError(
                f"placement.replicate={config.replicate}: the installed transformers shards a model over all ranks "
                f"only. Set it to 1, {newer}"
            )
        if config.expert_parallel not in (1, config.tensor_parallel) and "ep_implementation" not in known:
            allowed = " or ".join(sorted({"1", f"tensor_parallel={config.tensor_parallel}"} - {"tensor_parallel=1"}))
            raise ConfigError(
                f"placement.expert_parallel={config.expert_parallel}: the installed transformers splits experts only "
                f"among the ranks that split layers. Set it to {allowed}, {newer}"
            )
        copies = {"dp_replicate_size": config.replicate} if config.replicate > 1 else {}
        distributed_config = DistributedConfig(
            tp_size=config.tensor_parallel,
            ep_size=config.expert_parallel,
            fsdp_size=self.shards,
            fsdp_cpu_offload=config.cpu_offload,
            fsdp_mixed_precision=rounds and dtype == torch.bfloat16,
            **copies,
        )
        model = pretrained(distributed_config=distributed_config)
        self._settle(model)
        return model

    def shard(self, model: nn.Module, dtype: torch.dtype, rounds: bool = True) -> None:
        """Shard, layer by layer, a model that each rank holds completely; adapters are taken from rank 0.

        ``rounds``: whether it is gathered in ``dtype``.
        """
        # each rank has initialised its own adapter
        self.ranks.copy_first(weight.data for weight in model.parameters() if weight.requires_grad)
        cast = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        precision = cast if rounds and dtype == torch.bfloat16 else MixedPrecisionPolicy()
        offload = CPUOffloadPolicy() if self.config.cpu_offload else OffloadPolicy()
        # the layers first: the last call takes what is in none of them
        for part in (*decoder_layers(model), model):
            fully_shard(part, mp_policy=precision, offload_policy=offload)
        self._settle(model)

    def _settle(self, model: nn.Module) -> None:
        if not self.config.reshard_after_forward and isinstance(model, FSDPModule):
            model.set_reshard_after_forward(False)
        # groups that torch made for the model's meshes have torch's own deadline
        seconds = timedelta(seconds=self.config.collective_timeout)
        meshes = {id(mesh): mesh for weight in model.parameters() if (mesh := getattr(weight, "device_mesh", None))}
        for mesh in meshes.values():
            for axis in range(mesh.ndim):
                _set_pg_timeout(seconds, mesh.get_group(axis))


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that FSDP2 shards one by one, as the model's own plan names them."""
    base = base_model(model)
    # entries of the plan such as "layers.*", as patterns
    plan: Collection[str] = getattr(base, "fsdp_plan", ())
    stacks = [re.escape(name).replace(r"\*", r"\d+") for name in plan if name.endswith("*")]
    layers = [module for name, module in base.named_modules() if any(re.fullmatch(stack, name) for stack in stacks)]
    if not layers:
        raise ConfigError(f"{type(base).__name__} has no fsdp_plan, which names its layers: train with one rank")
    return layers
