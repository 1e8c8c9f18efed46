"""``PolicyModel``, the transformers model that is trained, and ``RolloutEngine``, which serves its weights."""

from __future__ import annotations

import json
import logging
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
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchrl_moe._compat_transformers import checkpoint_activations, load_whole, lowered, stays_float32
from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules.backends.checkpoint import check_reachable, check_tokenizer, check_weights
from torchrl_moe.modules.backends.engine_kind import engine_kind
from torchrl_moe.modules.policies.probe import is_router
from torchrl_moe.modules.policies.prompts import reads_chats
from torchrl_moe.modules.policies.transformers_wrapper import check_vocabulary
from torchrl_moe.modules.policies.unstack import ModelWeights, base_model, has_adapters
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper
from torchrl_moe.modules.replay.float32 import float32_routers
from torchrl_moe.modules.serving.async_vllm import AsyncVLLM
from torchrl_moe.modules.serving.launch import devices_of_trainer, ranks_here
from torchrl_moe.trainers.checkpoints import exchange, steps_saved
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, LoRAConfig, ModelConfig
from torchrl_moe.trainers.function_names import import_function, is_function_name
from torchrl_moe.trainers.ranks import Placement
from torchrl_moe.weight_update.report import SyncReport
from torchrl_moe.weight_update.scheme import VLLMWeightSyncScheme
from torchrl_moe.weight_update.source import is_first

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer


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
        usual = "bfloat16" if device.type == "cuda" else "float32"
        dtype: torch.dtype = getattr(torch, usual if config.dtype == "auto" else config.dtype)
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
        elif is_function_name(name := str(given)):
            try:
                made = import_function(name)(**config.arguments)
            except Exception as error:  # the user's function may raise anything
                raise ConfigError.of(f"model.source={name}", error) from error
            parts = made if isinstance(made, tuple) else (made,)
            if len(parts) != 2 or not isinstance(parts[0], nn.Module):
                got = ", ".join(type(part).__name__ for part in parts)
                raise ConfigError(f"model.source={name} must return a model and its tokenizer, got {got}")
            loaded, tokenizer = parts[0], tokenizer or parts[1]
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
        such as ``.git`` and a README, stays. If several ranks share the model, all must call this; rank 0 gathers it in
        its host's memory, and writes it.
        """
        folder = folder.expanduser().resolve()  # a link stays one
        if folder.exists() and not (folder / "config.json").is_file() and any(folder.iterdir()):
            raise FileExistsError(f"{folder} holds something other than a model, which would be removed: use another")
        # as it is if nothing is sharded, adapted or of another dtype; else each tensor is gathered, merged and cast
        base: PreTrainedModel = base_model(self.model)
        is_sharded = any(hasattr(weight, "full_tensor") for weight in self.model.parameters())
        written = self.source_dtype if dtype == "auto" else getattr(torch, dtype)
        as_it_is = not is_sharded and not has_adapters(self.model) and _dtype_of(self.model) == written
        tensors: dict[str, Tensor] = {}
        # iterating is a collective, if ranks share the model
        for name, tensor in ModelWeights(self.model).tensors() if not as_it_is else ():
            if is_first():
                stays = stays_float32(base, name, written) or (self.has_float32_routers and is_router(name))
                own = written if tensor.is_floating_point() and not stays else tensor.dtype
                tensors[name] = tensor.detach().to("cpu", own, copy=True).contiguous()
        if is_sharded and not is_first():
            return folder
        # rank 0 writes beside the folder, and exchanges them when all is there
        draft = folder.with_name(f".{folder.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        if as_it_is:
            base.save_pretrained(draft)
        else:
            from huggingface_hub import save_torch_state_dict

            draft.mkdir(parents=True)
            save_torch_state_dict(tensors, draft)
            base.config.save_pretrained(draft)
            if getattr(base, "generation_config", None) is not None:
                base.generation_config.save_pretrained(draft)
            saved = json.loads((draft / "config.json").read_text())
            # a config that was made, not loaded, does not name the class, without which vLLM loads nothing
            saved.setdefault("architectures", [type(base).__name__])
            saved["dtype"] = str(written).removeprefix("torch.")  # a reader's dtype="auto" takes it
            (draft / "config.json").write_text(json.dumps(saved, indent=2))
        self.tokenizer.save_pretrained(draft)
        exchange(draft, folder, lambda name: MODEL_FILES.fullmatch(name) is not None)
        return folder


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype that most of a model's weights have."""
    sizes: Counter[torch.dtype] = Counter()
    for weight in model.parameters():
        if weight.is_floating_point():
            sizes[weight.dtype] += weight.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.float32


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
            check_tokenizer(source, tokenizer)
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(source)
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # transformers makes an empty one where none is saved
            raise ValueError(f"{source} has no tokenizer: tokenizer.save_pretrained({source!r}) writes it there")
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
    given, ranks, folder = config.model.source if model is None else model, placement.ranks, Path(config.out)
    # a model that a function made is not made again: an earlier start of this run saved it
    where: str | None = None
    source = config.model.source
    if ranks.is_first and config.resume and model is None and source is not None and is_function_name(source):
        configs = [file for path in starts(folder) if (file := path / "config.json").is_file()]
        where = str(max(configs, key=lambda file: file.stat().st_mtime).parent) if configs else None
    # a single process takes the model as it gets it, and writes it only if an engine must read it
    if not placement.is_shared:
        return PolicyModel.load(where or model, tokenizer, config.model)
    # of several ranks, rank 0 finds or writes the folder, and all load from it
    is_new = False
    if ranks.is_first and where is None:
        if isinstance(given, str | os.PathLike) and not is_function_name(os.fspath(given)):
            where = os.fspath(given)
        elif isinstance(given, nn.Module) and has_adapters(given):
            raise ConfigError(
                "a model with an adapter of its own is for one rank: give several the bare one, and set model.lora"
            )
        else:
            is_new, whole = True, replace(config.model, lora=LoRAConfig(), activation_checkpointing=False)
            where = str(PolicyModel.load(given, tokenizer, whole).save(new_start(folder)))
    where, is_new = ranks.from_first((where, is_new), "making the model")
    assert where is not None
    loaded = PolicyModel.load(where, None if is_new else tokenizer, config.model, placement)
    return replace(loaded, start=Path(where)) if is_new else loaded


LOG = logging.getLogger(__name__)


def check_arguments(config: GRPOConfig) -> None:
    """Refuse arguments that the run's engine does not have, which costs less than loading a model."""
    try:
        engine_kind(config.engine.kind).arguments_of({"model": "?", **engine_arguments(config)})
    except (TypeError, ValueError) as error:
        raise ConfigError.of("engine.arguments", error) from error


def engine_arguments(config: GRPOConfig) -> dict[str, Any]:
    """Return the arguments of the run's engine; its routers have the dtype of the trainer's, if one is set."""
    own = {} if config.model.router_dtype == "auto" else {"router_dtype": config.model.router_dtype}
    parity = {"parity": "exact"} if config.parity == "exact" else {}
    return {**own, **config.engine.arguments, **parity}


class RolloutEngine:
    """An engine that serves the policy's weights, and the weight sync to it.

    Of several ranks, the first has the engine. The others have ``is_first=False`` and no engine: each sends its part of
    every weight.
    """

    policy: vLLMWrapper | None  # ``None``: another rank has the engine

    def __init__(
        self,
        policy_model: PolicyModel,
        config: GRPOConfig,
        folder: Path,
        engine: AsyncVLLM | None = None,
        *,
        is_first: bool = True,
    ) -> None:
        self.config, self.policy_model = config, policy_model
        self.start = policy_model.start
        # three kinds of engines: given (left alone), joined (left at the end), its own (started and shut down)
        self._joins_engine = is_first and engine is None and config.engine.connect is not None
        self.owns_engine = is_first and engine is None and not self._joins_engine
        self.sender = VLLMWeightSyncScheme(**config.engine.sync).create_sender()
        self.policy = None
        if not is_first:
            self.sender.register_model(policy_model.model)
            return
        is_chat = reads_chats(policy_model.tokenizer)
        if not is_chat:
            LOG.warning("the tokenizer has no chat template: prompts are sent as they are, without roles or markers")
        done = steps_saved(folder / "checkpoints") if config.resume else 0
        try:
            self.engine = self._start(folder, done) if engine is None else engine
        except BaseException:
            self.sender.shutdown()
            self.forget_start()
            raise
        # the engine runs: from here on a mistake ends it again
        try:
            if done and not self.owns_engine:  # it may be as fresh as a new one
                self.engine.set_seed(seed_after(config.seed, done))
            self.sender.register_model(policy_model.model)
            self.sender.init_all_workers_group(None, vllm_engine=self.engine)
            self.policy = vLLMWrapper(
                self.engine,
                tokenizer=policy_model.tokenizer,
                input_mode="history" if is_chat else "text",
                chat_template_kwargs=config.chat_template_kwargs,
                generate_kwargs=config.rollout.generate_kwargs(),
                return_routed_experts=None if config.loss.replay == "R3" else False,  # nothing else reads them
            )
        except BaseException:
            self.shutdown()
            self.forget_start()
            raise

    def _start(self, folder: Path, done: int) -> AsyncVLLM:
        engine = self.config.engine
        if engine.connect is not None:
            return AsyncVLLM.connect(engine.connect)
        arguments = {"seed": self.config.seed, **engine_arguments(self.config)}
        arguments["seed"] = seed_after(int(arguments["seed"] or 0), done)
        if engine.backend == "local":
            check_room(self.policy_model, engine.num_replicas, arguments, engine.kind)
            per_replica = engine_kind(engine.kind).devices_per_replica(arguments)
            if "devices" not in arguments and (shared := shared_devices(engine.num_replicas, per_replica)):
                arguments["devices"] = shared
                LOG.info("replicas compute on the trainer's GPU too: %s; engine.sleep=true takes turns", shared)
        if engine.sleep and not torch.cuda.is_available():
            raise ConfigError("engine.sleep=True needs a GPU, whose memory the trainer uses meanwhile")
        if engine.sleep:
            arguments.setdefault("enable_sleep_mode", True)
        # a model that is in no folder is written into the run's: replicas are processes, and read it from there
        if self.policy_model.source is None:
            self.start = self.policy_model.save(new_start(folder))
        path = self.policy_model.source or str(self.start)
        LOG.info("starting %d replica(s) of %s on %s", engine.num_replicas, path, engine.kind)
        return AsyncVLLM.from_pretrained(
            path,
            num_replicas=engine.num_replicas,
            engine="vllm" if engine.kind == "vllm" else "transformers",
            backend="ray" if engine.backend == "ray" else "local",
            **arguments,
        )

    def forget_start(self) -> None:
        """Remove the model that replicas started from, because this run does not begin."""
        if self.start is not None:
            shutil.rmtree(self.start, ignore_errors=True)

    @property
    def dtype(self) -> str:
        """Torch's name of what the engine computes in; empty if it does not say."""
        return next((str(info.dtype) for info in self.engine.infos if info is not None), "")

    @property
    def version(self) -> int:
        """Version of the trainer's weights that the engine has."""
        return int(self.sender.version)

    def restore(self, version: int) -> None:
        """Sync the trainer's weights to the engine, under their old version or, if the engine is past it, its next.

        An engine's version never decreases: otherwise a request for a version would wait forever.
        """
        self.sender.version = max(self.sender.version, version - 1)
        self.sync()

    def sync(self) -> SyncReport:
        """Sync the trainer's weights to the engine."""
        report = self.sender.update_weights()
        for replica, reason in report.failed.items():
            LOG.warning("replica %s does not hold version %s: %s", replica, report.version, reason)
        return report

    def shutdown(self) -> None:
        """End the weight sync, and the engine if this object started it. Idempotent."""
        self.sender.shutdown()
        if self.owns_engine:
            self.engine.shutdown()
        elif self._joins_engine:
            self.engine.disconnect()


def seed_after(seed: int, steps: int) -> int:
    """Return an engine's seed for a run that continues after so many steps: it would else draw what step 0 drew.

    Hashed, because replicas, and those that are restarted, count their own seeds on from it.

    >>> seed_after(7, 0), seed_after(7, 2) == seed_after(9, 0)
    (7, False)
    """
    return int(np.random.SeedSequence([abs(seed), steps]).generate_state(1)[0] >> 1) if steps else seed


def shared_devices(num_replicas: int, per_replica: int) -> list[list[int]] | None:
    """Return the GPUs of each replica where the one process that trains leaves too few of its own; else ``None``.

    A machine with one GPU is the usual case. Those that nothing computes on come first.
    """
    count, of_trainer = torch.cuda.device_count(), devices_of_trainer()
    if not count or ranks_here() or count - len(of_trainer) >= num_replicas * per_replica:
        return None
    order = [*(index for index in range(count) if index not in of_trainer), *of_trainer]
    return [order[first : first + per_replica] for first in range(0, num_replicas * per_replica, per_replica)]


def check_room(policy_model: PolicyModel, num_replicas: int, arguments: Mapping[str, Any], kind: str = "vllm") -> None:
    """Refuse more replicas than this machine holds."""
    if torch.cuda.is_available():
        needed = num_replicas * engine_kind(kind).devices_per_replica(arguments)
        found = torch.cuda.device_count() - ranks_here()  # a single process may share its GPU with the engine
        if needed > found and "devices" not in arguments:
            raise ConfigError(f"engine.num_replicas={num_replicas} needs {needed} GPUs, and there are {found}")
        return
    # on a CPU each replica has the weights and its cache in the host's memory
    width = getattr(torch, str(arguments.get("dtype", "float32")), torch.float32).itemsize
    weights = sum(weight.numel() for weight in policy_model.model.parameters()) * width
    each = weights + int(arguments.get("kv_cache_memory_bytes") or 0)
    free = psutil.virtual_memory().available
    if num_replicas * each > free:
        raise ConfigError(
            f"engine.num_replicas={num_replicas} needs {num_replicas * each / 1e9:.1f} GB of memory, and "
            f"{free / 1e9:.1f} GB are free"
        )
