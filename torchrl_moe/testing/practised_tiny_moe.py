"""A tiny MoE that half knows a toy task: the starting point of GRPO in tutorials, tests and benchmarks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from torchrl_moe.testing.arithmetic import ArithmeticTask, CharacterTokenizer
from torchrl_moe.testing.tiny_moe import make_tiny_moe
from torchrl_moe.testing.warm_up import WarmUp, warm_up

__all__ = ["practised_tiny_moe"]

SIZES = {"hidden_size": 64, "num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4}


def practised_tiny_moe(
    task: ArithmeticTask | Mapping[str, Any] | None = None,
    warmup: WarmUp | Mapping[str, Any] | None = None,
    seed: int = 0,
    **sizes: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a tiny Qwen3-MoE that has been warmed up on a task, in eval mode, float32, and its tokenizer.

    Args:
        task: the task to practise on, or its options by name; default: doubling numbers of 4 digits, with 200 problems
            held out by ``seed``.
        warmup: options of the warm-up, or a mapping of them; default: ``WarmUp()``.
        seed: of the weights and of the warm-up. Equal seeds give equal models on the same machine with the same number
            of threads; torch's global generators are left unchanged.
        **sizes: config keys of the architecture, over hidden size 64, 8 layers, and 4 of 32 experts for each token.

    Raises:
        ValueError: invalid sizes, or invalid options of the warm-up.

    Warns:
        UserWarning: the warm-up ran out of steps, so GRPO may have little to improve.

    >>> task = ArithmeticTask(digits=1, held_out=90)
    >>> warmup = WarmUp(max_steps=1, noisy_target=1.0)
    >>> model, tokenizer = practised_tiny_moe(task, warmup, num_hidden_layers=1, num_experts=8)
    >>> model.config.num_experts, model.config.num_experts_per_tok, len(tokenizer)
    (8, 4, 48)
    """
    default = {"operation": "double", "digits": 4, "held_out": 200, "seed": seed}
    task = task if isinstance(task, ArithmeticTask) else ArithmeticTask(**{**default, **(task or {})})
    warmup = warmup if isinstance(warmup, WarmUp) else WarmUp(**(warmup or {}))
    warmup.check()
    tokenizer = CharacterTokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = {"vocab_size": len(tokenizer), "mlp_only_layers": [], **special, **SIZES, **sizes}
    model = make_tiny_moe("qwen3_moe", seed=seed, **config)
    reached = warm_up(model, task.train, tokenizer, warmup, seed)
    if reached > warmup.noisy_target:
        warnings.warn(
            f"the warm-up ran out of steps (max_steps={warmup.max_steps}): exact answers have probability "
            f"{reached:.2f}, above {warmup.noisy_target:g}, and GRPO may have little to improve",
            stacklevel=2,
        )
    return model, tokenizer
