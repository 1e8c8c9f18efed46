"""Noise on a dial: shares and choices of flips, worked-out quantisation, stale weights, and what replay removes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor
from torchrl.modules.llm.policies import Tokens
from transformers import PreTrainedModel

from torchrl_moe.modules import RouterReplay, TransformersWrapper, float32_routers
from torchrl_moe.testing import Noise, NoisyModel, make_tiny_moe, without_kept_tokens
from torchrl_moe.testing.noise import fake_quantised

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3")


def ids(rows: int = 8, tokens: int = 64) -> Tensor:
    return torch.randint(0, 256, (rows, tokens), generator=torch.Generator().manual_seed(3))


def recorded(model: PreTrainedModel, noise: Noise, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The experts ``[B, T, L, K]`` that a noisy forward pass uses, and its logits."""
    with torch.no_grad(), noise.on(model), RouterReplay.of(model).record() as recording:
        logits = model(tokens).logits
    return recording.routed_experts, logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_share_of_rows_has_another_weakest_expert_and_no_other_change(family: str) -> None:
    model, tokens = make_tiny_moe(family, num_hidden_layers=2), ids()
    layer = RouterReplay.of(model).layers[0]  # its input is the same with and without noise
    own, clean = recorded(model, Noise(), tokens)
    noisy, logits = recorded(model, Noise(flips=0.25), tokens)
    before, after = own[:, :, layer], noisy[:, :, layer]
    assert torch.equal(before[..., :-1], after[..., :-1])
    share = float((before[..., -1] != after[..., -1]).float().mean())
    # 512 rows: four standard deviations are 0.077
    assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / tokens.numel())
    assert not torch.equal(clean, logits)
    # the recording is complete: replayed, it gives the noisy logits, bit by bit
    with torch.no_grad(), RouterReplay.of(model).replay(noisy):
        assert torch.equal(model(tokens).logits, logits)


@pytest.mark.parametrize("nearest", [True, False])
def test_no_expert_of_an_excluded_group_is_swapped_in(nearest: bool) -> None:
    """One group of four of the four is allowed: there is nothing to flip to."""
    model = make_tiny_moe("deepseek_v3", num_hidden_layers=2, n_routed_experts=16, n_group=4, topk_group=1)
    own, noisy = (recorded(model, noise, ids())[0] for noise in (Noise(), Noise(flips=1.0, nearest=nearest)))
    assert torch.equal(own, noisy)


def test_the_nearest_expert_is_the_first_one_left_out_and_a_random_one_any_of_them() -> None:
    model, tokens = make_tiny_moe("mixtral", num_hidden_layers=1), ids(16, 128)
    with torch.no_grad():
        (logits,) = model(tokens, output_router_logits=True).router_logits
    order = logits.view(16, 128, -1).argsort(-1, descending=True)
    near, random = (recorded(model, Noise(flips=1.0, nearest=nearest), tokens)[0][:, :, 0] for nearest in (True, False))
    assert torch.equal(near.long(), order[..., [0, 2]])
    assert torch.equal(random[..., 0].long(), order[..., 0])
    ranks = (order == random[..., 1:].long()).float().argmax(-1)
    counts = ranks.flatten().bincount(minlength=8)
    assert counts[:2].tolist() == [0, 0]
    # 2048 rows over six experts: 341 each, four standard deviations are 68
    assert (counts[2:] - tokens.numel() / 6).abs().max() < 68


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_of_router_logits_has_its_size(family: str) -> None:
    model, tokens = make_tiny_moe(family, num_hidden_layers=2), ids()
    router = model.get_submodule(RouterReplay.of(model).sites[0].name)
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_: object, inputs: tuple[Tensor, ...], result: Any) -> None:
        seen.append((inputs[0].detach(), (result[0] if isinstance(result, tuple) else result).detach()))

    hook = router.register_forward_hook(keep)
    with torch.no_grad(), Noise(router_std=0.5).on(model):
        model(tokens)
    hook.remove()
    ((hidden, moved),) = seen
    weight = router.weight.detach()
    gap = moved.reshape(-1, len(weight)) - hidden.reshape(-1, weight.shape[1]) @ weight.T
    assert abs(float(gap.std()) - 0.5) < 0.03 and abs(float(gap.mean())) < 0.03
    routes = recorded(model, Noise(), tokens)[0], recorded(model, Noise(router_std=0.5), tokens)[0]
    assert not torch.equal(*(one.sort(-1).values for one in routes))


def test_equal_seeds_are_equal_noise_and_the_generator_of_torch_is_not_drawn_from() -> None:
    model, tokens = make_tiny_moe(), ids(2, 16)
    before = torch.get_rng_state()
    first, again, other = (recorded(model, Noise(flips=0.3, nearest=False, seed=s), tokens)[0] for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())
    # nothing is left behind
    assert torch.equal(recorded(model, Noise(), tokens)[0], recorded(make_tiny_moe(), Noise(), tokens)[0])


def test_a_trainer_under_noise_that_follows_recorded_experts_has_none() -> None:
    model, tokens = make_tiny_moe(), ids(2, 16)
    own, clean = recorded(model, Noise(), tokens)
    with Noise(flips=0.5).on(model):
        live = model(tokens).logits
        with RouterReplay.of(model).replay(own):
            replayed = model(tokens).logits
    assert torch.equal(replayed, clean) and not torch.equal(live, clean)
    live.sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(grad.isfinite().all() for grad in grads.values())
    assert all(grads[f"model.layers.{layer}.mlp.gate.weight"].any() for layer in (1, 2, 3))


def test_quantised_weights_are_those_worked_out_by_hand() -> None:
    model = make_tiny_moe("mixtral", num_hidden_layers=1)
    name = "model.layers.0.self_attn.q_proj.weight"
    with torch.no_grad():
        weight = model.get_parameter(name)
        weight.zero_()
        weight[0, :3] = torch.tensor([127.0, 1.4, -2.6])
        weight[1, :4] = torch.tensor([448.0, 17.0, 18.9, -0.001])
    int8 = NoisyModel(model, Noise(weights="int8")).model.get_parameter(name)
    assert int8[0, :4].tolist() == [127.0, 1.0, -3.0, 0.0]
    float8 = NoisyModel(model, Noise(weights="float8")).model.get_parameter(name)
    # e4m3 has three bits after the first: steps of 2 from 16 to 32, and of 2^-9 at the smallest
    assert float8[1, :4].tolist() == [448.0, 16.0, 18.0, -(2.0**-9)]
    (router,) = [n for n, _ in model.named_parameters() if n.endswith("gate.weight")]
    quantised = NoisyModel(model, Noise(weights="int8")).model
    for kept in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", router):
        assert torch.equal(quantised.get_parameter(kept), model.get_parameter(kept))


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_in_one_tensor_have_a_scale_for_each_output_of_each_expert(transposed: bool) -> None:
    """gpt_oss and llama4 hold ``[E, inputs, outputs]``; the others ``[E, outputs, inputs]``."""
    model = make_tiny_moe("qwen3_moe", num_hidden_layers=2)
    experts = model.get_submodule("model.layers.1.mlp.experts")
    assert experts.is_transposed is False
    experts.is_transposed = transposed  # only what says where the outputs are; no forward pass follows
    name = "model.layers.1.mlp.experts.down_proj"
    weight = model.get_parameter(name)
    with torch.no_grad():
        weight.zero_()
        of_output = weight.transpose(1, 2) if transposed else weight
        of_output[0, 0, :3] = torch.tensor([127.0, 1.4, -2.6])
        of_output[0, 1, :3] = torch.tensor([12.7, 1.44, -0.26])
        of_output[1, 0, :3] = torch.tensor([1.27, 0.144, -0.026])
    copied = NoisyModel(model, Noise(weights="int8")).model.get_parameter(name)
    found = copied.transpose(1, 2) if transposed else copied
    assert found[0, 0, :3].tolist() == [127.0, 1.0, -3.0]
    assert torch.allclose(found[0, 1, :3], torch.tensor([12.7, 1.4, -0.3]))
    assert torch.allclose(found[1, 0, :3], torch.tensor([1.27, 0.14, -0.03]))


def test_biases_and_convolutions_are_not_quantised_and_experts_of_own_code_are_refused() -> None:
    model = make_tiny_moe("qwen3_moe", num_hidden_layers=2)
    experts = model.get_submodule("model.layers.1.mlp.experts")
    experts.down_proj_bias = torch.nn.Parameter(torch.randn(16, 64))
    model.model.conv = torch.nn.Conv1d(2, 3, 4)
    copied = NoisyModel(model, Noise(weights="int8")).model
    for kept in ("model.layers.1.mlp.experts.down_proj_bias", "model.conv.weight"):
        assert torch.equal(copied.get_parameter(kept), model.get_parameter(kept))
    changed = "model.layers.1.mlp.experts.down_proj"
    assert not torch.equal(copied.get_parameter(changed), model.get_parameter(changed))
    del experts.is_transposed
    with pytest.raises(ValueError, match=r"weights='int8': .*Experts computes its experts"):
        NoisyModel(model, Noise(weights="int8"))


def test_quantised_activations_are_the_inputs_of_layers_and_experts_row_by_row() -> None:
    model, noise = make_tiny_moe("qwen3_moe", num_hidden_layers=2), Noise(activations="int8")
    layer, seen = "model.layers.1.self_attn.q_proj", {}
    for name in (layer, "lm_head", "model.layers.1.mlp.gate"):

        def keep(_: object, inputs: tuple[Tensor, ...], output: Any, name: str = name) -> None:
            seen[name] = inputs[0].flatten(0, -2), (output if isinstance(output, Tensor) else output[0]).flatten(0, -2)

        model.get_submodule(name).register_forward_hook(keep)
    logits = {}
    for implementation in ("grouped_mm", "eager"):
        model.set_experts_implementation(implementation)
        with noise.on(model), torch.no_grad():
            logits[implementation] = model(ids(2, 16)).logits
    torch.testing.assert_close(logits["eager"], logits["grouped_mm"], rtol=1e-4, atol=1e-4)
    x, out = seen.pop(layer)
    scale, weight = x.abs().amax(-1, keepdim=True) / 127, model.get_parameter(f"{layer}.weight")  # of each token
    torch.testing.assert_close(out, (x / scale).round() @ weight.T * scale)
    assert not torch.allclose(out, x @ weight.T, rtol=1e-3)
    for name, (x, out) in seen.items():  # the inputs of head and router stay
        torch.testing.assert_close(out, x @ model.get_parameter(f"{name}.weight").T, msg=name)
    # experts: both products, on the inputs and on what is between
    experts = model.get_submodule("model.layers.1.mlp.experts")
    hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    with noise.on(model), torch.no_grad():
        found = experts(hidden, torch.tensor([[2]]), torch.ones(1, 1))
    with torch.no_grad():
        gate, up = (fake_quantised(hidden, "int8", -1) @ experts.gate_up_proj[2].T).chunk(2, -1)
        between = fake_quantised(torch.nn.functional.silu(gate) * up, "int8", -1)
        torch.testing.assert_close(found, between @ experts.down_proj[2].T)
    model.set_experts_implementation("batched_mm")
    with pytest.raises(ValueError, match="computed with 'batched_mm'"), noise.on(model):
        pass


def test_gradients_pass_straight_through_the_rounding_however_a_layer_is_called() -> None:
    model = make_tiny_moe("qwen3_moe", num_hidden_layers=2)
    plain = model.get_submodule("model.layers.1.self_attn.q_proj")
    inputs = torch.tensor([[1.0, 0.3, *[0.0] * 62], [0.0] * 64], requires_grad=True)
    with Noise(activations="int8").on(model):
        by_name = torch.nn.functional.linear(input=inputs, weight=plain.weight)
        given = torch.nn.functional.linear(inputs, plain.weight)
    assert torch.equal(by_name, given) and bool((given[1] == 0).all())
    given.sum().backward()
    torch.testing.assert_close(inputs.grad, plain.weight.sum(0).expand(2, -1))
    zeros = fake_quantised(torch.zeros(1, 4, dtype=torch.bfloat16), "float8", -1)
    assert torch.equal(zeros, torch.zeros_like(zeros))


def test_a_copy_in_bfloat16_keeps_float32_routers_and_the_frequencies_of_its_trainer() -> None:
    """As an engine has them; frequencies that are rounded would differ more with each token of an answer."""
    model = make_tiny_moe("mixtral", num_hidden_layers=2, dtype=torch.bfloat16)
    names = float32_routers(model)
    copied = NoisyModel(model, Noise()).model
    assert [copied.get_parameter(name).dtype for name in names] == [torch.float32] * 2
    assert copied.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(copied(ids(2, 8)).logits, model(ids(2, 8)).logits)
    model = make_tiny_moe("qwen3_moe", num_hidden_layers=2)
    alone, both = (NoisyModel(model, Noise(dtype=torch.bfloat16, flips=flips)) for flips in (0.0, 0.3))
    frequencies = [one.get_buffer("model.rotary_emb.inv_freq") for one in (model, alone.model)]
    assert alone.model.dtype == torch.bfloat16
    assert torch.equal(*frequencies)
    # what is combined adds up, and flips are on while it runs only
    with torch.no_grad():
        with alone.running() as one, both.running() as other:
            assert not torch.equal(one(ids(2, 32)).logits, other(ids(2, 32)).logits)
        assert torch.equal(alone.model(ids(2, 32)).logits, both.model(ids(2, 32)).logits)


def test_flips_need_an_expert_that_was_left_out() -> None:
    model = make_tiny_moe("mixtral", num_hidden_layers=2, num_local_experts=2)
    noisy = Noise(flips=0.5).on(model)
    with pytest.raises(ValueError, match=r"flips=0\.5: every router chooses all of its experts"):
        noisy.__enter__()
    with Noise(router_std=0.5).on(model), torch.no_grad():
        model(ids(1, 8))


def test_the_copy_has_the_weights_of_so_many_updates_ago() -> None:
    model = make_tiny_moe(num_hidden_layers=2)
    norm = model.get_parameter("model.norm.weight")
    rollouts = NoisyModel(model, Noise(stale=2))
    held = rollouts.model.get_parameter("model.norm.weight")
    found = []
    for update in range(1, 5):
        with torch.no_grad():
            norm.fill_(float(update))
        rollouts.take_weights(model)
        found.append(float(held[0]))
    # before the first update it had 1 + 0.1 * N(0, 1)
    assert found[2:] == [1.0, 2.0] and found[0] == found[1] != 1.0


def test_answers_of_a_noisy_model_are_replayed_to_rounding_and_the_live_router_is_off() -> None:
    trainer = make_tiny_moe()
    rollouts = NoisyModel(trainer, Noise(flips=0.3))
    policy = TransformersWrapper(
        rollouts.model, input_mode="tokens", generate=True, generate_kwargs={"max_new_tokens": 12, "temperature": 1.0}
    )
    prompts = lazy_stack([TensorDict(tokens=Tokens(prompt=row)) for row in ids(4, 6)])
    torch.manual_seed(0)
    with rollouts.running():
        batch = policy(prompts)
    gaps = {}
    for replay in ("R3", "none"):
        actor = TransformersWrapper(trainer, replay=replay)
        with torch.no_grad():
            scores = actor.score(batch.copy(), entropy=False)[0]
        sampled = [row["log_probs", "full"] for row in batch.unbind(0)]
        of_rows = [own[len(own) - len(row) :] - row for row, own in zip(sampled, scores, strict=True)]
        gaps[replay] = max(float(gap[gap.isfinite()].abs().max()) for gap in of_rows)
    assert gaps["R3"] < 1e-5 < 1e-2 < gaps["none"]


def test_without_kept_tokens_the_log_probs_are_off_by_the_mass_that_was_kept() -> None:
    model = make_tiny_moe(num_hidden_layers=2)
    policy = TransformersWrapper(
        model, input_mode="tokens", generate=True,
        generate_kwargs={"max_new_tokens": 1, "temperature": 1.0, "top_k": 5},
    )  # fmt: skip
    prompts = lazy_stack([TensorDict(tokens=Tokens(prompt=row)) for row in ids(3, 6)])
    torch.manual_seed(0)
    batch = policy(prompts)
    actor = TransformersWrapper(model, replay="R3")
    with torch.no_grad():
        told, untold = (actor.score(one, entropy=False)[0][:, -1] for one in (batch.copy(), without_kept_tokens(batch)))
        mass = model(ids(3, 6)).logits[:, -1].softmax(-1).topk(5).values.sum(-1)
    assert torch.allclose(untold - told, mass.log(), atol=1e-5)
    assert "kept" in batch[0]["sampling"] and "kept" not in without_kept_tokens(batch)[0]["sampling"]
    assert len(without_kept_tokens(TensorDict(batch_size=[0]))) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"flips": 1.5}, "flips must be"),
        ({"flips": float("nan")}, "flips must be"),
        ({"router_std": -1}, "router_std must be"),
        ({"stale": 0.5}, "stale must be"),
        ({"weights": "int4"}, "weights must be one of int8, float8, or None, got 'int4'"),
        ({"activations": "fp8"}, "activations must be one of int8, float8, or None, got 'fp8'"),
        ({"dtype": torch.int8}, "dtype must be a floating torch.dtype, or None, got torch.int8"),
        ({"nearest": 1}, "nearest"),
    ],
)
def test_noise_that_is_none_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Noise(**given)  # type: ignore[arg-type]
    assert not Noise(seed=3, nearest=False).is_on
    assert Noise(flips=0.1).is_on and Noise(stale=1).is_on and Noise(dtype=torch.bfloat16).is_on
