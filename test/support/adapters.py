"""A tiny MoE with a LoRA adapter on its attention, and whether transformers itself can add one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from transformers.integrations.peft import MIN_PEFT_VERSION

from torchrl_moe.testing import make_tiny_moe

__all__ = ["save_adapted", "takes_adapters"]

takes_adapters = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"transformers' own add_adapter needs peft {MIN_PEFT_VERSION}",
)


def save_adapted(family: str, folder: Path) -> Any:
    """Return such a model, whose adapter says something, and save the adapter alone."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = get_peft_model(make_tiny_moe(family), config)
    model.save_pretrained(folder)
    return model
