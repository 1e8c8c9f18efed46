"""``Leader``: makes what only rank 0 of a run has: the engine, the collector, and the run's folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchrl.record.loggers.utils import get_logger

from torchrl_moe.collectors.async_collector import AsyncLLMCollector
from torchrl_moe.trainers.checkpoints import Checkpoints
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, as_yaml
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.rollout_engine import RolloutEngine
from torchrl_moe.trainers.rollout_source import RolloutSource
from torchrl_moe.trainers.run_lock import RunLock
from torchrl_moe.trainers.run_record import RunRecord, what_a_run_left, what_no_run_wrote
from torchrl_moe.trainers.signal_filter import SignalFilter
from torchrl_moe.trainers.starting_model import starts
from torchrl_moe.trainers.torchrun import launch_of, note_launch

__all__ = ["Leader"]


class Leader:
    """Makes engine, collector and folder; :class:`~torchrl_moe.trainers.follower.Follower` makes stand-ins.

    Args:
        config: of the run.
    """

    def __init__(self, config: GRPOConfig) -> None:
        self.config, self._folder = config, Path(config.out)

    def source(self, tokenizer: Any, given: dict[str, Any]) -> RolloutSource:
        """Return where samples come from, see :meth:`RolloutSource.of`."""
        return RolloutSource.of(self.config, tokenizer, **given)

    def lock(self) -> Callable[[], None]:
        """Lock the run's folder; return the lock's release.

        Raises:
            ConfigError: see :meth:`refuse_older_run`; the lock keeps it true.
        """
        lock = RunLock(self._folder)
        try:
            self.refuse_older_run()
        except ConfigError:
            lock.close()
            raise
        return lock.close

    def refuse_older_run(self, model: Any = None) -> None:
        """Refuse a folder that holds a run, unless it is to be continued or replaced.

        Args:
            model: that the trainer is given.

        Raises:
            ConfigError: what is in the folder, and all ways out; or the model lies in what would be replaced.
        """
        found, out = what_a_run_left(self._folder), self.config.out
        if others := what_no_run_wrote(self._folder):
            raise ConfigError(
                f"out={out} holds {others}, which no run has written and this one would replace: rename it, or set out "
                "to another folder"
            )
        if self.config.resume or not found:
            return
        if not self.config.overwrite:
            raise ConfigError(
                f"out={out} holds a run ({found}): set resume=True to continue it, overwrite=True to replace it, or "
                "out to another folder"
            )
        source = self.config.model.source if model is None else model
        if not isinstance(source, str | os.PathLike):
            return
        if Path(source).exists() and self._folder.resolve() in Path(source).resolve().parents:
            raise ConfigError(
                f"overwrite=True would remove the model {source}, which is in out={out}: copy it elsewhere"
            )

    def engine(self, policy_model: PolicyModel, engine: Any) -> RolloutEngine:
        """Return the engine that serves the policy's weights; start one if none is given."""
        return RolloutEngine(policy_model, self.config, self._folder, engine)

    def collector(self, source: RolloutSource, rollout_engine: RolloutEngine) -> AsyncLLMCollector:
        """Return what collects samples."""
        rollout = self.config.rollout
        groups = self.config.steps * rollout.prompts_per_step
        failures = max(rollout.prompts_per_step, groups // 10) if rollout.max_failures is None else rollout.max_failures
        try:
            collector = AsyncLLMCollector(
                source.env,
                policy=rollout_engine.policy,
                dataloader=source.dataloader,
                group_size=rollout.group_size,
                groups_per_batch=rollout.prompts_per_step,
                max_staleness=rollout.max_staleness,
                order=rollout.order,  # type: ignore[arg-type]
                window=rollout.window,
                on_stale=rollout.on_stale,  # type: ignore[arg-type]
                over_sample=rollout.over_sample,
                group_filter=SignalFilter(rollout.prompts_per_step) if rollout.drop_uniform_groups else None,
                max_failures=failures,
                max_dropped_groups=rollout.max_dropped_groups,
                max_turns=rollout.max_turns,
                reward_timeout=rollout.reward_timeout,
            )
        except (ImportError, TypeError, ValueError) as error:
            raise ConfigError.of("rollout", error) from error
        rollout_engine.sender.register_collector(collector)
        return collector

    def loggers(self) -> list[Any]:
        """Return TorchRL's loggers."""
        try:
            return [self._logger(name) for name in self.config.log.loggers]
        except (ImportError, TypeError, ValueError) as error:
            raise ConfigError.of("log", error) from error

    def _logger(self, name: str) -> Any:
        # one name for each start: a resumed run would otherwise show the steps after its checkpoint twice
        experiment = f"events/{datetime.now(UTC):%Y-%m-%d-%H-%M-%S}"
        arguments = self.config.log.arguments.get(name, {})
        return get_logger(name, str(self._folder), experiment, **({f"{name}_kwargs": arguments} if arguments else {}))

    def record(self, steps_done: int, start: Path | None) -> RunRecord:
        """Return the run's files, as they were after so many steps.

        A run that is to be replaced stays until the first step is done; ``start`` belongs to this run.
        """

        def forget() -> None:
            note_launch(self._folder, launch_of())
            if not self.config.resume:
                Checkpoints.forget(self._folder / "checkpoints")
                for other in {*starts(self._folder)} - {start}:
                    shutil.rmtree(other, ignore_errors=True)

        config = replace(self.config, overwrite=False)  # what was done once is not to be done when it is read again
        record = RunRecord(self._folder, as_yaml(config), steps_done, forget)
        if not self.config.overwrite:
            record.begin()
        return record
