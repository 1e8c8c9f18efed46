"""Replay together with peft, ``torch.compile`` and FSDP2, put on before or after them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor, nn

from support.gradients import assert_same, backward, checkpoint_activations, gradients, loss_of
from support.ranks import run_as_ranks
from support.rollouts import total
from support.routes import experts_seen, pair, random_routes, recorded, tokens
from support.sharded import CONFIG, rollouts
from torchrl_moe.modules import RouterReplay, TransformersWrapper
from torchrl_moe.objectives import GRPOLoss
from torchrl_moe.testing import make_tiny_moe

ORDER = pytest.mark.parametrize("replay_first", [True, False], ids=["replay-first", "replay-last"])
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "dtype": torch.bfloat16, "use_cache": False}
ONE: dict[str, Any] = {**SMALL, "num_hidden_layers": 1, "mlp_only_layers": []}
"""A layer with experts alone: compiling takes as long as a model is deep."""

# peft


@pytest.fixture(autouse=True)
def no_graphs() -> None:
    """Each test compiles by itself: hooks of discovery share their code, and a code has a limited number of graphs."""
    torch._dynamo.reset()


@ORDER
@pytest.mark.parametrize(
    "target", [{"target_modules": ["q_proj"]}, {"target_parameters": ["mlp.gate.weight"]}], ids=["attention", "router"]
)
def test_a_model_wrapped_by_peft_replays(target: dict[str, list[str]], replay_first: bool) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **target)
    torch.manual_seed(0)
    base = make_tiny_moe()
    replay = RouterReplay(base) if replay_first else None
    model = peft.get_peft_model(base, config)
    replay = replay or RouterReplay(model)
    assert (replay.layers, replay.num_layers) == ((1, 2, 3), 4)
    logits, grads = backward(model, tokens())
    with replay.replay(recorded(model, replay)):
        same_logits, same_grads = backward(model, tokens())
    assert torch.equal(logits, same_logits)
    assert_same(same_grads, grads)
    assert all("lora" in name for name in grads)
    routes = random_routes(replay)
    with experts_seen(model) as seen, replay.replay(routes):
        model(tokens())
    assert all(torch.equal(seen[layer][0], routes[:, :, layer].flatten(0, 1)) for layer in replay.layers)


def kl_loss(actor: TransformersWrapper, td: TensorDictBase, reference: Any) -> Tensor:
    """GRPO's, mostly the KL to the reference."""
    loss = GRPOLoss(actor, masking_strategy="rlhf", entropy_bonus=False, kl_to_ref_coeff=3.0, reference=reference)
    out = loss(td)
    assert out.kl_to_ref > 1e-3
    return total(out)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_adapters_on_experts_train_under_checkpointing_towards_their_base(use_reentrant: bool) -> None:
    """R3 everywhere; loss and gradients are those of the merged weights, and of a base model of its own."""
    peft = pytest.importorskip("peft")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, target_parameters=targets, target_modules=[], init_lora_weights=False, lora_alpha=32)
    td = rollouts()
    torch.manual_seed(0)
    model = peft.get_peft_model(make_tiny_moe(**CONFIG), config).train()
    checkpoint_activations(model, use_reentrant=use_reentrant)
    model.enable_input_require_grads()
    loss = kl_loss(TransformersWrapper(model), td, "adapter")
    loss.backward()
    grads = gradients(model)

    merged = copy.deepcopy(model).merge_and_unload().eval().requires_grad_(True)
    with torch.no_grad():
        base = TransformersWrapper(make_tiny_moe(**CONFIG)).score(td.clone(), entropy=False)[0]
    for sample, row in zip(td.unbind(0), base, strict=True):
        sample["next", "ref_log_probs", "full"] = row[-len(sample["tokens", "full"]) :]
    wanted = kl_loss(TransformersWrapper(merged), td, "key")
    wanted.backward()
    torch.testing.assert_close(loss, wanted, atol=1e-6, rtol=0)
    whole = dict(merged.named_parameters())
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, peft.tuners.lora.ParamWrapper)}
    assert len(layers) == 4
    through = []
    for name, layer in layers.items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        through.append((layer.get_delta_weight("default") * whole[f"{plain}.{layer.parameter_name}"].grad).sum())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert grads.keys() == trained.keys()
    expected = torch.autograd.grad(sum(through), list(trained.values()))
    for (name, got), grad in zip(grads.items(), expected, strict=True):
        assert grad.abs().max() > 1e-4
        torch.testing.assert_close(got, grad, atol=2e-6, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def replayed(model: nn.Module, replay: RouterReplay, routes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    with replay.replay(routes):
        logits = model(tokens()).logits
    loss_of(logits).backward()
    return logits.detach(), gradients(replay.model)


def assert_near(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """To bfloat16's own rounding, which compilation moves."""
    assert got.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert (got[name] - grad).abs().max() <= 0.03 * grad.abs().max(), name


def test_a_compiled_model_follows_new_routes_without_a_new_graph() -> None:
    model, replay = pair(**SMALL)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed, live in enumerate((0, 0, 1, 3)):
        routes = random_routes(replay, seed=seed)
        routes[0, :live] = -1
        wanted, wanted_grads = replayed(model, replay, routes)
        known = seed not in (0, 2)  # one graph where all rows are given, one where some are
        with torch._dynamo.config.patch(error_on_recompile=known):
            got, grads = replayed(compiled, replay, routes)
        assert torch.equal(got, wanted)
        assert_near(grads, wanted_grads)


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ("wrapped", "eager"),
        pytest.param("wrapped", "aot_eager", marks=pytest.mark.parity),
        pytest.param("in place", "aot_eager", marks=pytest.mark.parity),
    ],
)
def test_a_model_that_was_compiled_before_replays(how: str, backend: str) -> None:
    reference, reference_replay = pair(**ONE)
    model = make_tiny_moe(**ONE)
    if how == "wrapped":
        model = torch.compile(model, backend=backend, fullgraph=True)
    else:
        model.compile(backend=backend, fullgraph=True)
    model(tokens())  # the graph without replay
    replay = RouterReplay(model)
    routes = random_routes(replay)
    with replay.replay(routes), reference_replay.replay(routes):
        assert torch.equal(model(tokens()).logits, reference(tokens()).logits)
    assert torch.equal(model(tokens()).logits, reference(tokens()).logits)


def test_compiled_layers_may_be_checkpointed() -> None:
    model, replay = pair(**ONE)
    routes = random_routes(replay)
    wanted, wanted_grads = replayed(model.train(), replay, routes)
    checkpoint_activations(model)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    got, grads = replayed(model, replay, routes)
    assert torch.equal(got, wanted)
    assert_near(grads, wanted_grads)


def backward_on_own_routes(*pairs: tuple[nn.Module, RouterReplay]) -> None:
    """The logits are the same."""
    rank, results = dist.get_rank(), []
    for model, replay in pairs:
        with replay.replay(random_routes(replay, seed=rank)):
            results.append(model(tokens(seed=rank)).logits)
        loss_of(results[-1]).backward()
    assert torch.equal(*results)


def train_sharded() -> None:
    """Each rank has a batch and routes of its own; gradients are those of the two losses' mean."""
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    reference, reference_replay = pair()
    model = make_tiny_moe().train()
    replay = RouterReplay(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    checkpoint_activations(model)
    backward_on_own_routes((model, replay), (reference.train(), reference_replay))
    for (name, sharded), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        dist.all_reduce(whole.grad)
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad / world, atol=1e-6, rtol=0, msg=name)
    replay.remove()


def test_replay_under_fsdp2_equals_one_process_exactly() -> None:
    run_as_ranks(train_sharded)


def train_with_float32_routers() -> None:
    """FSDP2 wants one dtype in a group: what is in float32 is sharded by itself, before its layer."""
    from torch.distributed.fsdp import fully_shard

    reference, reference_replay = in_bfloat16()
    model, replay = in_bfloat16()
    for module in model.modules():
        own = [*module.parameters(recurse=False)]
        if own and all(parameter.dtype == torch.float32 for parameter in own):
            fully_shard(module)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    backward_on_own_routes((model, replay), (reference, reference_replay))
    gate = model.get_submodule(replay.sites[0].name).weight
    wanted = reference.get_submodule(replay.sites[0].name).weight.grad
    dist.all_reduce(wanted)
    assert gate.grad.dtype == wanted.dtype == torch.float32
    torch.testing.assert_close(gate.grad.full_tensor(), wanted / dist.get_world_size(), atol=1e-6, rtol=0)


def in_bfloat16() -> tuple[nn.Module, RouterReplay]:
    """A model whose routers are in float32, as transformers has them from 5.24 on, whatever is installed."""
    model = make_tiny_moe("deepseek_v3", num_hidden_layers=2, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data = parameter.data.float()
    return model, RouterReplay(model.train())


def test_routers_in_float32_are_sharded_by_themselves_in_a_model_in_bfloat16() -> None:
    run_as_ranks(train_with_float32_routers)
