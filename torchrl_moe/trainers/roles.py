"""What the first rank does beside training (engine, data, records), and what the others do instead."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tensordict import TensorDictBase
from torchrl.record.loggers import Logger, get_logger

from torchrl_moe.collectors.async_collector import AsyncLLMCollector
from torchrl_moe.modules.serving.async_vllm import AsyncVLLM
from torchrl_moe.trainers.checkpoints import Checkpoints, NothingKept
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, as_yaml
from torchrl_moe.trainers.policy_model import PolicyModel, starts
from torchrl_moe.trainers.ranks import Ranks, launch_of, note_launch, unpack
from torchrl_moe.trainers.rollout_engine import Given, RolloutEngine, RolloutSource
from torchrl_moe.trainers.run_folder import RunLock
from torchrl_moe.trainers.run_record import RunRecord, sample_rewards, what_a_run_left, what_no_run_wrote
from torchrl_moe.weight_update.report import SyncReport
from torchrl_moe.weight_update.scheme import VLLMWeightSyncScheme

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

__all__ = ["Evaluation", "FollowedEngine", "FollowedRollouts", "Follower", "Leader", "NoRecord", "SignalFilter"]


LOG = logging.getLogger(__name__)

BATCHES = 10
"""Batches' worth of groups that are dropped in a row before a warning is logged."""


class SignalFilter:
    """Drops groups whose answers all have the same reward, as DAPO's dynamic sampling does (arXiv 2503.14476)."""

    def __init__(self, groups: int) -> None:
        self._limit = BATCHES * groups
        self._left_out = 0

    def __call__(self, group: TensorDictBase) -> bool:
        """Whether the samples of a group, ``[rows]``, have different rewards, each the sum of its turns'."""
        # one warning for each so many in a row: a run that waits for groups looks as if it hung
        rewards = set(sample_rewards(group.unbind(0))[0])
        self._left_out = 0 if len(rewards) > 1 else self._left_out + 1
        if self._left_out and self._left_out % self._limit == 0:
            LOG.warning(
                "the last %d groups were left out, each with the same reward throughout: the prompts are too easy or "
                "too hard, or the reward is always the same; drop_uniform_groups waits for others",
                self._left_out,
            )
        return len(rewards) > 1


class Leader:
    """Makes what only rank 0 has: engine, collector, the run's folder; :class:`Follower` makes stand-ins of them."""

    def __init__(self, config: GRPOConfig) -> None:
        self.config, self._folder = config, Path(config.out)

    def source(self, tokenizer: Tokenizer, given: Given) -> RolloutSource:
        """Return where samples come from, see :meth:`RolloutSource.of`."""
        return RolloutSource.of(self.config, tokenizer, given)

    def lock(self) -> Callable[[], None]:
        """Lock the run's folder; return the lock's release."""
        lock = RunLock(self._folder)
        try:
            self.refuse_older_run()
        except ConfigError:
            lock.close()
            raise
        return lock.close

    def refuse_older_run(self, model: object = None) -> None:
        """Refuse a folder that holds a run, unless it is to be continued or replaced."""
        # files of the same names that no run wrote are never replaced, whatever is set
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

    def engine(self, policy_model: PolicyModel, engine: AsyncVLLM | None) -> RolloutEngine:
        """Return the engine that serves the policy's weights; start one if none is given."""
        return RolloutEngine(policy_model, self.config, self._folder, engine)

    def collector(self, source: RolloutSource, rollout_engine: RolloutEngine) -> AsyncLLMCollector:
        """Return what collects samples, as the configuration says."""
        rollout = self.config.rollout
        groups = self.config.steps * rollout.prompts_per_step
        # by default a tenth of the run's groups may fail
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

    def loggers(self) -> list[Logger]:
        """Return those of TorchRL's loggers that the configuration names."""
        # one name for each start: a resumed run would otherwise show the steps after its checkpoint twice
        experiment, log = f"events/{datetime.now(UTC):%Y-%m-%d-%H-%M-%S}", self.config.log
        given = [{f"{name}_kwargs": log.arguments[name]} if log.arguments.get(name) else {} for name in log.loggers]
        named = zip(log.loggers, given, strict=True)
        try:
            return [get_logger(name, str(self._folder), experiment, **arguments) for name, arguments in named]
        except (ImportError, TypeError, ValueError) as error:
            raise ConfigError.of("log", error) from error

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


class FollowedRollouts(NothingKept):
    """Iterates over this rank's shares of the batches that rank 0 collects, until rank 0 has no more."""

    init_random_frames = 0  # TorchRL's trainer reads it

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __iter__(self) -> Iterator[TensorDictBase]:
        while True:
            # rank 0 generates meanwhile, which may take long
            self._ranks.meet("rollouts", patient=True)
            payload: bytes | None = self._ranks.scatter(None)
            if payload is None:
                return
            yield unpack(payload)

    def shutdown(self) -> None:
        """Do nothing: rank 0 collects."""


class FollowedEngine(RolloutEngine):
    """Takes part in sending weights to rank 0's engine: each rank holds a part of every weight."""

    def __init__(self, policy_model: PolicyModel, config: GRPOConfig) -> None:
        # not the base's, which starts an engine; what is inherited sends weights, and ends the sending
        self.config, self.policy_model, self.start = config, policy_model, None
        self.policy = None
        self._owns_engine = self._joins_engine = False
        self.sender = VLLMWeightSyncScheme(**config.engine.sync).create_sender()
        self.sender.register_model(policy_model.model)

    def restore(self, version: int) -> None:
        """Send the weights, under rank 0's version number."""
        del version
        self.sync()

    def sync(self) -> SyncReport:
        """Send the weights; rank 0 reports replicas that failed."""
        return self.sender.update_weights()


class NoRecord(RunRecord):
    """A record that writes nothing: rank 0 writes the run's."""

    def __init__(self, folder: Path) -> None:
        # not the base's, which makes the folder and reads its files
        self.folder, self.loggers, self.rows = folder, [], []


class Follower:
    """Stand-ins for what only rank 0 has, as far as the other ranks need them."""

    def __init__(self, config: GRPOConfig, ranks: Ranks) -> None:
        self.config, self._ranks, self._folder = config, ranks, Path(config.out)
        # rank 0 evaluates, and shows what the run does
        config.eval.every = config.log.samples = 0
        config.log.loggers, config.log.progress = [], False

    def source(self, tokenizer: Tokenizer, given: Given) -> RolloutSource:
        """Return no data: only rank 0 reads it."""
        del tokenizer, given
        return RolloutSource(None, None)

    def lock(self) -> Callable[[], None]:
        """Lock nothing: rank 0 has the folder."""
        return lambda: None

    def engine(self, policy_model: PolicyModel, engine: AsyncVLLM | None) -> FollowedEngine:
        """Return what takes part in sending weights."""
        del engine
        return FollowedEngine(policy_model, self.config)

    def collector(self, source: RolloutSource, rollout_engine: RolloutEngine) -> FollowedRollouts:
        """Return what waits for this rank's shares."""
        del source, rollout_engine
        return FollowedRollouts(self._ranks)

    def loggers(self) -> list[Logger]:
        """Return no logger: rank 0 has the metrics."""
        return []

    def record(self, steps_done: int, start: Path | None) -> NoRecord:
        """Return a record that writes nothing."""
        del steps_done, start
        return NoRecord(self._folder)


class Evaluation:
    """Evaluates in a thread while a step runs, on the weights that the engine has until the next sync."""

    def __init__(self, evaluate: Callable[[], float | None]) -> None:
        self.scores: dict[int, float] = {}
        self._evaluate = evaluate
        self._thread = ThreadPoolExecutor(1, "torchrl_moe-evaluation")
        self._running: Future[float | None] | None = None

    def begin(self) -> None:
        """Begin an evaluation; :meth:`end` waits for it."""
        self._running = self._thread.submit(self._evaluate)

    def end(self, step: int, is_of_the_newest: bool) -> dict[str, float]:
        """Wait for the running evaluation, if there is one; a reward that raises costs only that evaluation."""
        running, self._running = self._running, None
        if running is None:
            return {}
        error = running.exception()
        if error is not None:
            LOG.warning("no evaluation at step %d: %r", step, error)
            return {}
        score = running.result()
        if score is None:
            return {}
        # a score of older weights must not choose the best checkpoint
        if is_of_the_newest:
            self.scores[step] = score
        return {"held_out_reward": score}

    def close(self) -> None:
        """Start no further evaluation, and wait for none. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
