"""``RolloutEngine``: the engine that generates, and the weight sync that keeps it at the trainer's weights."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from torchrl_moe.modules.policies.generate_kwargs import sampling_params_of
from torchrl_moe.modules.policies.prompt_reading import reads_chats, template_options
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper
from torchrl_moe.modules.serving.async_vllm import AsyncVLLM
from torchrl_moe.modules.serving.devices import ranks_here
from torchrl_moe.modules.serving.launch import engine_kind
from torchrl_moe.trainers.checkpoints import steps_saved
from torchrl_moe.trainers.config import ConfigError, GRPOConfig
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.starting_model import new_start
from torchrl_moe.weight_update.report import SyncReport
from torchrl_moe.weight_update.scheme import VLLMWeightSyncScheme

__all__ = ["RolloutEngine", "check_arguments", "check_room"]

LOG = logging.getLogger(__name__)


def check_arguments(config: GRPOConfig) -> None:
    """Refuse arguments that the run's engine does not have, which costs less than loading a model.

    Raises:
        ConfigError: names the argument.
    """
    try:
        engine_kind(config.engine.kind).arguments_of({"model": "?", **config.engine.arguments})
    except (TypeError, ValueError) as error:
        raise ConfigError.of("engine.arguments", error) from error


class RolloutEngine:
    """An engine that serves the policy's weights.

    Args:
        policy_model: whose weights it serves.
        config: of the run.
        folder: where a model that does not come from a folder or the hub is saved, for the engine to start from.
        engine: an engine that serves a model of the same shape; default: the one that ``engine.connect`` names, or a
            new one, which this object shuts down.

    Raises:
        ConfigError: the machine cannot hold so many replicas, or the weight sync does not accept an argument.
    """

    def __init__(self, policy_model: PolicyModel, config: GRPOConfig, folder: Path, engine: Any = None) -> None:
        self.config, self.policy_model = config, policy_model
        self.start = policy_model.start
        self._joins_engine = engine is None and config.engine.connect is not None
        self._owns_engine = engine is None and not self._joins_engine
        setting = "engine.sync"
        try:
            scheme = VLLMWeightSyncScheme(**config.engine.sync)
            setting = "rollout.sampling"
            sampling_params_of(config.rollout.generate_kwargs())
            setting = "chat_template_kwargs"
            options = template_options(config.chat_template_kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError.of(setting, error) from error
        is_chat = reads_chats(policy_model.tokenizer)
        if not is_chat:
            LOG.warning("the tokenizer has no chat template: prompts are sent as they are, without roles or markers")
        self.sender = scheme.create_sender()
        done = steps_saved(folder / "checkpoints") if config.resume else 0
        try:
            self.engine = self._start(folder, done) if engine is None else engine
        except BaseException:
            self.sender.shutdown()
            self.forget_start()
            raise
        try:
            if done and not self._owns_engine:  # it may be as fresh as a new one
                self.engine.set_seed(seed_after(config.seed, done))
            self.sender.register_model(policy_model.model)
            self.sender.init_all_workers_group(None, vllm_engine=self.engine)
            self.policy = vLLMWrapper(
                self.engine,
                tokenizer=policy_model.tokenizer,
                input_mode="history" if is_chat else "text",
                chat_template_kwargs=options,
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
        arguments = {"seed": self.config.seed, **engine.arguments}
        arguments["seed"] = seed_after(int(arguments["seed"] or 0), done)
        if engine.backend == "local":
            check_room(self.policy_model, engine.num_replicas, arguments, engine.kind)
        if engine.sleep and not torch.cuda.is_available():
            raise ConfigError("engine.sleep=True needs a GPU, whose memory the trainer uses meanwhile")
        if engine.sleep:
            arguments.setdefault("enable_sleep_mode", True)
        path = self.policy_model.source or str(self._save(folder))
        LOG.info("starting %d replica(s) of %s on %s", engine.num_replicas, path, engine.kind)
        where: Any = {"engine": engine.kind, "backend": engine.backend}
        return AsyncVLLM.from_pretrained(path, num_replicas=engine.num_replicas, **where, **arguments)

    def _save(self, folder: Path) -> Path:
        """Write the model that replicas start from, beside that of an older run; a restarted replica reads it again."""
        self.start = self.policy_model.save(new_start(folder))
        return self.start

    def forget_start(self) -> None:
        """Remove the model that replicas started from, because this run does not begin."""
        if self.start is not None:
            shutil.rmtree(self.start, ignore_errors=True)

    @property
    def has_the_models_weights(self) -> bool:
        """Whether the engine was started from this model, as it was at that time."""
        return self._owns_engine

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

    def sleep(self) -> None:
        """Give the GPU's memory to the trainer, if the run is configured so."""
        if self.config.engine.sleep:
            self.engine.sleep()

    def wake_up(self) -> None:
        """Take the GPU's memory back for the engine."""
        if self.config.engine.sleep:
            self.engine.wake_up()

    def shutdown(self) -> None:
        """End the weight sync, and the engine if this object started it. Idempotent."""
        self.sender.shutdown()
        if self._owns_engine:
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


def check_room(policy_model: PolicyModel, num_replicas: int, arguments: dict[str, Any], kind: str = "vllm") -> None:
    """Refuse more replicas than this machine holds.

    Raises:
        ConfigError: there are fewer GPUs, or there is less memory.
    """
    if torch.cuda.is_available():
        needed = num_replicas * engine_kind(kind).devices_per_replica(arguments)
        found = torch.cuda.device_count() - ranks_here()  # a single process may share its GPU with the engine
        if needed > found and "devices" not in arguments:
            raise ConfigError(f"engine.num_replicas={num_replicas} needs {needed} GPUs, and there are {found}")
        return
    width = getattr(torch, str(arguments.get("dtype", "float32")), torch.float32).itemsize
    weights = sum(weight.numel() for weight in policy_model.model.parameters()) * width
    each = weights + int(arguments.get("kv_cache_memory_bytes") or 0)
    free = psutil.virtual_memory().available
    if num_replicas * each > free:
        raise ConfigError(
            f"engine.num_replicas={num_replicas} needs {num_replicas * each / 1e9:.1f} GB of memory, and "
            f"{free / 1e9:.1f} GB are free"
        )
