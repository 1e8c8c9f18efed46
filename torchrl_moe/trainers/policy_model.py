"""``PolicyModel``: the transformers model that is trained, its tokenizer, and the folder that an engine starts from."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchrl_moe._compat_transformers import checkpoint_activations, load_whole, lowered, stays_float32
from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules.backends.checkpoint import check_reachable, check_weights
from torchrl_moe.modules.policies.probe import is_router
from torchrl_moe.modules.policies.transformers_wrapper import check_vocabulary
from torchrl_moe.modules.policies.unstack import ModelWeights, base_model, has_adapters
from torchrl_moe.modules.replay.float32 import float32_routers
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, LoRAConfig, ModelConfig
from torchrl_moe.trainers.function_names import import_function, is_function_name
from torchrl_moe.trainers.placement import Placement
from torchrl_moe.trainers.run_folder import exchange
from torchrl_moe.weight_update.source import is_first

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer

__all__ = ["ModelLike", "PolicyModel", "new_start", "prepared", "starting_model", "starts"]

ATTENTION = [
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
]  # fmt: skip
"""Linear layers of attention, and of DeepSeek's latent attention."""
ModelLike: TypeAlias = "PreTrainedModel | str | os.PathLike[str]"
"""A model, a folder, a hub name, or the name of a function that makes one."""
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
OF_CONFIG = ("revision", "subfolder", "gguf_file", "trust_remote_code", "token", "cache_dir", "local_files_only")
"""Arguments of ``from_pretrained`` that say where a model's config is."""
MODEL_FILES = re.compile(
    r".*\.(safetensors|bin|pt|gguf|model|tiktoken|jinja)|.*\.index\.json|.*(config|token|vocab|template).*\.(json|txt)|"
    r"merges\.txt|additional_chat_templates"
)
"""Entries of a folder that are a part of its model: one that the new model does not have would be read with its own."""
STACKED_EXPERTS = ("gate_up_proj", "down_proj")
"""Parameters of all experts of a layer at once, as transformers holds them."""


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """What is trained: a model, its tokenizer, and where both came from."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    source: str | None
    dtype: torch.dtype
    source_dtype: torch.dtype = torch.float32
    start: Path | None = None
    has_float32_routers: bool = False

    @classmethod
    def load(
        cls,
        model: ModelLike | None,
        tokenizer: Tokenizer | None,
        config: ModelConfig,
        placement: Placement | None = None,
    ) -> PolicyModel:
        """Load a model, or take one as it is, and make it ready for training."""
        is_shared = placement is not None and placement.is_shared
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = _dtype(config.dtype, device)
        given = config.source if model is None else model
        if given is None:
            raise ConfigError(
                "model.source=None: name a folder, a hub model, or a function, or give the trainer a model"
            )
        # a model as it is, or what a function makes, or what is in a folder or on the hub
        source, stored = None, None
        loaded: PreTrainedModel
        if not isinstance(given, str | os.PathLike):
            loaded = given
        elif is_function_name(str(given)):
            loaded, own_tokenizer = _made(str(given), config.arguments)
            tokenizer = tokenizer or own_tokenizer
        else:
            source = str(given)
            loaded, tokenizer, stored = _from_pretrained(source, tokenizer, config, dtype, placement)
        source_dtype = stored or _dtype_of(loaded)
        if tokenizer is None:
            raise ConfigError("a model that is given needs its tokenizer: MoEGRPOTrainer(model, tokenizer=...)")
        try:
            check_vocabulary(tokenizer, loaded)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        loaded = prepared(loaded, config, dtype)
        if not is_shared:
            loaded = loaded.to(device)
        elif config.lora.rank:
            assert placement is not None
            placement.shard(loaded, dtype, rounds=config.router_dtype != "float32")
        keeps = config.router_dtype == "float32" and dtype != torch.float32
        if keeps:
            try:
                float32_routers(loaded)
            except UnsupportedRouterError as error:
                raise ConfigError(f"model.router_dtype=float32: {error}") from error
        return cls(loaded, tokenizer, source, dtype, source_dtype, has_float32_routers=keeps)

    @property
    def precision(self) -> Callable[[], AbstractContextManager[object]]:
        """Makes the context of a forward pass: autocast, unless everything is float32 or FSDP2 does the casting.

        FSDP2 casts all that it gathers together, routers too: where they are float32, it casts nothing.
        """
        device, dtype = next(self.model.parameters()).device.type, self.dtype
        casts = dtype != torch.float32 and (self.has_float32_routers or not isinstance(self.model, FSDPModule))
        return lambda: torch.autocast(device, dtype, enabled=casts)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Name -> parameter of everything that is trained; if ranks share the model, this rank's part."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward pass without a backward pass, some are still gathered
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    def save(self, folder: Path, dtype: str = "auto") -> Path:
        """Write the model under its hub names, adapters merged, with tokenizer and generation config.

        vLLM and ``AutoModelForCausalLM.from_pretrained`` load it. It is written beside the folder, and replaces the
        folder once it is complete, so a failure or a kill never destroys an older model. What is no part of one there,
        such as ``.git`` and a README, stays. If several ranks share the
        model, all must call this; rank 0 gathers it in its host's memory, and writes it.
        """
        folder = folder.expanduser().resolve()  # a link stays one
        if folder.exists() and not (folder / "config.json").is_file() and any(folder.iterdir()):
            raise FileExistsError(f"{folder} holds something other than a model, which would be removed: use another")
        # as it is if nothing is sharded, adapted or of another dtype; else each tensor is gathered, merged and cast
        is_sharded = any(hasattr(weight, "full_tensor") for weight in self.model.parameters())
        written = self.source_dtype if dtype == "auto" else getattr(torch, dtype)
        as_it_is = not is_sharded and not has_adapters(self.model) and _dtype_of(self.model) == written
        tensors = None if as_it_is else self._gathered(is_first(), written)
        if is_sharded and not is_first():
            return folder
        # rank 0 writes beside the folder, and exchanges them when all is there
        draft = folder.with_name(f".{folder.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        base: PreTrainedModel = base_model(self.model)
        if tensors is None:
            base.save_pretrained(draft)
        else:
            _write(base, tensors, draft, written)
        self.tokenizer.save_pretrained(draft)
        exchange(draft, folder, lambda name: MODEL_FILES.fullmatch(name) is not None)
        return folder

    def _gathered(self, keep: bool, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return checkpoint name -> its own CPU tensor, adapters merged; without ``keep``, an empty dict."""
        base = base_model(self.model)

        def kept(name: str, tensor: Tensor) -> Tensor:
            stays = stays_float32(base, name, dtype) or (self.has_float32_routers and is_router(name))
            casts = tensor.is_floating_point() and not stays
            return tensor.detach().to("cpu", dtype if casts else tensor.dtype, copy=True).contiguous()

        stream = ModelWeights(self.model).tensors()  # iterating is a collective, if ranks share the model
        return {name: kept(name, tensor) for name, tensor in stream if keep}


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype that most of a model's weights have."""
    sizes: Counter[torch.dtype] = Counter()
    for weight in model.parameters():
        if weight.is_floating_point():
            sizes[weight.dtype] += weight.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def _write(base: PreTrainedModel, tensors: dict[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    from huggingface_hub import save_torch_state_dict

    folder.mkdir(parents=True)
    save_torch_state_dict(tensors, folder)
    base.config.save_pretrained(folder)
    if getattr(base, "generation_config", None) is not None:
        base.generation_config.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    # a config that was made, not loaded, does not name the class, without which vLLM loads nothing
    saved.setdefault("architectures", [type(base).__name__])
    saved["dtype"] = str(dtype).removeprefix("torch.")  # a reader's dtype="auto" takes it
    (folder / "config.json").write_text(json.dumps(saved, indent=2))


def _made(name: str, arguments: Mapping[str, object]) -> tuple[PreTrainedModel, Tokenizer]:
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
    source: str, tokenizer: Tokenizer | None, config: ModelConfig, dtype: torch.dtype, placement: Placement | None
) -> tuple[PreTrainedModel, Tokenizer, torch.dtype]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if not HUB_NAME.fullmatch(source) and not (Path(source) / "config.json").is_file():
        raise ConfigError(
            f"model.source={source}: there is no model in that folder, and names on the hub are owner/name"
        )
    frozen = config.lora.rank > 0  # weights that are not trained need not be float32
    try:
        check_reachable(source)
        if not {"gguf_file", "subfolder"} & {*config.pretrained}:  # else they lie elsewhere
            check_weights(source)
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(source)
        where = {name: config.pretrained[name] for name in OF_CONFIG if name in config.pretrained}
        stored = AutoConfig.from_pretrained(source, **where).get_text_config().dtype or torch.float32
        weights = dtype if frozen else torch.float32
        load = AutoModelForCausalLM.from_pretrained
        pretrained = partial(load_whole, source, load, dtype=weights, **config.pretrained)
        # an adapter is added to the whole model, and the sum is sharded
        split = None if placement is None or frozen or not placement.is_shared else placement
        rounds = config.router_dtype != "float32"
        model = pretrained() if split is None else split.load(pretrained, dtype, rounds)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError.of(f"model.source={source}", error) from error
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # transformers returns an empty one where none is saved
        raise ConfigError(
            f"model.source={source}: there is no tokenizer with the model: tokenizer.save_pretrained({source!r})"
        )
    return model, tokenizer, stored


def prepared(model: PreTrainedModel, config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Add an adapter, switch on activation checkpointing, and make all weights float32; of LoRA, the adapter's."""
    if config.lora.rank:
        if has_adapters(model):
            raise ConfigError("model.lora.rank is set, and the model has an adapter already: leave one of them out")
        model = _with_adapter(lowered(model, dtype), config)
    if config.activation_checkpointing:
        checkpoint_activations(model)
        if config.lora.rank:
            model.enable_input_require_grads()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not trained:
        raise ConfigError("model: all of its weights are frozen (requires_grad=False): there is nothing to train")
    # frozen weights too: few operations take two dtypes, but LoRA's layers do
    is_lora = has_adapters(model) and all(".lora_" in name for name in trained)
    for weight in trained.values() if is_lora else model.parameters():
        if weight.is_floating_point() and weight.dtype != torch.float32:
            weight.data = weight.data.float()
    # training mode only for checkpointing, which transformers requires: dropout would cause a mismatch
    return model.train(config.activation_checkpointing)


def _with_adapter(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    from peft import LoraConfig, get_peft_model

    # the layers of this model among those that an adapter can be put on
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


# The model that a run starts from: passed in, made by a function, or left by an earlier start of the run.
def new_start(folder: Path) -> Path:
    """Return a folder name for the model that a run starts from, distinct from that of an older run."""
    return folder / f"start-{uuid.uuid4().hex[:8]}"


def starts(folder: Path) -> list[Path]:
    """Return the models in a run's folder that it, or an older run, has started from; others' folders are none."""
    return [path for path in folder.glob("start-*") if re.fullmatch(r"start-[0-9a-f]{8}", path.name)]


def starting_model(
    model: ModelLike | None, tokenizer: Tokenizer | None, config: GRPOConfig, placement: Placement
) -> PolicyModel:
    """Load the model of a run.

    Several ranks load it from one folder, which rank 0 chooses. Rank 0 first writes there a model that was passed in or
    made by a function. The other ranks' random numbers, and the model they were passed, are ignored.
    """
    given = config.model.source if model is None else model
    ranks = placement.ranks
    # a single process takes the model as it gets it, and writes it only if an engine must read it
    if not placement.is_shared:
        earlier = _earlier_start(model, config)
        return PolicyModel.load(earlier or model, tokenizer, config.model)
    # of several ranks, rank 0 finds or writes the folder, and all load from it
    where: str | None = None
    is_new = False
    if ranks.is_first:
        where = _earlier_start(model, config)
        if where is None and isinstance(given, str | os.PathLike) and not is_function_name(os.fspath(given)):
            where = os.fspath(given)
        is_new = where is None
        where = where or str(_write_start(given, tokenizer, config, Path(config.out)))
    where, is_new = ranks.from_first((where, is_new), "making the model")
    assert where is not None
    loaded = PolicyModel.load(where, None if is_new else tokenizer, config.model, placement)
    return replace(loaded, start=Path(where)) if is_new else loaded


def _earlier_start(model: object, config: GRPOConfig) -> str | None:
    """Return where an earlier start of this run saved the model that a function made: it is not made again."""
    source = config.model.source
    if not config.resume or model is not None or source is None or not is_function_name(source):
        return None
    written = [path for path in starts(Path(config.out)) if (path / "config.json").is_file()]
    return str(max(written, key=lambda path: (path / "config.json").stat().st_mtime)) if written else None


def _write_start(given: ModelLike | None, tokenizer: Tokenizer | None, config: GRPOConfig, folder: Path) -> Path:
    if isinstance(given, nn.Module) and has_adapters(given):
        raise ConfigError(
            "a model with an adapter of its own is for one rank: give several the bare one, and set model.lora"
        )
    whole = replace(config.model, lora=LoRAConfig(), activation_checkpointing=False)
    return PolicyModel.load(given, tokenizer, whole).save(new_start(folder))
