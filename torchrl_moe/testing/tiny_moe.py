"""Tiny Mixture-of-Experts models of real architectures, built in milliseconds, that load in vLLM as well.

A family is a ``transformers`` model type and one entry in :data:`TINY_MOE_FAMILIES`; its modelling code is
transformers' own. Weights are N(0, 1 / fan_in), not the usual N(0, 0.02²): router scores then have unit variance, so a
router clearly prefers some experts, as a trained one does, and replaying another choice is visible in the log-probs.

The models know nothing: they continue text with random bytes.

Legend: B sequences, T tokens, V vocabulary, E experts, K experts per token.
"""

from __future__ import annotations

import copy
import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from torchrl_moe.testing.arithmetic import ArithmeticTask, CharacterTokenizer, WarmUp, warm_up
from torchrl_moe.testing.byte_tokenizer import ByteTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyMoEFamily:
    """How to make one architecture small. The key in :data:`TINY_MOE_FAMILIES` is its ``model_type``."""

    experts_key: str | None = "num_experts"
    """Config key of the number of experts; None for a dense architecture."""

    top_k_key: str = "num_experts_per_tok"
    """Config key of the number of experts per token."""

    config: Mapping[str, object] = field(default_factory=dict)
    """Config keys over the common small sizes. Keys that the config class does not declare are allowed here."""


_SMALL: Mapping[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

TINY_MOE_FAMILIES: Mapping[str, TinyMoEFamily] = MappingProxyType(
    {
        "qwen3_moe": TinyMoEFamily(
            config={
                "num_experts": 16,
                "num_experts_per_tok": 4,
                "norm_topk_prob": True,
                "moe_intermediate_size": 32,
                "mlp_only_layers": [0],
                "head_dim": 32,
            },
        ),
        "mixtral": TinyMoEFamily(
            experts_key="num_local_experts",
            config={"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 32},
        ),
        "olmoe": TinyMoEFamily(
            config={"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 32, "num_attention_heads": 2},
        ),
        "deepseek_v3": TinyMoEFamily(
            experts_key="n_routed_experts",
            config={
                "n_routed_experts": 16,
                "num_experts_per_tok": 4,
                "n_group": 4,
                "topk_group": 2,
                "moe_intermediate_size": 32,
                "first_k_dense_replace": 1,
                "topk_method": "noaux_tc",  # vLLM reads these two, transformers does not know them: without them vLLM
                "scoring_func": "sigmoid",  # has no correction bias (KeyError) and scores by softmax (other routes)
                "q_lora_rank": 32,
                "kv_lora_rank": 512,  # vLLM's MLA kernels on CPU take 512 + 64 and nothing else
                "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 32,
                "v_head_dim": 32,
                "num_key_value_heads": 4,
                "num_mtp_layers": 0,
            },
        ),
        "qwen3": TinyMoEFamily(experts_key=None, config={"head_dim": 32}),
    }
)
"""The known architectures, by ``model_type``. To add one: an entry here, and a parity check of its folder in vLLM."""

_NOT_SETTABLE = {"_name_or_path", "architectures", "dtype", "model_type", "transformers_version"}


def make_tiny_moe(
    family: str = "qwen3_moe", *, seed: int = 0, dtype: torch.dtype = torch.float32, **hf_config: Any
) -> PreTrainedModel:
    """Build a tiny causal language model in eval mode: ``input_ids [B, T] -> logits [B, T, V]``.

    Args:
        family: A key of :data:`TINY_MOE_FAMILIES`. "qwen3" is dense: no experts.
        seed: Of the weights. Equal seeds give equal weights; the global generators are left unchanged.
        dtype: Of the parameters. Drawn in float32 and rounded; what the architecture keeps in float32 stays so.
        **hf_config: Config keys of the architecture, as ``transformers`` names them, over the small defaults (V = 259,
            :func:`~torchrl_moe.testing.byte_tokenizer.ByteTokenizer`'s vocabulary, with its pad, bos and eos ids).

    Raises:
        ValueError: An unknown family or config key, or sizes that do not fit together.

    Example:
        >>> model = make_tiny_moe("mixtral", num_hidden_layers=2)
        >>> model(torch.tensor([[72, 105]])).logits.shape
        torch.Size([1, 2, 259])
        >>> make_tiny_moe("mixtral", rms_eps=1e-6)
        Traceback (most recent call last):
        ...
        ValueError: mixtral has no config key 'rms_eps'; close: 'rms_norm_eps'
    """
    if family not in TINY_MOE_FAMILIES:
        raise ValueError(f"no tiny model of the family {family!r}; known: {', '.join(sorted(TINY_MOE_FAMILIES))}")
    recipe, config = TINY_MOE_FAMILIES[family], _make_config(family, hf_config)
    _check_sizes(recipe, config)
    # transformers draws weights of its own first: neither they nor the caller's generator may depend on each other
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if recipe.experts_key is not None and not any(".experts." in name for name in model.state_dict()):
        raise ValueError(
            f"every one of the {config.num_hidden_layers} layers of this {family} is dense; more num_hidden_layers, or "
            "fewer dense ones (mlp_only_layers, first_k_dense_replace)"
        )
    _draw_weights(model, torch.Generator().manual_seed(seed))
    return model.eval()


def save_tiny_moe(
    folder: str | Path,
    family: str = "qwen3_moe",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **hf_config: Any,
) -> Path:
    """Save :func:`make_tiny_moe` and its tokenizer to one folder, which loads in ``transformers`` and in vLLM.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save_tiny_moe(folder, "olmoe", num_hidden_layers=1)
        ...     sorted(file.name for file in path.iterdir() if file.suffix == ".safetensors")
        ['model.safetensors']
    """
    tokenizer = ByteTokenizer()
    vocab_size = hf_config.get("vocab_size", len(tokenizer))
    if vocab_size < len(tokenizer):
        raise ValueError(
            f"vocab_size={vocab_size}, but the saved ByteTokenizer has {len(tokenizer)} tokens; "
            "use make_tiny_moe(...).save_pretrained and save a tokenizer of your own"
        )
    model = make_tiny_moe(family, seed=seed, dtype=dtype, **hf_config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def _make_config(family: str, overrides: Mapping[str, object]) -> PreTrainedConfig:
    """The small config with the overrides; aliases (``attribute_map``) are resolved, so that the last value wins."""
    declared, tokenizer = AutoConfig.for_model(family), ByteTokenizer()
    aliases = declared.attribute_map
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    vocab_size: Any = overrides.get("vocab_size", len(tokenizer))
    if outside := {key: id_ for key, id_ in ids.items() if key not in overrides and id_ >= vocab_size}:
        raise ValueError(f"vocab_size={vocab_size} has no room for ByteTokenizer's {outside}; pass ids of your own")
    own = {"vocab_size": len(tokenizer), **ids}
    # copied: a config keeps the lists that it is given, and a caller may change them
    defaults = copy.deepcopy({**_SMALL, **own, **TINY_MOE_FAMILIES[family].config})
    known = {*declared.to_dict(), *aliases, *defaults} - _NOT_SETTABLE
    # transformers would store an unknown key and ignore it
    for key in overrides:
        if key not in known:
            close = difflib.get_close_matches(key, sorted(known), n=3)
            hint = f"close: {', '.join(map(repr, close))}" if close else f"known: {', '.join(sorted(known))}"
            raise ValueError(f"{family} has no config key {key!r}; {hint}")
    values = {aliases.get(key, key): value for settings in (defaults, overrides) for key, value in settings.items()}
    try:
        return AutoConfig.for_model(family, **values)
    except StrictDataclassError as error:
        raise ValueError(f"{family} refuses this config: {error}") from error


def _check_sizes(family: TinyMoEFamily, config: PreTrainedConfig) -> None:
    """Refuse sizes that the architecture would accept but compute nonsense with, or fail on late."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    if getattr(config, "head_dim", None) is None and config.hidden_size % heads:
        raise ValueError(f"hidden_size={config.hidden_size} is no multiple of num_attention_heads={heads}")
    if family.experts_key is None:
        return
    # families without groups have one group, which is open
    experts, top_k = getattr(config, family.experts_key), getattr(config, family.top_k_key)
    if not 1 <= top_k <= experts:
        raise ValueError(f"{family.top_k_key}={top_k} must be between 1 and {family.experts_key}={experts}")
    groups, open_groups = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
    if experts % groups or not 1 <= open_groups <= groups or top_k > open_groups * (experts // groups):
        raise ValueError(
            f"{experts} experts in n_group={groups} groups of which topk_group={open_groups} are open cannot give "
            f"{top_k} experts per token: groups must be equal, and the open ones hold at least as many experts"
        )


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Matrices N(0, 1 / fan_in), embeddings N(0, 1), vectors (norms, biases, correction biases) init + N(0, 0.1²).

    fan_in is the last dimension, also of stacked experts ``[E, out, in]``. Vectors differ from their init, so that a
    test notices if one of them is not sent or not loaded.
    """
    # persistent buffers too: a correction bias is one, and left at zero it would choose nothing
    persistent = model.state_dict().keys()
    tensors = [*model.named_parameters(), *((name, b) for name, b in model.named_buffers() if name in persistent)]
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    kept_in_float32 = model._keep_in_fp32_modules_strict or ()
    for name, tensor in tensors:
        noise = torch.randn(tensor.shape, generator=generator)
        if any(f".{part}." in f".{name}." for part in kept_in_float32):
            tensor.data = tensor.data.float()  # from_config forgets this, from_pretrained does not
        # tied embeddings are the head's matrix as well: N(0, 1) would make its logits far too large
        if tensor.ndim < 2:
            tensor.add_(0.1 * noise)
        elif id(tensor) in embeddings and not model.config.tie_word_embeddings:
            tensor.copy_(noise)
        else:
            tensor.copy_(noise * tensor.shape[-1] ** -0.5)


SIZES = {"hidden_size": 64, "num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4}


def practised_tiny_moe(
    task: ArithmeticTask | Mapping[str, Any] | None = None,
    warmup: WarmUp | Mapping[str, Any] | None = None,
    seed: int = 0,
    **sizes: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a tiny Qwen3-MoE that half knows a task: warmed up, in eval mode, float32; and its tokenizer.

    Warns:
        UserWarning: the warm-up ran out of steps, so GRPO may have little to improve.

    >>> task = ArithmeticTask(digits=1, held_out=90)
    >>> warmup = WarmUp(max_steps=1, noisy_target=1.0)
    >>> model, tokenizer = practised_tiny_moe(task, warmup, num_hidden_layers=1, num_experts=8)
    >>> model.config.num_experts, model.config.num_experts_per_tok, len(tokenizer)
    (8, 4, 48)
    """
    # a configuration file gives mappings, code gives objects
    default = {"operation": "double", "digits": 4, "held_out": 200, "seed": seed}
    task = task if isinstance(task, ArithmeticTask) else ArithmeticTask(**{**default, **(task or {})})
    warmup = warmup if isinstance(warmup, WarmUp) else WarmUp(**(warmup or {}))
    warmup.check()
    tokenizer = CharacterTokenizer()
    # all layers have routers, so that replay is exercised in each
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
