"""``MoEGRPOTrainer``: GRPO for Mixture-of-Experts models, over TorchRL's ``Trainer`` and its hooks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.record.loggers.utils import get_logger
from torchrl.trainers import Trainer
from tqdm.auto import tqdm

from torchrl_moe.collectors.async_collector import AsyncLLMCollector
from torchrl_moe.modules.policies.transformers_wrapper import TransformersWrapper
from torchrl_moe.trainers.batch_figures import batch_figures
from torchrl_moe.trainers.checkpoints import Checkpoints, NothingKept, TrainedWeights
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, as_yaml
from torchrl_moe.trainers.function_names import import_function, is_function_name
from torchrl_moe.trainers.health import HealthMonitor
from torchrl_moe.trainers.learner import Learner
from torchrl_moe.trainers.loss_building import advantages
from torchrl_moe.trainers.minibatches import Minibatches
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.rollout_engine import RolloutEngine
from torchrl_moe.trainers.rollout_source import RolloutSource
from torchrl_moe.trainers.run_lock import RunLock
from torchrl_moe.trainers.run_record import Row, RunRecord
from torchrl_moe.trainers.run_reports import RunReports
from torchrl_moe.trainers.signal_filter import SignalFilter
from torchrl_moe.trainers.step_clock import StepClock

__all__ = ["MoEGRPOTrainer"]

LOG = logging.getLogger(__name__)

SHOWN = {"reward": ".2f", "loss": ".3f", "kl": ".1e", "staleness": ".1f", "tokens_per_second": ".0f", "version": "d"}
"""Columns beside the bar, and their formats."""
NEVER_EVALUATED = -1e300
REWARDED = 5
"""Steps whose mean reward chooses the best checkpoint where nothing is held out."""


class MoEGRPOTrainer(RunReports, Trainer):
    """Trains a model with an engine of its own: rollouts, advantages, updates on the recorded experts, weight sync.

    Args:
        model: a transformers model, a folder or a hub name; default: ``config.model.source``.
        dataset: rows with a prompt: a list of dicts, a Hugging Face dataset, a file or folder of JSON lines, a hub
            name; default: ``config.data.source``. Or ``env``.
        env: an environment, a callable that makes one, or an async function that plays a sample, see
            :class:`~torchrl_moe.collectors.AsyncLLMCollector`.
        rewards: a function or functions of an answer, with any of ``prompt``, ``completion``, ``completion_ids`` and
            the columns of the dataset as parameters.
        held_out: another dataset, or environment, to evaluate on; default: ``config.data.held_out`` rows of the data.
        config: all the rest.
        tokenizer: default: the one beside the model.
        engine: an :class:`~torchrl_moe.modules.AsyncVLLM` of a model of the same shape; default: one of its own.

    Raises:
        ConfigError: a setting that cannot be meant, before anything is started or written.
        UnsupportedRouterError: replay of a model without experts, or with routers that cannot be replayed.

    Hooks of TorchRL's trainer run where they do there, ``trainer.register_op("batch_process", hook)`` say; a batch has
    advantages by then. Use it as a context, or call :meth:`shutdown`.

    Example::

        with MoEGRPOTrainer("my/moe", dataset=rows, rewards=lambda completion, answer: completion == answer) as trainer:
            trainer.train()
            trainer.plot()
    """

    def __init__(
        self,
        model: Any = None,
        *,
        dataset: Any = None,
        env: Any = None,
        rewards: Sequence[Callable[..., Any]] | Callable[..., Any] | None = None,
        held_out: Any = None,
        config: GRPOConfig | None = None,
        tokenizer: Any = None,
        engine: Any = None,
    ) -> None:
        self.config = config = copy.deepcopy(config) if config is not None else GRPOConfig()
        config.check()
        self._hooks = _functions(config.hooks)
        torch.manual_seed(config.seed)
        folder = Path(config.out)
        self.policy_model = self._load_model(model, tokenizer, folder)
        actor = TransformersWrapper(
            self.policy_model.model,
            tokenizer=self.policy_model.tokenizer,
            replay=config.loss.replay,  # type: ignore[arg-type]
        )
        self.source = RolloutSource.of(
            config, self.policy_model.tokenizer, dataset=dataset, env=env, rewards=rewards, held_out=held_out
        )
        self.clock, self.health = StepClock(), HealthMonitor()
        self.steps_done = self.trained_tokens = self._restored_version = self._unsynced = 0
        self._scores: dict[int, float] = {}  # of held-out prompts, by the weights after so many steps
        self._has_ended = False
        self._figures: dict[str, Any] = {}
        self._bar: Any = None
        self._beside = ThreadPoolExecutor(1, "torchrl_moe-evaluation")
        self._evaluation: Future[float | None] | None = None
        with ExitStack() as made:  # ends what was made if something after it fails
            made.callback(RunLock(folder).close)
            self.learner = Learner(actor, self.policy_model, config)
            made.callback(self.learner.shutdown)
            self.rollout_engine = RolloutEngine(self.policy_model, config, folder, engine)
            made.callback(self.rollout_engine.shutdown)
            made.callback(self._beside.shutdown, wait=False, cancel_futures=True)
            try:
                self._assemble(folder, made)
            except BaseException:
                made.callback(self.rollout_engine.forget_start)
                raise
            self._made = made.pop_all()

    def _load_model(self, model: Any, tokenizer: Any, folder: Path) -> PolicyModel:
        source = self.config.model.source
        starts = sorted(folder.glob("start-*/config.json"), key=lambda path: path.stat().st_mtime)
        is_made = model is None and source is not None and is_function_name(source)
        if self.config.resume and is_made and starts:  # no need to make it again
            return PolicyModel.load(None, tokenizer, replace(self.config.model, source=str(starts[-1].parent)))
        return PolicyModel.load(model, tokenizer, self.config.model)

    def _assemble(self, folder: Path, made: ExitStack) -> None:
        """Make the collector, the base class's part, and what is registered there."""
        config = self.config
        try:
            collector = self._make_collector()
            made.callback(collector.shutdown)
            loggers = [self._make_logger(name, folder) for name in config.log.loggers]
        except (ImportError, TypeError, ValueError) as error:
            raise ConfigError.of("rollout or log", error) from error
        # a mistake has been noticed by now, and has left an older run as it was
        if not config.resume:
            Checkpoints.forget(folder / "checkpoints")
            for start in set(folder.glob("start-*")) - {self.rollout_engine.start}:
                Checkpoints.forget(start)
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            {
                "policy": TrainedWeights(self.policy_model.model),
                "optimizer": self.learner.optimizer,
                "collector": collector,
                "run": self,
                "loss_module": NothingKept(),
                "logger": NothingKept(),
            },
            config.checkpoint.keep,
        )
        super().__init__(
            collector=collector,
            total_frames=2**62,  # a run ends after so many steps, however many rows a batch has
            frame_skip=1,
            optim_steps_per_batch=config.optim.minibatches,
            num_epochs=config.optim.epochs,
            loss_module=self.learner.loss,
            optimizer=self.learner.optimizer,
            optimization_stepper=self.learner.stepper,
            progress_bar=False,  # it counts frames; this one counts steps
            log_interval=0,
            auto_log_optim_steps=False,
            checkpoint=self.checkpoints.checkpoint,
        )
        if config.resume and not self.checkpoints.load():
            LOG.warning("there is no checkpoint in %s: starting from the beginning", folder)
        self.learner.apply(config.optim)
        self.record = RunRecord(folder, as_yaml(config), self.steps_done)
        self.record.loggers = loggers
        self.logger = self.record.loggers[0] if self.record.loggers else None
        if self.steps_done or not self.rollout_engine.has_the_models_weights:
            self.rollout_engine.restore(self._restored_version)
        self.register_op("batch_process", self._receive)
        Minibatches(config.optim.minibatches).register(self)
        self.register_op("post_steps", self._sync)
        self.register_op("post_steps_log", self._finish_step)
        for hook in self._hooks:
            hook(self)

    def _make_collector(self) -> AsyncLLMCollector:
        rollout = self.config.rollout
        groups = self.config.steps * rollout.prompts_per_step
        failures = max(rollout.prompts_per_step, groups // 10) if rollout.max_failures is None else rollout.max_failures
        collector = AsyncLLMCollector(
            self.source.env,
            policy=self.rollout_engine.policy,
            dataloader=self.source.dataloader,
            group_size=rollout.group_size,
            groups_per_batch=rollout.prompts_per_step,
            max_staleness=rollout.max_staleness,
            order=rollout.order,  # type: ignore[arg-type]
            window=rollout.window,
            on_stale=rollout.on_stale,  # type: ignore[arg-type]
            over_sample=rollout.over_sample,
            group_filter=SignalFilter(rollout.prompts_per_step) if rollout.drop_uniform_groups else None,
            max_failures=failures,
            reward_timeout=rollout.reward_timeout,
        )
        self.rollout_engine.sender.register_collector(collector)
        return collector

    def _make_logger(self, name: str, folder: Path) -> Any:
        # one name for each start: a run that goes on would show the steps after its checkpoint twice
        experiment = f"events/{datetime.now(UTC):%Y-%m-%d-%H-%M-%S}"
        arguments = self.config.log.arguments.get(name, {})
        return get_logger(name, str(folder), experiment, **({f"{name}_kwargs": arguments} if arguments else {}))

    # -- a step -----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Run all steps that are left. After a Ctrl-C, ``config.resume`` goes on from the last checkpoint."""
        if self.steps_done >= self.config.steps:
            LOG.warning("all %d steps are done", self.config.steps)
            return
        if self._has_ended:
            raise RuntimeError(
                "this run has ended, or was interrupted: go on with another trainer and config.resume=True"
            )
        total, is_silent = self.config.steps, not self.config.log.progress
        with tqdm(desc="GRPO", unit="step", disable=is_silent, initial=self.steps_done, total=total) as self._bar:
            self._begin_evaluation()
            self.clock.begin()
            try:
                super().train()
            finally:
                self._has_ended = True  # in the middle of a step, weights and collector may not fit together

    def _begin_evaluation(self) -> None:
        """Evaluate beside the next step, if that is due: its weights are the engine's until the next sync."""
        every = self.config.eval.every
        if every and self.steps_done % every == 0:
            self._evaluation = self._beside.submit(self.evaluate)

    def _end_evaluation(self) -> None:
        """Wait for the evaluation beside this step, if there is one; a reward that raises costs no more than that."""
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is None:
            return
        error = evaluation.exception()
        if error is None:
            score = evaluation.result()
            self._figures["held_out_reward"] = score
            if score is not None and not self._unsynced:  # else it is of older weights
                self._scores[self.steps_done] = score
        else:
            LOG.warning("no evaluation at step %d: %r", self.steps_done, error)

    def _receive(self, batch: TensorDictBase) -> TensorDictBase:
        """Take a batch: its figures, advantages, scores."""
        self.clock.end("generate")
        if self.config.engine.sleep:
            self._end_evaluation()
        self.rollout_engine.sleep()
        version = self.rollout_engine.version + self._unsynced  # an update that the engine has not got counts, too
        self._figures |= batch_figures(batch, version)
        if self.config.log.samples:
            self.record.add_samples(self.steps_done, batch, self.config.log.samples)
        with self.clock("score"):
            batch = advantages(self.config.loss.advantage, batch)
            batch.set("current_version", torch.full(batch.batch_size, version))
            every = self.config.eval.mismatch_every
            due = bool(every) and self.steps_done % every == 0
            self._figures |= self.learner.scores(batch, version, due)
        self.clock.begin_phase()
        return batch

    def _sync(self) -> None:
        """Note what the updates gave, and bring the weights to the engine."""
        self.clock.end("train")
        self._end_evaluation()
        self._figures |= self.learner.stepper.take_figures()
        self.steps_done += 1
        self.trained_tokens += int(self._figures["tokens"])
        with self.clock("sync"):
            self._unsynced += 1
            if self.steps_done % self.config.engine.sync_every == 0 or self.steps_done == self.config.steps:
                self.rollout_engine.sync()
                self._unsynced = 0
            self.rollout_engine.wake_up()

    def _finish_step(self, batch: TensorDictBase) -> None:
        """Record the step, begin an evaluation, and stop after the last one."""
        del batch
        seconds = dict(self.clock.seconds)
        is_last = self.steps_done >= self.config.steps
        if is_last and self.config.eval.every:
            self._evaluation = self._beside.submit(self.evaluate)
            self._end_evaluation()
        row = self.record.add(
            {
                "step": self.steps_done - 1,
                **{name: value for name, value in self._figures.items() if value is not None},
                "version": self.rollout_engine.version,
                "trained_tokens": self.trained_tokens,
                "tokens_per_second": self._figures["tokens"] / sum(seconds.values()),
                **{f"seconds_{phase}": value for phase, value in seconds.items()},
                **{name: value for name, value in self.collector.stats().items() if "idle" in name},
            }
        )
        self._figures = {}
        self.health.check(self.record.rows)
        self._show(row)
        if is_last:
            self.request_stop("all steps are done")
        else:
            self._begin_evaluation()

    def _show(self, row: Row) -> None:
        shown = [f"{name} {row[name]:{form}}" for name, form in SHOWN.items() if row.get(name, "") != ""]
        self._bar.set_postfix_str(", ".join(shown), refresh=False)
        self._bar.update()

    def save_trainer(self, force_save: bool = False) -> None:
        """Write a checkpoint if one is due; one that does not fit on the disk is a warning."""
        every = self.config.checkpoint.every
        if every and (force_save or self.steps_done % every == 0):
            self._end_evaluation()  # of the weights that are saved
            self.checkpoints.save(self.steps_done, self._score())
        self.clock.begin()

    def _score(self) -> float:
        """Return what the best checkpoint is chosen by: weights that were not evaluated are never the best."""
        if self.source.held_out and self.config.eval.every:
            return self._scores.get(self.steps_done, NEVER_EVALUATED)
        rewards = self.record.column("reward")[-REWARDED:]
        return sum(rewards) / max(len(rewards), 1)

    # -- state, as a component of a checkpoint ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the run is; weights, optimizer and collector are components of their own."""
        return {"step": self.steps_done, "tokens": self.trained_tokens, "version": self.rollout_engine.version}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.steps_done, self.trained_tokens = state_dict["step"], state_dict["tokens"]
        self._restored_version = state_dict["version"]

    # -- looking at it ----------------------------------------------------------------------------------------------

    def evaluate(self) -> float | None:
        """Return the mean reward of greedy answers to held-out prompts; ``None``: nothing is held out."""
        return self.source.evaluate(self.rollout_engine.policy, self.config.rollout.reward_timeout)

    # -- the end ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the collector, the weight sync, and the engines that it started. Idempotent."""
        self._made.close()

    def __enter__(self) -> MoEGRPOTrainer:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _functions(names: Sequence[str]) -> list[Callable[[MoEGRPOTrainer], object]]:
    try:
        return [import_function(name) for name in names]
    except ValueError as error:
        raise ConfigError(f"hooks: {error}") from error
