"""``MoEGRPOTrainer``: GRPO for Mixture-of-Experts models, over TorchRL's ``Trainer`` and its hooks."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.trainers import Trainer
from tqdm.auto import tqdm

from torchrl_moe.collectors.workflow import EnvLike
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.policies.transformers_wrapper import TransformersWrapper
from torchrl_moe.modules.serving.async_vllm import AsyncVLLM
from torchrl_moe.trainers.checkpoints import Checkpoints, NothingKept, TrainedState
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, nearest
from torchrl_moe.trainers.function_names import import_function
from torchrl_moe.trainers.learner import Learner, Minibatches, advantages, in_rows
from torchrl_moe.trainers.placement import Placement
from torchrl_moe.trainers.policy_model import ModelLike, starting_model
from torchrl_moe.trainers.ranks import join_ranks, launch_of, pack, resume_after_restart, shares
from torchrl_moe.trainers.rewards import RewardFunction
from torchrl_moe.trainers.roles import Evaluation, Follower, Leader
from torchrl_moe.trainers.rollout_engine import Given, RolloutSource, check_arguments
from torchrl_moe.trainers.run_record import HealthMonitor, Row, RunReports, batch_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

__all__ = ["MoEGRPOTrainer", "StepClock", "finishing"]


class StepClock:
    """Counts the seconds of each phase of a training step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.is_recorded = False  # the step is over, and the next begins at its checkpoint's end
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Begin a step, and its first phase."""
        self.seconds, self.is_recorded = {}, False
        self.begin_phase()

    def begin_phase(self) -> None:
        """Begin a phase that :meth:`end` ends."""
        self._began = time.perf_counter()

    def end(self, phase: str) -> None:
        """Count the time since :meth:`begin_phase` towards a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - self._began

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time inside the context towards a phase."""
        self.begin_phase()
        try:
            yield
        finally:
            self.end(phase)


LOG = logging.getLogger(__name__)

USUAL: dict[signal.Signals, Callable[[int, FrameType | None], object] | signal.Handlers] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""Ctrl-C, what batch schedulers send, and the end of a terminal (without nohup) -> what Python does then."""


@contextmanager
def finishing(ask: Callable[[], None], end: Callable[[], object], seconds: float) -> Iterator[None]:
    """Let what runs in the context finish when the process is told to end; then the signal has its usual effect.

    A second signal, or the deadline, ends it at once. Handlers of the user's own stay, and so does everything outside
    the main thread, where Python hears no signals.
    """
    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number, usual in USUAL.items() if is_main and seconds and signal.getsignal(number) is usual]
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        # the second signal: no more grace
        if received:
            restore()
            signal.raise_signal(number)
            return
        received.append(number)
        timer.start()
        LOG.warning(
            "%s: the running step is finished and saved, in at most %g s; a second signal ends the run at once",
            signal.Signals(number).name,
            seconds,
        )
        ask()

    def restore() -> None:
        for number in ours:
            signal.signal(number, USUAL[number])

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), lambda: os.kill(os.getpid(), received[0]))
    timer.daemon = True
    for number in ours:
        signal.signal(number, handle)
    try:
        yield
    finally:
        timer.cancel()
        restore()
    # the step is saved by now: the signal gets its usual effect
    if received:
        if received[0] != signal.SIGINT:  # a KeyboardInterrupt leaves clean-up to the contexts that it passes
            end()
        signal.raise_signal(received[0])


SHOWN = {
    "reward": ".2f",
    "loss": ".3f",
    "mismatch_kl": ".1e",
    "staleness": ".1f",
    "tokens_per_second": ".0f",
    "version": "d",
}
"""Columns beside the progress bar, and their formats."""
PRINTED = {
    "reward": ("reward", ".2f"),
    "held_out_reward": ("held out", ".2f"),
    "dlogp_mean": ("mismatch", ".1e"),
    "tokens_per_second": ("tokens/s", ".0f"),
}
"""Columns of a line where there is no bar, their names there and formats."""
TRL = {
    "args": "config=",
    "train_dataset": "dataset=",
    "eval_dataset": "held_out=",
    "reward_funcs": "rewards=",
    "reward_weights": "config.data.weights",
    "processing_class": "tokenizer=",
    "peft_config": "config.model.lora, or a model with an adapter",
    "callbacks": "config.hooks, or register_op",
    "environment_factory": "env=",
    "rollout_func": "env=",
}
"""TRL's names for what a trainer is given."""
INSIDE = ("post_loss", "process_loss", "optimizer")
"""TorchRL's places for hooks that its trainer passes over where an ``OptimizationStepper`` makes the step."""
NEVER_EVALUATED = -1e300
REWARDED = 5
"""Steps whose mean reward selects the best checkpoint when there is no held-out data."""


class MoEGRPOTrainer(RunReports, Trainer):
    """Trains a model with its own engine: rollouts, advantages, updates on the recorded experts, weight sync.

    Args:
        model: a transformers model, a folder or a hub name; default: ``config.model.source``.
        dataset: rows with a prompt: a list of dicts, a Hugging Face dataset, a file or folder of JSON lines, a hub
            name; default: ``config.data.source``. Or ``env``.
        env: an environment, a callable that makes one, or an async function that runs a sample, see
            :class:`~torchrl_moe.collectors.AsyncLLMCollector`.
        rewards: a function or functions of an answer, with any of ``prompt``, ``completion``, ``completion_ids`` and
            the columns of the dataset as parameters.
        held_out: another dataset, or environment, to evaluate on; default: ``config.data.held_out`` rows of the data.
        config: all other settings, or a dict of them, such as ``{"steps": 3, "optim": {"lr": 1e-5}}``.
        tokenizer: default: the one in the model's folder.
        engine: an :class:`~torchrl_moe.modules.AsyncVLLM` of a model of the same shape; default: it starts its own.
        **others: refused, each with its name here.

    Each rank started by a launcher such as ``torchrun`` makes a trainer, with the same arguments. Rank 0 has data and
    engine, and sends the others their share of each batch; ``config.placement`` says how they share the model.

    Raises:
        ConfigError: an invalid setting; raised before anything is started or written.
        RankError: another rank failed, or did not arrive in time.
        TypeError: an argument that it does not have; the nearest that it has.
        UnsupportedRouterError: replay of a model without experts, or with routers that cannot be replayed.

    Hooks run at the same points as in TorchRL's trainer, for example ``trainer.register_op("batch_process", hook)``; by
    then a batch has advantages. Those inside of an optimizer step (``post_loss``, ``process_loss``, ``optimizer``)
    are refused: ``"process_optim_batch"`` is before it, ``"post_optim"`` after it. Use it as a context manager, or call
    :meth:`shutdown`.

    Example::

        with MoEGRPOTrainer("my/moe", dataset=rows, rewards=lambda completion, answer: completion == answer) as trainer:
            trainer.train()
            trainer.plot()
    """

    def __init__(
        self,
        model: ModelLike | None = None,
        *,
        dataset: object = None,
        env: EnvLike | None = None,
        rewards: Sequence[RewardFunction] | RewardFunction | None = None,
        held_out: object = None,
        config: GRPOConfig | Mapping[str, object] | None = None,
        tokenizer: Tokenizer | None = None,
        engine: AsyncVLLM | None = None,
        **others: object,
    ) -> None:
        for name in others:
            known = [one for one in inspect.signature(MoEGRPOTrainer).parameters if one != "others"]
            hint = f"here it is {TRL[name]}" if name in TRL else nearest(name, known)
            raise TypeError(f"MoEGRPOTrainer has no {name}: {hint}; settings are in config=GRPOConfig(...)")
        self.config = config = _read(config)
        model = Path(model).expanduser() if isinstance(model, str) and model.startswith("~") else model
        try:
            self._hooks = [import_function(name) for name in config.hooks]
        except ValueError as error:
            raise ConfigError(f"hooks: {error}") from error
        self.clock, self.health = StepClock(), HealthMonitor()
        self.steps_done = self.trained_tokens = self._restored_version = self._unsynced = 0
        self._has_ended = self._is_asked_to_stop = self._is_interrupted = False
        self._process = os.getpid()
        self._step_metrics: dict[str, float] = {}
        given = Given(dataset=dataset, env=env, rewards=rewards, held_out=held_out)
        # ends what was made if something after it fails
        with ExitStack() as made:
            self.ranks = join_ranks(config.placement.timeout, config.placement.collective_timeout)
            made.callback(self.ranks.close)
            with self.ranks.guard():
                # cheap checks first: loading a model or starting an engine takes minutes
                if self.ranks.is_first:
                    RolloutSource.check_names(config, given)
                    if engine is None and config.engine.connect is None:
                        check_arguments(config)
                    resume_after_restart(config, launch_of())
                    Leader(config).refuse_older_run(model)
                # a launcher that starts all ranks again makes rank 0 resume, so the others ask it
                config.resume = self.ranks.from_first(config.resume, "whether to resume")
                self._build(model, tokenizer, engine, given, made)
            self._made = made.pop_all()

    def _build(
        self,
        model: ModelLike | None,
        tokenizer: Tokenizer | None,
        engine: AsyncVLLM | None,
        given: Given,
        made: ExitStack,
    ) -> None:
        """Make the model, what trains it, what generates, and the base class's part."""
        config, ranks = self.config, self.ranks
        self.placement = Placement.of(ranks, config)
        # rank 0 has engine, data and files; the others have stand-ins with the same methods
        self.role = Leader(config) if ranks.is_first else Follower(config, ranks)
        random.seed(config.seed)
        np.random.seed(config.seed)
        torch.manual_seed(config.seed)
        self.policy_model = starting_model(model, tokenizer, config, self.placement)
        start = self.policy_model.start
        try:
            actor = TransformersWrapper(
                self.policy_model.model,
                tokenizer=self.policy_model.tokenizer,
                replay=config.loss.replay,  # type: ignore[arg-type]
            )
            # data before the lock, and the lock before anything is written
            self.source = self.role.source(self.policy_model.tokenizer, given)
            made.callback(self.role.lock())
            self.learner = Learner(actor, self.policy_model, config, self.placement)
            made.callback(self.learner.shutdown)
            self.rollout_engine = self.role.engine(self.policy_model, engine)
            start = self.rollout_engine.start
            made.callback(self.rollout_engine.shutdown)
            self._evaluation = Evaluation(lambda: self.evaluate())
            made.callback(self._evaluation.close)
            self._assemble(made)
        except BaseException:
            # the run does not begin: the model that it would have started from goes too, after the engine
            if start is not None and ranks.is_first:
                made.callback(shutil.rmtree, start, True)
            raise

    def _assemble(self, made: ExitStack) -> None:
        """Make the collector, the base class's part, and what is registered there."""
        config, role, folder = self.config, self.role, Path(self.config.out)
        collector = role.collector(self.source, self.rollout_engine)
        made.callback(collector.shutdown)
        loggers = role.loggers()
        self.ranks.meet("assembling the run", patient=True)
        # any mistake, on any rank, was noticed before this point, and an older run is replaced by the first step's end
        # weights and optimizer are written by TrainedState, in parts: TorchRL's own components keep nothing of them
        nothing = {name: NothingKept() for name in ("policy", "optimizer", "loss_module", "logger")}
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            TrainedState(self.policy_model.model, self.learner.optimizer),
            {**nothing, "collector": collector, "run": self},
            config.checkpoint.keep,
            self.ranks,
        )
        made.callback(self.checkpoints.close)
        if config.checkpoint.every:
            self.checkpoints.check_folder()
        super().__init__(
            collector=collector,
            total_frames=2**62,  # a run ends after config.steps steps, however many rows a batch has
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
        # the checkpoint brought the optimizer's settings of that time
        self.learner.apply(config.optim)
        self.record = role.record(self.steps_done, self.rollout_engine.start)
        self.record.loggers = loggers
        self.logger = self.record.loggers[0] if self.record.loggers else None
        started_from_it = self.ranks.from_first(self.rollout_engine.has_the_models_weights, "the engine's weights")
        # an engine that is lent, or that started from older weights, gets the trainer's before it answers
        if self.steps_done or not started_from_it:
            self.rollout_engine.restore(self._restored_version)
        self._register()

    def _register(self) -> None:
        """Register what happens in a step; rank 0 alone has the whole batch and the record."""
        leads = self.ranks.is_first
        # in the order of a step: receive and share a batch, score it, update on its parts, send the weights, record
        if leads:
            self.register_op("batch_process", self._receive)
        self.register_op("batch_process", self._score)
        Minibatches(self.config.optim.minibatches, self.ranks).register(self)
        self.register_op("post_steps", self._sync)
        if leads:
            self.register_op("post_steps_log", self._record_step)
        self.register_op("post_steps_log", self._end_step)
        for hook in self._hooks:
            hook(self)

    def register_op(self, dest: str, op: Callable[..., object], **kwargs: object) -> None:
        """Register a hook.

        Raises:
            ValueError: TorchRL would never run it, because the trainer has an ``OptimizationStepper``.
        """
        if dest in INSIDE:
            raise ValueError(
                f"no hook runs at {dest!r}, inside of an optimizer step, which is one call here: register it at "
                "'process_optim_batch' (before it) or 'post_optim' (after it); 'batch_process' has the whole batch"
            )
        super().register_op(dest, op, **kwargs)

    # -- a step

    def train(self) -> None:
        """Run all remaining steps. After a Ctrl-C, ``config.resume`` continues from the last checkpoint."""
        if self.steps_done >= self.config.steps:
            LOG.warning("all %d steps are done", self.config.steps)
            return
        if self._has_ended:
            how = "continue with another trainer and config.resume=True"
            raise RuntimeError(f"this run has ended, was shut down or interrupted: {how}")
        # None: tqdm shows no bar in a log file either
        self._began, self._began_at = time.monotonic(), self.steps_done
        total, is_silent = self.config.steps, None if self.config.log.progress else True
        self.register_op("post_steps_log", self._agree_to_stop)  # after all hooks
        with (
            self.ranks.guard(),
            tqdm(desc="GRPO", unit="step", disable=is_silent, initial=self.steps_done, total=total) as self._bar,
        ):
            self._say(self._headline())
            self._begin_evaluation()
            self.clock.begin()
            grace = self.config.checkpoint.grace if self.config.checkpoint.every else 0
            try:
                with finishing(self._interrupt, self.shutdown, grace):
                    super().train()
                    self._end_rollouts()
                    self._say(f"{self.steps_done} steps are done; metrics, samples and checkpoints: {self.config.out}")
            finally:
                self._has_ended = True  # in the middle of a step, weights and collector may be inconsistent

    def _interrupt(self) -> None:
        self._is_interrupted = True  # the ranks agree on it at the end of a step

    def _say(self, line: str) -> None:
        """Print a line where there is no bar, and no terminal to show one."""
        if self.config.log.progress and self._bar.disable:
            try:
                print(line, flush=True)
            except OSError as error:  # a full disk, or a pipe that nobody reads any more
                LOG.warning("a line of progress was not printed: %s", error)

    def _headline(self) -> str:
        config, rollout = self.config, self.config.rollout
        return (
            f"GRPO in {config.out}: steps {self.steps_done} to {config.steps} of {rollout.prompts_per_step} prompts "
            f"with {rollout.group_size} answers each; evaluation every {config.eval.every} steps, checkpoint every "
            f"{config.checkpoint.every} (0: none)"
        )

    def _end_rollouts(self) -> None:
        """Tell the other ranks that there are no more rollouts, if there are none before the last step."""
        if self.ranks.is_first and not self._is_asked_to_stop:
            self.ranks.meet("rollouts")
            self.ranks.scatter([None] * self.ranks.size)

    def _begin_evaluation(self) -> None:
        """Start an evaluation, if one is due: it runs during the next step, before the engine's weights change."""
        every = self.config.eval.every
        if every and self.steps_done % every == 0:
            self._evaluation.begin()

    def _end_evaluation(self) -> None:
        self._step_metrics |= self._evaluation.end(self.steps_done, not self._unsynced)

    def _receive(self, batch: TensorDictBase) -> TensorDictBase:
        """Compute a batch's metrics and advantages, and give each rank its share."""
        self.clock.end("generate")
        # an engine that sleeps while the trainer trains cannot evaluate beside it
        if self.config.engine.sleep:
            self._end_evaluation()
        self.rollout_engine.sleep()
        version = self.rollout_engine.version + self._unsynced  # also an update that the engine lacks
        self._step_metrics |= batch_metrics(batch, version)
        if self.config.log.samples:
            self.record.add_samples(self.steps_done, batch, self.config.log.samples)
        with self.clock("score"):
            batch = advantages(self.config.loss.advantage, batch)
            batch.set("current_version", torch.full(batch.batch_size, version))
            return self._share(batch)

    def _share(self, batch: TensorDictBase) -> TensorDictBase:
        """Give each rank whole groups; return this one's."""
        if not self.placement.is_shared:
            return batch
        # so many groups that each minibatch has at least one sample
        groups = math.ceil(self.config.optim.minibatches / self.config.rollout.group_size)
        first, *others = self.placement.to_ranks(shares(batch, self.placement.data_size, groups))
        payloads: list[bytes | None] = [None, *map(pack, others)]
        self.ranks.meet("rollouts")
        self.ranks.scatter(payloads)
        return first

    def _score(self, batch: TensorDictBase) -> TensorDictBase:
        """Score this rank's samples before the updates."""
        every, batch = self.config.eval.mismatch_every, in_rows(batch)
        with self.clock("score"):
            version = int(batch.get("current_version")[0])
            found = self.learner.scores(batch, version, bool(every) and self.steps_done % every == 0)
        if self.ranks.is_first:
            self._refuse_a_fault(batch, found)
        self._step_metrics |= found
        self.clock.begin_phase()
        return batch

    def _refuse_a_fault(self, batch: TensorDictBase, found: dict[str, float]) -> None:
        """End the run if engine and trainer differ by more than rounding on answers by the same weights."""
        limit, gap = self.config.eval.max_mismatch, found.get("mismatch_kl", 0.0)
        # only in float32, and on tokens of the newest weights, is a difference no rounding and no age
        dtypes = {self.rollout_engine.dtype, str(self.policy_model.dtype).removeprefix("torch.")}
        if limit is None or gap <= limit or self._step_metrics["staleness"] or dtypes != {"float32"}:
            return
        where = "" if self.placement.is_shared else f" The first such token: {self.learner.first_gap(batch)}."
        raise EngineError(
            f"engine and trainer disagree on answers by the same weights, in float32: mismatch_kl={gap:.2g}, agreement="
            f"{found.get('agreement', math.nan):.2g}.{where} Usual causes: a kernel of the engine (torchrl-moe "
            "conformance MODEL finds it), weights that did not arrive (engine.sync.verify=canary), or routes of other "
            "tokens. eval.max_mismatch=null trains on"
        )

    def _sync(self) -> None:
        """Record the metrics of the updates, and sync the weights to the engine."""
        self.clock.end("train")
        self._end_evaluation()  # it asks for answers by the weights that are about to change
        self._step_metrics |= self.learner.stepper.take_metrics()
        self.steps_done += 1
        with self.clock("sync"):
            # every few steps if so configured; the last step's weights always reach the engine
            self._unsynced += 1
            if self.steps_done % self.config.engine.sync_every == 0 or self.steps_done == self.config.steps:
                self.ranks.meet("weight sync", patient=True)
                self.rollout_engine.sync()
                self._unsynced = 0
            self.rollout_engine.wake_up()

    def _record_step(self, batch: TensorDictBase) -> None:
        """Write the step's metrics, and warn of what they show."""
        del batch
        seconds, self.clock.is_recorded = dict(self.clock.seconds), True
        self.trained_tokens += int(self._step_metrics["tokens"])
        # after the last step there is no next one to run beside
        if self.steps_done >= self.config.steps and self.config.eval.every:
            self._evaluation.begin()
            self._end_evaluation()
        row = self.record.add(
            {
                "step": self.steps_done - 1,
                **self._step_metrics,
                "version": self.rollout_engine.version,
                "trained_tokens": self.trained_tokens,
                "tokens_per_second": self._step_metrics["tokens"] / sum(seconds.values()),
                **{f"seconds_{phase}": value for phase, value in seconds.items()},
                **{name: value for name, value in self.collector.stats().items() if "idle" in name},
            }
        )
        self.health.check(self.record.rows)
        self._show(row)

    def _end_step(self, batch: TensorDictBase) -> None:
        """Begin an evaluation, or stop after the last step."""
        del batch
        self._step_metrics = {}
        if self.steps_done >= self.config.steps:
            self.request_stop("all steps are done")
        else:
            self._begin_evaluation()

    def _show(self, row: Row) -> None:
        shown = [f"{name} {row[name]:{form}}" for name, form in SHOWN.items() if row.get(name, "") != ""]
        self._bar.set_postfix_str(", ".join(shown), refresh=False)
        self._bar.update()
        if row["step"] % self.config.log.print_every == 0 or self.steps_done == self.config.steps:
            done, steps = self.steps_done, self.config.steps
            left = (time.monotonic() - self._began) / (done - self._began_at) * (steps - done)
            cells = [f"{word} {row[name]:{form}}" for name, (word, form) in PRINTED.items() if row.get(name, "") != ""]
            self._say(f"step {done} of {steps}: {', '.join(cells)}, {timedelta(seconds=round(left))} left")

    def request_stop(self, reason: str | None = None) -> None:
        """Stop after this step, on all ranks."""
        self._is_asked_to_stop = True
        super().request_stop(reason)

    def _agree_to_stop(self, batch: TensorDictBase) -> None:
        del batch
        self.ranks.meet("the end of a step", patient=True)
        if any(self.ranks.gather(self._is_asked_to_stop or self._is_interrupted)):
            self.request_stop("a rank was asked to stop")

    def save_trainer(self, force_save: bool = False) -> None:
        """Begin to write a checkpoint, if one is due; one that does not fit on the disk is a warning."""
        every = self.config.checkpoint.every
        if every and (force_save or self.steps_done % every == 0):
            self._end_evaluation()  # it rates the weights that are saved
            self.checkpoints.save(self.steps_done, self._judgement())
            if force_save:
                self.checkpoints.wait()
        if self.clock.is_recorded:  # else a hook saves in mid-step
            self.clock.begin()

    def _judgement(self) -> float:
        """Return the score that selects the best checkpoint: weights that were not evaluated are never the best."""
        if self.source.held_out and self.config.eval.every:
            return self._evaluation.scores.get(self.steps_done, NEVER_EVALUATED)
        rewards = self.record.column("reward")[-REWARDED:]
        return sum(rewards) / max(len(rewards), 1)

    # -- state, as a component of a checkpoint

    def state_dict(self) -> dict[str, int]:
        """Return the run's position; weights, optimizer and collector are separate components."""
        return {"step": self.steps_done, "tokens": self.trained_tokens, "version": self.rollout_engine.version}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Restore the run's position."""
        self.steps_done, self.trained_tokens = state_dict["step"], state_dict["tokens"]
        self._restored_version = state_dict["version"]

    def evaluate(self) -> float | None:
        """Return the mean reward of greedy answers to held-out prompts; ``None``: nothing is held out."""
        rollout = self.config.rollout
        return self.source.evaluate(self.rollout_engine.policy, rollout.reward_timeout, rollout.max_turns)

    def shutdown(self) -> None:
        """Shut down the collector, the weight sync, and the engines that the trainer started. Idempotent.

        A process that was forked from the trainer's own owns none of them, and shuts nothing down.
        """
        if os.getpid() == self._process:
            self._has_ended = True
            self._made.close()

    def __enter__(self) -> MoEGRPOTrainer:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _read(given: object) -> GRPOConfig:
    """Return a configuration of its own, checked."""
    config = GRPOConfig(**given) if isinstance(given, Mapping) else GRPOConfig() if given is None else given
    if not isinstance(config, GRPOConfig):
        raise ConfigError(
            f"config must be a GRPOConfig or a dict of its settings, got {given!r:.60}: a file is read by "
            "torchrl_moe.trainers.compose.load_config"
        )
    config = copy.deepcopy(config)  # a follower changes some settings, and a resumed run, too
    config.check()
    return config
