"""A step of training under R3 by one process, and by ranks that share batch or model in several ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from support.rollouts import total
from torchrl_moe._compat_transformers import checkpoint_activations
from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.objectives import GRPOLoss, sum_over_ranks
from torchrl_moe.testing import make_tiny_moe

SCORES = "log-probs"
CONFIG: Mapping[str, Any] = {"num_hidden_layers": 3, "vocab_size": 260}  # transformers 5.19 splits a head evenly
SHAPES = ((4, 5), (2, 4), (6, 6), (3, 2))
"""Tokens of each sample's prompt and of its answer."""


def rollouts() -> TensorDictBase:
    """Four samples that know routes no router chose, some rows without any, and log-probs near the model's own."""
    generator = torch.Generator().manual_seed(7)
    samples = []
    for i, (prompt, answer) in enumerate(SHAPES):
        length = prompt + answer
        experts = torch.rand(length, 3, 16, generator=generator).argsort(-1)[..., :4]
        experts[:, 0] = -1  # a dense layer
        experts[[0, -1]] = -1
        answered = torch.arange(length) >= prompt
        attended = torch.ones(length, dtype=torch.bool)
        sample = {
            "tokens": {"full": torch.randint(0, 256, (length,), generator=generator)},
            "masks": {"all_attention_mask": attended, "all_assistant_mask": answered},
            "routed_experts": {"full": experts.to(torch.int8)},
            "sampling": {"temperature": torch.tensor(0.8)},
            "advantage": torch.tensor([[1.0 - 0.7 * i]]),
        }
        samples.append(TensorDict(sample))
    td = lazy_stack(samples)
    with torch.no_grad():
        scores = TransformersWrapper(make_tiny_moe(**CONFIG)).score(td, entropy=False)[0]
    for sample, row in zip(td.unbind(0), scores, strict=True):
        length = len(sample["tokens", "full"])
        noise = 0.1 * torch.randn(length, generator=generator)
        answered = sample["masks", "all_assistant_mask"]
        sample["log_probs", "full"] = (row[-length:] + noise).masked_fill(~answered, float("nan"))
    return td


def step(actor: Any, td: TensorDictBase, parts: int, numbers: Mapping[Any, float]) -> dict[str, Tensor]:
    """Log-probs of all tokens ``[M]``, and the gradients of a batch in ``parts``, which ``numbers`` normalise."""
    with torch.no_grad():
        scores = actor.score(td, entropy=False)[0]
    assert scores.dtype == torch.float32
    rows = [row[-len(sample["tokens", "full"]) :] for row, sample in zip(scores, td.unbind(0), strict=True)]
    for key, number in numbers.items():
        td[key] = torch.full(td.batch_size, number)
    loss = loss_of(actor)
    for part in td.split(len(td) // parts):
        total(loss(part)).backward()
    grads = {name: p.grad for name, p in actor.model.named_parameters() if p.grad is not None}
    return {SCORES: torch.cat(rows), **{name: whole(grad).cpu().float() for name, grad in grads.items()}}


def loss_of(actor: Any) -> GRPOLoss:
    return GRPOLoss(actor, masking_strategy="rlhf", entropy_coeff=0.05)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def one_process(td: TensorDictBase, ranks: int, parts: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What ``ranks`` that share a batch are to compute, each its rows in ``parts``: the same forward passes."""
    model = make_tiny_moe(**CONFIG)
    for parameter in model.parameters():
        parameter.data = parameter.to(dtype)
    actor = TransformersWrapper(model)
    numbers = loss_of(actor).denominators(td)
    steps = [step(actor, share.clone(), parts, numbers) for share in td.split(len(td) // ranks)]
    return {**steps[-1], SCORES: torch.cat([one[SCORES] for one in steps])}  # gradients add up


# -- ranks -----------------------------------------------------------------------------------------------------------


def sharded(**policy: Any) -> nn.Module:
    """FSDP2 by hand."""
    model = make_tiny_moe(**CONFIG)
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    return checkpointed(model)


def checkpointed(model: Any) -> nn.Module:
    checkpoint_activations(model.train())
    return cast(nn.Module, model)


def bf16() -> nn.Module:
    return sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def offloaded() -> nn.Module:
    return sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))


def by_config(folder: Path, **sizes: Any) -> nn.Module:
    """As ``DistributedConfig`` says."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    return checkpointed(AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes)))


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a model is sharded, over how many ranks, and how many of them have rows of their own."""

    make: Callable[..., nn.Module]
    sizes: Mapping[str, int] = field(default_factory=dict)
    shares: int = 2
    parts: int = 2
    """Micro-batches. Under TP alone one: transformers sums the gradients of q and k norms again in each backward."""

    dtype: torch.dtype = torch.float32


WAYS: Mapping[str, Way] = {
    "FSDP2": Way(make=sharded),
    "FSDP2, bf16": Way(make=bf16, dtype=torch.bfloat16),
    "FSDP2, CPU offload": Way(make=offloaded),
    "FSDP": Way(make=by_config, sizes={"fsdp_size": 2}),
    "FSDP, EP all-to-all": Way(make=by_config, sizes={"fsdp_size": 2, "ep_size": 2}),
    "TP": Way(make=by_config, sizes={"tp_size": 2}, shares=1, parts=1),
    "TP, EP": Way(make=by_config, sizes={"tp_size": 2, "ep_size": 2}, shares=1, parts=1),
}
"""On two ranks."""

WIDE: Mapping[str, Way] = {
    "FSDP, TP": Way(make=by_config, sizes={"fsdp_size": 2, "tp_size": 2}),
    "FSDP, TP, EP": Way(make=by_config, sizes={"fsdp_size": 2, "tp_size": 2, "ep_size": 4}),
}
"""On four."""


def run_way(folder: Path, td: TensorDictBase, way: Way) -> dict[str, Any]:
    """This rank's log-probs, and the gradients as arrays."""
    model = way.make(folder, **way.sizes) if way.sizes else way.make()
    actor = TransformersWrapper(model)
    share = td.split(len(td) // way.shares)[dist.get_rank() * way.shares // dist.get_world_size()].clone()
    numbers = loss_of(actor).denominators(share)
    numbers = sum_over_ranks(numbers) if way.shares > 1 else numbers
    got = step(actor, share, way.parts, numbers)
    assert actor.scoring_model.splits, "it was scored from its dense logits"
    return {name: tensor.numpy() for name, tensor in got.items()}
