"""The practised model: the same as one that is made and warmed up by hand, and where GRPO can start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.arithmetic import ArithmeticTask, CharacterTokenizer, WarmUp, answer_log_probs, encode, warm_up
from torchrl_moe.testing.tiny_moe import SIZES, practised_tiny_moe

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
    assert 0.1 < reached <= 0.3
    assert not model.training
    with torch.no_grad():
        probabilities = answer_log_probs(model, *encode(TASK.train, tokenizer)).exp()
    assert probabilities.mean().item() < 0.9  # it doubts
    assert probabilities.mean().item() > 0.05  # but it knows


def test_another_seed_is_another_model() -> None:
    once = WarmUp(max_steps=1, noisy_target=1.0)
    models = [practised_tiny_moe(TASK, once, seed, **SMALL)[0] for seed in (0, 0, 1)]
    weights = [model.get_input_embeddings().weight for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_defaults_are_the_tutorials() -> None:
    model, _ = practised_tiny_moe(TASK, WarmUp(max_steps=1, noisy_target=1.0))
    config = model.config
    assert {name: getattr(config, name) for name in SIZES} == SIZES
    assert (config.num_hidden_layers, config.num_experts, config.mlp_only_layers) == (8, 32, [])
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id, config.bos_token_id) == (48, 0, 1, None)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_too_few_steps_warn() -> None:
    short = WarmUp(max_steps=1, noisy_target=0.0)
    with pytest.warns(UserWarning, match=r"ran out of steps \(max_steps=1\): exact answers have probability 0\.0"):
        practised_tiny_moe(TASK, short, **SMALL)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="max_steps must be a positive whole number, got 0"):
        practised_tiny_moe(TASK, WarmUp(max_steps=0), **SMALL)
    with pytest.raises(ValueError, match="num_experts_per_tok=9 must be between 1 and num_experts=8"):
        practised_tiny_moe(TASK, WarmUp(), **{**SMALL, "num_experts_per_tok": 9})
