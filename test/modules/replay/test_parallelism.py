"""Where a sharded model computes, and which ways of sharing one are refused. Meshes of devices that are not here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules import RouterReplay, TransformersWrapper
from torchrl_moe.modules.replay.discovery import computing_device, dry_inputs, refused_parallelism, summed_again
from torchrl_moe.objectives import GRPOLoss
from torchrl_moe.testing import make_tiny_moe


def mesh_of(*axes: str, device: str = "cuda", size: int = 2) -> DeviceMesh:
    """As rank 0 sees it; nothing can be sent."""
    ranks = torch.arange(size ** len(axes)).view([size] * len(axes))
    return DeviceMesh(device, ranks, mesh_dim_names=axes or None, _init_backend=False, _rank=0)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Put the first parameter on a mesh, as FSDP2 does; its numbers are nowhere."""
    name, parameter = next(model.named_parameters())
    empty = torch.empty_like(parameter, device="meta")
    sharded = DTensor.from_local(empty, mesh, [Shard(0)] * mesh.ndim, run_check=False)
    owner = model.get_submodule(name.rpartition(".")[0])
    setattr(owner, name.rpartition(".")[2], nn.Parameter(sharded))
    return model


def test_a_model_computes_where_its_parameters_are_or_where_offloaded_ones_go() -> None:
    """Everything that is made for a forward pass goes to the mesh's device."""
    assert computing_device(nn.Linear(2, 2)) == torch.device("cpu")
    assert computing_device(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    model = make_tiny_moe(num_hidden_layers=2)
    actor = TransformersWrapper(model, replay="none")
    shard(model, mesh_of("fsdp"))
    assert not next(model.parameters()).is_cuda
    assert computing_device(model) == actor.device == torch.device("cuda")
    with FakeTensorMode():  # which needs no such device
        assert GRPOLoss(actor, entropy_bonus=False).clip_epsilon_low.device.type == "cuda"
        assert all(tensor.is_cuda for tensor in dry_inputs(model).values())


@pytest.mark.parametrize(
    ("axis", "named"), [("cp", "context"), ("sp", "sequence"), ("pp", "pipeline"), ("etp", "expert-tensor")]
)
def test_what_cannot_be_followed_is_refused_by_name(axis: str, named: str) -> None:
    model = shard(make_tiny_moe(num_hidden_layers=2), mesh_of("fsdp", axis))
    with pytest.raises(UnsupportedRouterError, match=f"Qwen3MoeForCausalLM cannot be replayed under {named} parallel"):
        RouterReplay(model)
    with pytest.raises(TypeError, match=f"Qwen3MoeForCausalLM cannot be scored under {named} parallelism: "):
        TransformersWrapper(model, replay="none")


@pytest.mark.parametrize("axes", [("fsdp", "tp"), ("efsdp", "ep"), ("dp_shard_cp",), ()])
def test_models_on_other_axes_are_scored_as_they_are(axes: tuple[str, ...]) -> None:
    """accelerate's flattened axis has that name with and without context parallelism."""
    assert refused_parallelism(shard(nn.Linear(4, 4), mesh_of(*axes) if axes else mesh_of("x"))) == ""
    assert refused_parallelism(shard(nn.Linear(4, 4), mesh_of("pp", size=1))) == ""


def test_a_pipeline_of_transformers_is_refused() -> None:
    distributed = pytest.importorskip("transformers.distributed")
    model = make_tiny_moe(num_hidden_layers=2)
    model.config.distributed_config = distributed.DistributedConfig(pp_size=2)
    assert refused_parallelism(model).startswith("pipeline parallelism: ")


@pytest.mark.parametrize(("tp_size", "named"), [(2, "layers.1.norm.weight"), (1, "")])
def test_gradients_that_would_be_summed_again_are_named(tp_size: int, named: str) -> None:
    model: Any = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"norm": nn.LayerNorm(2), "out": nn.LayerNorm(2)}) for _ in range(2)])
    model.config = SimpleNamespace(distributed_config=SimpleNamespace(tp_size=tp_size))
    model.tp_plan = {"layers.*.norm": "replicated_with_grad_allreduce", "layers.*.out": "rowwise"}
    assert summed_again(model) == ""
    for layer in model.layers:
        layer["out"].weight.grad = torch.ones(2)
        layer["norm"].weight.grad = torch.zeros(2)  # a sum of nothing
    assert summed_again(model) == ""
    model.layers[1]["norm"].weight.grad = torch.ones(2)
    assert summed_again(model) == named
    model.layers[1]["norm"].weight = None
    shard(model, mesh_of("fsdp"))  # the first parameter: FSDP's hooks sum it
    model.layers[0]["norm"].weight.grad = torch.ones_like(model.layers[0]["norm"].weight)
    assert summed_again(model) == ""


@pytest.mark.gpu
def test_offloaded_parameters_on_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One rank: parameters in host memory, forward and backward on the GPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    from support.sharded import CONFIG, SCORES, loss_of, one_process, rollouts, step

    td = rollouts()
    store = f"file://{tmp_path_factory.mktemp('store')}/store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    try:
        model = make_tiny_moe(**CONFIG)
        for name, buffer in model.named_buffers():
            model.get_submodule(name.rpartition(".")[0]).register_buffer(
                name.rpartition(".")[2], buffer.cuda(), persistent=False
            )
        for layer in model.model.layers:
            fully_shard(layer, offload_policy=CPUOffloadPolicy())
        fully_shard(model, offload_policy=CPUOffloadPolicy())
        actor = TransformersWrapper(model)
        assert loss_of(actor).clip_epsilon_low.is_cuda
        got = step(actor, td.clone(), 2, loss_of(actor).denominators(td))
    finally:
        dist.destroy_process_group()
    for name, wanted in one_process(td, 1, 2).items():
        torch.testing.assert_close(got[name].cpu(), wanted, atol=1e-4 if name == SCORES else 1e-3, rtol=1e-2)
