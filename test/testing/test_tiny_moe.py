"""make_tiny_moe: real architectures, reproducible weights, decisive routers, checked sizes, folders that load."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from torchrl_moe.testing.arithmetic import ArithmeticTask, CharacterTokenizer, WarmUp, answer_log_probs, encode, warm_up
from torchrl_moe.testing.byte_tokenizer import ByteTokenizer
from torchrl_moe.testing.tiny_moe import TINY_MOE_FAMILIES, make_tiny_moe, practised_tiny_moe, save_tiny_moe

FAMILIES = sorted(TINY_MOE_FAMILIES)
MOE_FAMILIES = [family for family in FAMILIES if TINY_MOE_FAMILIES[family].experts_key]
EXPERTS = {"qwen3_moe": (16, 4, 1), "mixtral": (8, 2, 0), "olmoe": (16, 4, 0), "deepseek_v3": (16, 4, 1)}
"""Experts, experts per token, and the first layer with a router."""
OWN: dict[str, Any] = {"vocab_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(7))


def run_routers(model: PreTrainedModel, ids: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Per decoder layer with a router: its logits ``[B * T, E]`` and the experts it chose ``[B * T, K]``, sorted."""
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(_module: object, _args: object, out: tuple[torch.Tensor, ...]) -> None:
            seen[layer] = out[0], out[2].sort(dim=-1).values

        return hook

    gates = [(name, module) for name, module in model.named_modules() if name.endswith(".mlp.gate")]
    handles = [module.register_forward_hook(keep(int(name.split(".")[2]))) for name, module in gates]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_gives_logits_over_the_byte_vocabulary_whose_special_ids_it_has(family: str) -> None:
    model = make_tiny_moe(family)
    assert not model.training
    with torch.no_grad():
        logits = model(random_ids(2, 9)).logits
    assert logits.shape == (2, 9, len(ByteTokenizer()))
    assert logits.dtype == torch.float32
    assert 0.7 < logits.std() < 1.5
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert 3 < entropy < math.log(259) - 0.3  # neither one token nor all alike
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (256, 257, 258)
    assert model.config.max_position_embeddings >= 2048
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_expert_is_used_by_context_and_the_kth_beats_the_next_by_far_more_than_noise(family: str) -> None:
    experts, top_k, first = EXPERTS[family]
    model, ids = make_tiny_moe(family), random_ids(8, 64)
    before = run_routers(model, ids)
    assert sorted(before) == list(range(first, 4))
    for logits, chosen in before.values():
        assert chosen.shape == (8 * 64, top_k)
        assert chosen.unique().tolist() == list(range(experts))
        assert 0.7 < logits.float().std() < 1.4
        entropy = torch.distributions.Categorical(logits=logits.float()).entropy().mean()
        assert entropy < math.log(experts) - 0.2
        ordered = logits.float().sort(dim=-1, descending=True).values
        margin = ordered[:, top_k - 1] - ordered[:, top_k]
        if family != "deepseek_v3":  # whose choice is not of logits alone
            assert margin.median() > 0.05
            assert (margin < 1e-5).float().mean() < 0.01
    last = max(before)
    other = run_routers(model, ids.flip(1))[last][1].view(8, 64, -1).flip(1)
    assert (before[last][1].view(8, 64, -1) != other).any(-1).float().mean() > 0.3
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=generator))
    after = run_routers(model, ids)
    assert all(torch.equal(before[layer][1], after[layer][1]) for layer in before)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_gives_the_same_weights(family: str) -> None:
    """And nothing else does: the global generator is neither read nor moved."""
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one = make_tiny_moe(family, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    two, other = (make_tiny_moe(family, seed=seed).state_dict() for seed in (3, 4))
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name
        assert not torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_float32_rounded_and_a_saved_folder_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    """But for what transformers loads in float32: correction biases, and from 5.24 on many families' routers."""
    full = make_tiny_moe(family, seed=5).state_dict()
    for dtype in (torch.float32, torch.bfloat16):
        folder = save_tiny_moe(tmp_path / "new" / str(dtype), family, dtype=dtype, seed=5)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        half, ids = make_tiny_moe(family, dtype=dtype, seed=5), random_ids(2, 16)
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, half(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("é <|im_end|>") == [195, 169, 32, 258]
    assert tokenizer.chat_template == ByteTokenizer().chat_template
    assert half.config.dtype == torch.bfloat16
    kept = loaded.state_dict()
    for name, tensor in half.state_dict().items():
        assert tensor.dtype == kept[name].dtype, name
        assert tensor.dtype == torch.bfloat16 or name.endswith(("e_score_correction_bias", "gate.weight")), name
        assert torch.equal(tensor, full[name].to(tensor.dtype)), name


def test_correction_bias_changes_the_choice(tmp_path: Path) -> None:
    model, ids = make_tiny_moe("deepseek_v3"), random_ids(4, 32)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3 and all(bias.abs().min() > 0 for bias in biases)
    with_bias = run_routers(model, ids)[1][1]
    for bias in biases:
        bias.zero_()
    changed = (run_routers(model, ids)[1][1] != with_bias).any(-1)
    assert 0.1 < changed.float().mean() < 0.9
    config = json.loads((save_tiny_moe(tmp_path, "deepseek_v3") / "config.json").read_text())
    assert (config["topk_method"], config["scoring_func"]) == ("noaux_tc", "sigmoid")
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]


def test_sizes_can_be_set_by_any_name_of_the_config() -> None:
    model = make_tiny_moe("qwen3_moe", num_hidden_layers=3, num_experts=64, num_experts_per_tok=8, hidden_size=32)
    (logits, chosen), *_ = run_routers(model, random_ids(1, 5)).values()
    assert (logits.shape, chosen.shape) == ((5, 64), (5, 8))
    assert model.config.hidden_size == 32
    alias = make_tiny_moe("mixtral", num_experts=4)  # an alias of num_local_experts
    assert alias.config.num_local_experts == alias.config.num_experts == 4
    assert sorted(run_routers(make_tiny_moe(mlp_only_layers=[], num_hidden_layers=2), random_ids(1, 4))) == [0, 1]
    alias = make_tiny_moe()
    alias.config.mlp_only_layers.append(1)
    assert make_tiny_moe().config.mlp_only_layers == [0]  # a changed config does not reach the next model


def test_tied_embeddings_and_a_vocabulary_of_ones_own(tmp_path: Path) -> None:
    model = make_tiny_moe(**OWN, tie_word_embeddings=True)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6]])).logits
    assert logits.shape == (1, 2, 48) and logits.std() < 3
    with pytest.raises(ValueError, match="vocab_size=48, but the saved ByteTokenizer has 259 tokens"):
        save_tiny_moe(tmp_path, **OWN)
    assert not list(tmp_path.iterdir())
    model, ids = make_tiny_moe(), random_ids(4, 64)  # gradients reach every parameter
    model(ids, labels=ids).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("gpt2", {}, "no tiny model of the family 'gpt2'; known: deepseek_v3, mixtral, olmoe, qwen3, qwen3_moe"),
        ("qwen3_moe", {"num_expert": 4}, "qwen3_moe has no config key 'num_expert'; close: 'num_experts'"),
        ("mixtral", {"zzz": 4}, "mixtral has no config key 'zzz'; known: .*hidden_size"),
        ("mixtral", {"model_type": "olmoe"}, "mixtral has no config key 'model_type'"),
        ("qwen3_moe", {"num_experts_per_tok": 17}, "num_experts_per_tok=17 must be between 1 and num_experts=16"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok=0 must be between 1 and num_local_experts=8"),
        ("deepseek_v3", {"n_group": 3}, "16 experts in n_group=3 groups .* cannot give 4"),
        ("deepseek_v3", {"num_experts_per_tok": 9}, "topk_group=2 are open cannot give 9 experts per token"),
        ("olmoe", {"num_key_value_heads": 3}, "num_attention_heads=2 is no multiple of num_key_value_heads=3"),
        ("olmoe", {"hidden_size": 65}, "hidden_size=65 is no multiple of num_attention_heads=2"),
        ("qwen3_moe", {"num_hidden_layers": 1}, "every one of the 1 layers of this qwen3_moe is dense"),
        ("qwen3_moe", {"vocab_size": 100}, "vocab_size=100 has no room for ByteTokenizer's .*pass ids of your own"),
        ("qwen3_moe", {"hidden_size": "big"}, "qwen3_moe refuses this config: .*hidden_size"),
    ],
)
def test_what_does_not_fit_is_refused(family: str, config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        make_tiny_moe(family, **config)


# -- a model that half knows the toy task ------------------------------------------------------------------------------


TASK = ArithmeticTask(digits=1, held_out=90)
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
OPTIONS = WarmUp(noisy_lr=1e-3, noise=0.7, noisy_target=0.3, mistake="random", batch_size=256)


def test_it_is_the_model_made_and_warmed_up_by_hand() -> None:
    before = torch.get_rng_state()
    model, tokenizer = practised_tiny_moe(TASK, OPTIONS, seed=3, **SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    by_hand = make_tiny_moe("qwen3_moe", seed=3, vocab_size=48, hidden_size=64, mlp_only_layers=[], **special, **SMALL)
    reached = warm_up(by_hand, TASK.train, CharacterTokenizer(), OPTIONS, 3)
    for name, value in by_hand.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert tokenizer.get_vocab() == CharacterTokenizer().get_vocab()
    assert {name: getattr(model.config, name) for name in special} == special
    assert 0.1 < reached <= 0.3
    assert not model.training
    with torch.no_grad():
        probabilities = answer_log_probs(model, *encode(TASK.train, tokenizer)).exp()
    assert probabilities.mean().item() < 0.9  # it doubts
    assert probabilities.mean().item() > 0.05  # but it knows


def test_too_few_steps_warn_and_what_does_not_fit_is_refused() -> None:
    with pytest.warns(UserWarning, match=r"ran out of steps \(max_steps=1\): exact answers have probability 0\.0"):
        practised_tiny_moe(TASK, WarmUp(max_steps=1, noisy_target=0.0), **SMALL)
    with pytest.raises(ValueError, match="max_steps must be an integer of at least 1, got 0"):
        practised_tiny_moe(TASK, WarmUp(max_steps=0), **SMALL)
    with pytest.raises(ValueError, match="num_experts_per_tok=9 must be between 1 and num_experts=8"):
        practised_tiny_moe(TASK, WarmUp(), **{**SMALL, "num_experts_per_tok": 9})
