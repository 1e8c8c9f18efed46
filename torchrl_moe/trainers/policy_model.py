"""``PolicyModel``: the transformers model that is trained, its tokenizer, and the folder that an engine starts from."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchrl_moe._compat_transformers import checkpoint_activations, lowered
from torchrl_moe.modules.backends.checkpoint import check_weights
from torchrl_moe.modules.policies.adapters import base_model, has_adapters
from torchrl_moe.modules.policies.unstack import ModelWeights
from torchrl_moe.trainers.config import ConfigError, ModelConfig
from torchrl_moe.trainers.folders import exchange
from torchrl_moe.trainers.function_names import import_function, is_function_name
from torchrl_moe.trainers.placement import Placement
from torchrl_moe.weight_update.source.ranks import is_first

__all__ = ["PolicyModel", "prepared"]

ATTENTION = [
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
]  # fmt: skip
"""Linear layers of attention, and of DeepSeek's latent attention."""
STACKED_EXPERTS = ("gate_up_proj", "down_proj")
"""Parameters of all experts of a layer at once, as transformers holds them."""


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """What is trained.

    Attributes:
        model: float32 where it is trained; with an adapter the rest is in the dtype of forward passes.
        tokenizer: of the model.
        source: folder or hub name that the model comes from; ``None`` if it was made or changed here.
        dtype: of forward passes.
        start: the folder that the model starts from, if this run wrote one.
    """

    model: Any
    tokenizer: Any
    source: str | None
    dtype: torch.dtype
    start: Path | None = None

    @classmethod
    def load(cls, model: Any, tokenizer: Any, config: ModelConfig, placement: Placement | None = None) -> PolicyModel:
        """Load a model, or take one as it is, and make it ready for training.

        Args:
            model: a model, or a folder, hub name or function's name; ``None``: ``config.source``.
            tokenizer: ``None``: the one beside the model.
            config: its dtype, adapter and activation checkpointing.
            placement: how several ranks share it; each of them loads it, from a folder or from the hub.

        Raises:
            ConfigError: there is no such model, no tokenizer, no such layer for an adapter, or no plan to share it.
        """
        is_shared = placement is not None and placement.is_shared
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = _dtype(config.dtype, device)
        given = config.source if model is None else model
        if given is None:
            raise ConfigError(
                "model.source=None: name a folder, a hub model, or a function, or give the trainer a model"
            )
        source = str(given) if isinstance(given, str | os.PathLike) else None
        if source is not None and is_function_name(source):
            model, own_tokenizer = _made(source, config.arguments)
            tokenizer, source = tokenizer or own_tokenizer, None
        elif source is not None:
            model, tokenizer = _from_pretrained(source, tokenizer, config, dtype, placement)
        if tokenizer is None:
            raise ConfigError("a model that is given needs its tokenizer: MoEGRPOTrainer(model, tokenizer=...)")
        model = prepared(model, config, dtype)
        if not is_shared:
            model = model.to(device)
        elif config.lora.rank:
            assert placement is not None
            placement.shard(model, dtype)
        return cls(model, tokenizer, source, dtype)

    @property
    def precision(self) -> Callable[[], AbstractContextManager[Any]]:
        """Makes the context of a forward pass: autocast, unless everything is float32 or FSDP2 does the casting."""
        device, dtype = next(self.model.parameters()).device.type, self.dtype
        casts = dtype != torch.float32 and not isinstance(self.model, FSDPModule)
        return lambda: torch.autocast(device, dtype, enabled=casts)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Name -> parameter of everything that is trained; if ranks share the model, this rank's part."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward pass without a backward pass, some are still gathered
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    def save(self, folder: Path) -> Path:
        """Write the model under its hub names, adapters merged, with tokenizer and generation config.

        vLLM and ``AutoModelForCausalLM.from_pretrained`` load it. It is written beside the folder, and replaces the
        folder once it is complete, so a failure or a kill never destroys an older model. If several ranks share the
        model, all must call this; rank 0 gathers it in its host's memory, and writes it.

        Raises:
            FileExistsError: the folder holds something other than a model.
        """
        folder = folder.absolute()
        if folder.exists() and not (folder / "config.json").is_file() and any(folder.iterdir()):
            raise FileExistsError(f"{folder} holds something other than a model, which would be removed: use another")
        is_sharded = any(hasattr(weight, "full_tensor") for weight in self.model.parameters())
        tensors = self._gathered(is_first()) if is_sharded or has_adapters(self.model) else None
        if is_sharded and not is_first():
            return folder
        draft = folder.with_name(f".{folder.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        base: Any = base_model(self.model)
        if tensors is None:
            base.save_pretrained(draft)
        else:
            _write(base, tensors, draft)
        self.tokenizer.save_pretrained(draft)
        exchange(draft, folder)
        return folder

    def _gathered(self, keep: bool) -> dict[str, Tensor]:
        """Return checkpoint name -> its own CPU tensor, adapters merged; without ``keep``, an empty dict."""
        stream = ModelWeights(self.model).tensors()  # iterating is a collective, if ranks share the model
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in stream if keep}


def _write(base: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    folder.mkdir(parents=True)
    save_torch_state_dict(tensors, folder)
    base.config.save_pretrained(folder)
    if getattr(base, "generation_config", None) is not None:
        base.generation_config.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    saved.setdefault("architectures", [type(base).__name__])
    (folder / "config.json").write_text(json.dumps(saved, indent=2))


def _made(name: str, arguments: dict[str, Any]) -> tuple[Any, Any]:
    try:
        made = import_function(name)(**arguments)
    except Exception as error:  # the user's function may raise anything
        raise ConfigError.of(f"model.source={name}", error) from error
    parts = made if isinstance(made, tuple) else (made,)
    if len(parts) != 2 or not isinstance(parts[0], nn.Module):
        got = ", ".join(type(part).__name__ for part in parts)
        raise ConfigError(f"model.source={name} must return a model and its tokenizer, got {got}")
    return parts[0], parts[1]


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _from_pretrained(
    source: str, tokenizer: Any, config: ModelConfig, dtype: torch.dtype, placement: Placement | None
) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1  # a hub name has one slash at most
    if (looks_local or Path(source).is_dir()) and not (Path(source) / "config.json").is_file():
        raise ConfigError(f"model.source={source}: there is no model in that folder")
    frozen = config.lora.rank > 0  # weights that are not trained need not be float32
    try:
        if not {"gguf_file", "subfolder"} & {*config.pretrained}:  # else they lie elsewhere
            check_weights(source)
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(source)
        weights = dtype if frozen else torch.float32
        pretrained = partial(AutoModelForCausalLM.from_pretrained, source, dtype=weights, **config.pretrained)
        # an adapter is added to the whole model, and the sum is sharded
        split = None if placement is None or frozen or not placement.is_shared else placement
        model = pretrained() if split is None else split.load(pretrained, dtype)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError.of(f"model.source={source}", error) from error
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # transformers returns an empty one where none is saved
        raise ConfigError(f"model.source={source}: there is no tokenizer with the model")
    return model, tokenizer


def prepared(model: Any, config: ModelConfig, dtype: torch.dtype) -> Any:
    """Add an adapter, switch on activation checkpointing, and make all trained weights float32."""
    if config.lora.rank:
        if has_adapters(model):
            raise ConfigError("model.lora.rank is set, and the model has an adapter already: leave one of them out")
        model = _with_adapter(lowered(model, dtype), config)
    if config.activation_checkpointing:
        checkpoint_activations(model)
        if config.lora.rank:
            model.enable_input_require_grads()
    for weight in model.parameters():
        if weight.requires_grad and weight.dtype != torch.float32:
            weight.data = weight.data.float()
    # training mode only for checkpointing, which transformers requires: dropout would cause a mismatch
    return model.train(config.activation_checkpointing)


def _with_adapter(model: Any, config: ModelConfig) -> Any:
    from peft import LoraConfig, get_peft_model

    experts = [f"mlp.experts.{name}" for name in STACKED_EXPERTS]
    attention = [name for name in ATTENTION if any(key.endswith(f".{name}") for key, _ in model.named_modules())]
    known = [name for name in experts if any(key.endswith(f".{name}") for key, _ in model.named_parameters())]
    wanted = {"attention": (attention, []), "experts": ([], known), "all": (attention, known)}[config.lora.target]
    if (config.lora.target != "experts" and not attention) or (config.lora.target != "attention" and not known):
        raise ConfigError(
            f"model.lora.target={config.lora.target}: {type(model).__name__} has no such layers ("
            f"{', '.join([*ATTENTION, *experts])}): give the trainer a model with an adapter of your own"
        )
    return get_peft_model(
        model,
        LoraConfig(
            r=config.lora.rank,
            lora_alpha=config.lora.alpha,  # type: ignore[arg-type]  # any number: it is divided by the rank
            target_modules=wanted[0],
            target_parameters=wanted[1] or None,
            task_type="CAUSAL_LM",
        ),
    )
