"""Every MoE of transformers that is tested, made small; those that are refused; and those left out, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from support.family_configs import BFLOAT16_SINCE, CONFIGS, LARGER, REFUSED_CONFIGS, SINCE
from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.testing.tiny_moe import _draw_weights

# fmt: off
SMALL: Mapping[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}
# fmt: on
E, K = 8, 3
OLDEST = "5.18"
"""The oldest release of transformers that ``pyproject.toml`` allows."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model type of transformers, one way it is configured, and what replay is to find in it: E = 8, K = 3."""

    formula: str  # a key of gating.FORMULAS
    config: Mapping[str, Any] = field(default_factory=dict)  # over SMALL; of the text part, where there are others
    model_type: str = ""  # if it is not the family's name
    model_class: str = ""  # if it is no AutoModelForCausalLM
    layers: Sequence[int] = (0, 1, 2)  # those with a router
    dense: str = ""  # the config key that makes the others dense
    notes: str = ""  # for the page's table


FAMILIES: Mapping[str, Family] = {name: Family(**values) for name, values in CONFIGS.items()}
"""All are replayed exactly. Several ways of one model type have its name and a suffix in brackets."""

REFUSED: Mapping[str, Mapping[str, Any]] = REFUSED_CONFIGS
"""By model type: ``says``, of the error, and what else a :class:`Family` has."""

EXCLUDED: Mapping[str, str] = {
    "deepseek_ocr2": "an image-to-text model; its text part is DeepSeek-V2",
    "diffusion_gemma": "a block diffusion model, no causal one",
    "ernie4_5_vl_moe": "tokens of text and of images have routers of their own: two in each layer",
    "muse_spark": "images, sound and text; no text model of its own",
    "granite_docling": "its router chooses a path for images, not experts",
    "openai_privacy_filter": "a token classifier",
    "qwen3_omni_moe": "speech and text; its thinker is Qwen3-VL-MoE",
    "step3p7": "images and text; no text model of its own",
    "unlimited_ocr": "an image-to-text model; its text part is DeepSeek-V2",
    "vitpose_backbone": "a vision backbone",
}
"""Folders of transformers with experts that are no causal language models, or have no text model of their own."""


def model_type(name: str) -> str:
    """The one in the config; a family's name without what is in brackets, if none is given."""
    known = FAMILIES[name].model_type if name in FAMILIES else REFUSED[name].get("model_type", "")
    return known or name.partition(" (")[0]


def since(name: str) -> Version:
    """The release of transformers that brought a family, or the oldest that is allowed."""
    return Version(SINCE.get(name.partition(" (")[0], OLDEST))


def is_absent(name: str, release: str = transformers.__version__) -> bool:
    """Whether a release of transformers has no such family."""
    return Version(release) < since(name)


def runs_in_bfloat16(name: str) -> bool:
    """Whether this release's own code can run a family in bfloat16."""
    return Version(transformers.__version__) >= Version(BFLOAT16_SINCE.get(name, OLDEST))


def build(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> PreTrainedModel:
    """A tiny model of a family, in eval mode."""
    if is_absent(name):
        pytest.skip(f"transformers {since(name)} brought {model_type(name)}, this is {transformers.__version__}")
    family = FAMILIES.get(name) or Family(**{k: v for k, v in REFUSED[name].items() if k != "says"})
    values = {**SMALL, **family.config, **more}
    if name in LARGER:
        values = {"text_config": values, **LARGER[name]}
    config = AutoConfig.for_model(model_type(name), **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        make = getattr(transformers, family.model_class)._from_config if family.model_class else None
        model = (make or AutoModelForCausalLM.from_config)(config, dtype=dtype)
    fixed = {buffer: buffer.clone() for buffer in model.buffers() if not buffer.is_floating_point()}
    generator = torch.Generator().manual_seed(seed)
    _draw_weights(model, generator)
    for buffer, values in fixed.items():
        is_hash = buffer.ndim == 2  # experts by token
        buffer.copy_(torch.rand(len(buffer), E, generator=generator).argsort(-1)[:, :K] if is_hash else values)
    return model.eval()


@cache
def shared_pair(name: str) -> tuple[PreTrainedModel, RouterReplay]:
    """A family's model and its replay, made once for all tests of a process: leave both as you found them."""
    model = build(name)
    return model, RouterReplay(model)
