"""A step by ranks that share the model is that of one process; placements that cannot be are refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pytest import MonkeyPatch, TempPathFactory
from tensordict import TensorDictBase
from transformers import AutoModelForCausalLM

from support.ranks import run_as_ranks
from support.shared_training import (
    MODEL,
    SHARES_IN_ALL_WAYS,
    changed,
    grouped_batch,
    one_step,
    possible,
    settings,
    steps,
)
from torchrl_moe.modules.policies.unstack import checkpoint_tensors, whole
from torchrl_moe.testing.tiny_moe import save_tiny_moe
from torchrl_moe.trainers.config import ConfigError, GRPOConfig
from torchrl_moe.trainers.plan import model_config_of
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.ranks import Placement, check_placement, decoder_layers, join_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

Changes = Mapping[str, Any]


IN_PARTS: Changes = {"optim.max_tokens": 14, "optim.max_grad_norm": 0.5, "model.activation_checkpointing": True}
"""Shares have other numbers of micro-batches; the gradient is scaled down; all of a layer is computed again."""
TERMS = {"proximal_policy": "recomputed", "correction": "tis", "aggregation": "prompt_mean", "entropy_bonus": True}
TO_REF = {"kl_to_ref_coeff": 0.1}
ROUTER = {"load_balancing_coeff": 0.1}
ALL_TERMS: Changes = {"loss.arguments": {**TERMS, **TO_REF}, "loss.router": ROUTER, "optim.max_tokens": 14}
LORA: Changes = {"model.lora.rank": 2, "model.lora.target": "all"}
ADAPTED: Changes = {**LORA, "loss.arguments": TO_REF, "optim.max_tokens": 14}
EXPERTS: Changes = {**IN_PARTS, "placement.expert_parallel": 2}
LAYERS: Changes = {"placement.tensor_parallel": 2, "optim.max_grad_norm": 0.5}
COPIES: Changes = {**IN_PARTS, "placement.replicate": 2}
ALL_THREE: Changes = {**LAYERS, "placement.expert_parallel": 4, "optim.max_tokens": 14}
WAYS: Mapping[str, Changes] = {"FSDP2": IN_PARTS, "FSDP2, all terms": ALL_TERMS, "FSDP2, adapter": ADAPTED}
KEPT: Changes = {"placement.reshard_after_forward": False}
MORE: Mapping[str, Changes] = {"FSDP2, R2": {"loss.replay": "R2"}, "FSDP2, kept": KEPT}
PARALLEL: Mapping[str, Changes] = {"EP": EXPERTS, "TP": LAYERS, "TP, EP": {**LAYERS, "placement.expert_parallel": 2}}
WIDE: Mapping[str, Changes] = {"HSDP": COPIES, "FSDP2, TP, EP": ALL_THREE}
"""On four ranks."""


@pytest.fixture(scope="module")
def batch() -> TensorDictBase:
    return grouped_batch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: TempPathFactory) -> Path:
    return save_tiny_moe(tmp_path_factory.mktemp("model") / "tiny", **MODEL)


def alone(config: GRPOConfig, batch: TensorDictBase) -> dict[str, Any]:
    config.placement = GRPOConfig().placement
    torch.manual_seed(0)
    return one_step(config, batch.clone())


def compare(folder: Path, batch: TensorDictBase, ways: Mapping[str, Changes], world_size: int = 2) -> None:
    configs = {name: settings(folder, change) for name, change in ways.items()}
    torch.manual_seed(0)  # rank 0 draws adapters as one process does
    found = run_as_ranks(steps, configs, batch, world_size=world_size)
    for name, change in ways.items():
        exact = alone(settings(folder, change), batch)
        largest = max(np.abs(gradient).max() for gradient in exact["gradients"].values())
        for rank in found:
            one = rank[name]
            assert one["gradients"].keys() == exact["gradients"].keys()
            gap = max(np.abs(one["gradients"][key] - exact["gradients"][key]).max() for key in exact["gradients"])
            # AdamW's first step is the sign of the gradient: that of what is 0 but for rounding counts for nothing
            counts = {key: np.abs(gradient) > 1e-5 for key, gradient in exact["gradients"].items()}
            weights = {key: one["weights"][key] - weight for key, weight in exact["weights"].items()}
            moved = max((np.abs(weights[key]) * counts[key]).max() for key in weights)
            print(f"{name}: gradients {gap / largest:.1e} of the largest, weights {moved:.1e}")
            assert gap <= 2e-6 * largest
            assert moved <= 1e-6
            assert one["metrics"].keys() == exact["metrics"].keys()
            for metric in one["metrics"].keys() - {"ESS", "ess"}:  # which is a mean over parts, and these are others
                assert one["metrics"][metric] == pytest.approx(exact["metrics"][metric], abs=1e-5), metric


def test_two_ranks_step_as_one_process(folder: Path, batch: TensorDictBase) -> None:
    compare(folder, batch, WAYS)


@pytest.mark.parity
@pytest.mark.parametrize(("ways", "ranks"), [({**MORE, **PARALLEL}, 2), (WIDE, 4)])
def test_ranks_in_other_ways_step_as_one_process(folder: Path, batch: TensorDictBase, ways: Any, ranks: int) -> None:
    compare(folder, batch, possible(ways), world_size=ranks)


@pytest.mark.skipif(SHARES_IN_ALL_WAYS, reason="this transformers shares a model in all of these ways")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (COPIES, r"placement\.replicate=2: the installed transformers .* Set it to 1, or use a newer"),
        (EXPERTS, r"placement\.expert_parallel=2: the installed transformers .* Set it to 1, or use a newer"),
        (ALL_THREE, r"placement\.expert_parallel=4: .* Set it to 1 or tensor_parallel=2, or use a newer"),
    ],
)
def test_what_the_installed_transformers_cannot_share_is_refused(folder: Path, change: Changes, message: str) -> None:
    ranks: Any = SimpleNamespace(size=4, rank=0)
    placement = Placement(ranks=ranks, config=settings(folder, change).placement)
    with pytest.raises(ConfigError, match=message):
        placement.load(lambda **how: pytest.fail("loaded"), torch.float32)


# -- what is loaded and written ---------------------------------------------------------------------------------------
def loaded(config: GRPOConfig, seed: int = 0, placement: Placement | None = None) -> PolicyModel:
    """With an adapter, if any, that adds something. No rank relies on another's random numbers; rank 0 draws."""
    torch.manual_seed(seed)
    policy_model = PolicyModel.load(None, None, config.model, placement)
    for name, weight in policy_model.trained.items():
        if "lora_B" in name:
            weight.data.fill_(0.5)
    return policy_model


def load_and_save(folder: Path, out: Path, change: Changes, dtype: str) -> dict[str, Any]:
    ranks = join_ranks(60.0)
    config = settings(folder, change)
    config.model.dtype, config.placement.collective_timeout = dtype, 145.0
    policy_model = loaded(config, ranks.rank, Placement.of(ranks, config))
    policy_model.save(out)
    dist.barrier()
    weights: list[Any] = list(policy_model.trained.values())
    share = sum(weight.to_local().numel() for weight in weights) / sum(weight.numel() for weight in weights)
    backend = weights[0].device_mesh.get_group(0)._get_backend(torch.device("cpu"))
    return {"share": share, "seconds": backend.options._timeout.total_seconds()}


@pytest.mark.parametrize(("change", "dtype"), [(IN_PARTS, "bfloat16"), (ADAPTED, "float32")])
def test_each_rank_has_half_and_they_write_the_whole(tmp_path: Path, folder: Path, change: Changes, dtype: str) -> None:
    found = run_as_ranks(load_and_save, folder, tmp_path / "model", change, dtype)
    assert all(rank["share"] == pytest.approx(0.5, abs=0.02) for rank in found)
    assert all(rank["seconds"] == 145.0 for rank in found)  # of the model's own collectives
    before = checkpoint_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    written = checkpoint_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32))
    moved = {name for name in before if not torch.equal(before[name], written[name])}
    assert before.keys() == written.keys() and bool(moved) == (change is ADAPTED)
    if change is ADAPTED:
        exact = checkpoint_tensors(loaded(settings(folder, ADAPTED)).model)
        assert all(torch.equal(tensor, exact[name]) for name, tensor in written.items())


def router_logits(folder: Path) -> dict[str, Any]:
    """Of a router under the trainer's precision, and how far they are from those of its whole weight in float32."""
    ranks = join_ranks(60.0)
    config = settings(folder)
    config.model.dtype, config.model.router_dtype = "bfloat16", "float32"
    policy_model = PolicyModel.load(None, None, config.model, Placement.of(ranks, config))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    gate: Any = policy_model.model.get_submodule("model.layers.1.mlp.gate")
    gate.register_forward_hook(lambda module, args, out: seen.append((args[0], out[0])))
    with torch.no_grad():
        for weight in gate.parameters():
            weight.mul_(1 + 2**-12)  # what bfloat16 would round away
        with policy_model.precision():
            narrow = policy_model.model(torch.arange(3, 12)[None]).logits.dtype
    policy_model.trained  # noqa: B018  gathered weights are given up
    ((hidden, found),) = seen
    wanted = hidden.flatten(0, -2).float() @ whole(gate.weight.detach()).T
    ranks.close()
    return {"dtypes": [str(found.dtype), str(narrow)], "gap": (found - wanted).abs().max().item()}


def test_ranks_that_share_the_model_round_no_router(folder: Path) -> None:
    for rank in run_as_ranks(router_logits, folder):
        assert rank["dtypes"] == ["torch.float32", "torch.bfloat16"] and rank["gap"] < 1e-5


def cast_before_and_after(folder: Path, changes: Mapping[str, Changes]) -> dict[str, list[str]]:
    """The weights for which the order matters, of each way."""
    ranks = join_ranks(60.0)
    found = {}
    for way, change in changes.items():
        config = settings(folder, change)
        model = PolicyModel.load(None, None, config.model, Placement.of(ranks, config)).model
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        equal = {name: torch.equal(_cast(one), whole(one).bfloat16()) for name, one in weights.items()}
        found[way] = [name for name in equal if not equal[name]]
    ranks.close()
    return found


def _cast(weight: torch.Tensor) -> torch.Tensor:
    gathered = whole(weight, torch.bfloat16)
    assert gathered.dtype == (torch.bfloat16 if hasattr(weight, "full_tensor") else weight.dtype)
    return gathered.bfloat16()  # those of norms are whole on each rank of a tensor-parallel group


@pytest.mark.parity
def test_a_part_that_is_cast_and_gathered_is_the_whole_that_is_cast(folder: Path) -> None:
    """Under tensor parallelism a rank's part of gate and up is two pieces."""
    (found, other) = run_as_ranks(cast_before_and_after, folder, possible(PARALLEL))
    assert found == other == {way: [] for way in possible(PARALLEL)}


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (1, {"placement.tensor_parallel": 2},
         r"placement\.tensor_parallel=2 needs several ranks: start it by torchrun"),
        (1, {"placement.expert_parallel": 2}, r"placement\.expert_parallel=2 needs several ranks"),
        (1, {"placement.replicate": 2}, r"placement\.replicate=2 needs several ranks"),
        (1, {"placement.cpu_offload": True}, r"placement\.cpu_offload=True is FSDP2's, which needs several ranks"),
        (3, {"placement.tensor_parallel": 2}, "3 ranks are no multiple of tensor_parallel=2 times replicate=1"),
        (4, {"placement.replicate": 4}, r"placement\.replicate=4 leaves 1 rank\(s\) for a copy"),
        (4, {"placement.replicate": 2, "placement.tensor_parallel": 2}, "leaves 2 rank.* at least 4 are needed"),
        (4, {"placement.expert_parallel": 3}, r"expert_parallel=3 must be .* divides the 4 ranks of a copy"),
        (4, {"placement.expert_parallel": 2, "placement.tensor_parallel": 4, "optim.max_tokens": None},
         r"expert_parallel=2 must be a multiple of tensor_parallel=4"),
        (4, {"placement.expert_parallel": 4, "placement.replicate": 2}, "divides the 2 ranks of a copy"),
        (2, {"placement.cpu_offload": True, "placement.tensor_parallel": 2}, "cpu_offload=True is FSDP2's: give it"),
        (2, {"placement.cpu_offload": True}, "cpu_offload=True needs GPUs to offload from"),
        (2, {"placement.expert_parallel": 2, "model.lora.rank": 4}, r"model\.lora\.rank goes with plain FSDP2"),
        (2, {"placement.tensor_parallel": 2, "optim.max_tokens": 100}, r"needs optim\.max_tokens=null"),
        (2, {"engine.sync": {"lora": "adapter"}}, r"engine\.sync\.lora=adapter is for one rank"),
        (2, {"placement.collective_timeout": 120.0}, r"collective_timeout=120 must be above .*timeout_seconds=120"),
        (2, {"engine.sync": {"timeout_seconds": 600}}, r"collective_timeout=600 must be above .*timeout_seconds=600"),
        (2, {"engine.sleep": True}, r"engine\.sleep=True is for one GPU"),
        (32, {}, r"rollout\.prompts_per_step=16 is too few: each of 32 shares of a batch has a whole group"),
        (16, {"optim.minibatches": 16}, r"optim\.minibatches=16 is too many: a rank has 8 answers of a step"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(monkeypatch: MonkeyPatch, size: int, changes: dict[str, Any], message: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        check_placement(size, changed(GRPOConfig(), changes))


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, {"optim.max_tokens": 100, "engine.sleep": True, "placement.collective_timeout": 1.0}),
        (2, {"placement.collective_timeout": 61.0, "engine.sync": {"timeout_seconds": 60}}),
        (8, {"optim.max_tokens": 100, "model.lora.rank": 4}),
        (8, {"placement.expert_parallel": 8}),
        (8, {"placement.replicate": 2, "placement.expert_parallel": 4, "placement.tensor_parallel": 2}),
        (8, {"placement.tensor_parallel": 8, "optim.max_tokens": None}),
        (32, {"placement.tensor_parallel": 2, "optim.max_tokens": 100, "optim.minibatches": 8}),
    ],
)
def test_what_can_be(monkeypatch: MonkeyPatch, size: int, changes: dict[str, Any]) -> None:
    check_placement(size, changed(GRPOConfig(), changes))
    if size > 1:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        if changed(GRPOConfig(), changes).placement.tensor_parallel < size:
            check_placement(size, changed(GRPOConfig(), {**changes, "placement.cpu_offload": True}))


def test_experts_of_qwen3_30b_a3b_are_placed_by_their_real_names() -> None:
    """On shapes alone: 48 layers are sharded one by one, and the plan for experts names all of their weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config_of("Qwen/Qwen3-30B-A3B"))
    assert len(decoder_layers(model)) == 48
    plan = {"model." + name.replace(".", r"\.").replace("*", r"\d+") for name in model.config.base_model_ep_plan}
    experts = {name: weight for name, weight in model.named_parameters() if ".experts." in name}
    assert sum(weight.numel() for weight in experts.values()) == 48 * 128 * 3 * 2048 * 768
    assert all(any(re.fullmatch(pattern, name) for pattern in plan) for name in experts)
    assert all(weight.shape[0] % 4 == 0 and weight.shape[0] % 8 == 0 for weight in experts.values())
