"""A tiny MoE with a LoRA adapter on its attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from torchrl_moe.testing import make_tiny_moe

__all__ = ["save_adapted"]


def save_adapted(family: str, folder: Path) -> Any:
    """Return such a model, whose adapter says something, and save the adapter alone."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = get_peft_model(make_tiny_moe(family), config)
    model.save_pretrained(folder)
    return model
