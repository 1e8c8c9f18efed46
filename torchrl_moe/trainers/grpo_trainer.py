"""``MoEGRPOTrainer``: GRPO for Mixture-of-Experts models. ``step`` is the algorithm; what is around it is its run."""

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
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_moe.collectors.async_collector import AsyncLLMCollector
from torchrl_moe.collectors.workflow import EnvLike
from torchrl_moe.data.packed import pack, unpack
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.policies.transformers_wrapper import TransformersWrapper
from torchrl_moe.modules.serving.async_vllm import AsyncVLLM
from torchrl_moe.trainers.checkpoints import Checkpoints, TrainedState
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, nearest
from torchrl_moe.trainers.function_names import import_function
from torchrl_moe.trainers.learner import Learner, advantages, in_rows, minibatches
from torchrl_moe.trainers.policy_model import ModelLike, RolloutEngine, check_arguments, starting_model
from torchrl_moe.trainers.ranks import Placement, join_ranks, launch_of, resumes_after_restart, shares
from torchrl_moe.trainers.run_record import (
    HealthMonitor,
    Progress,
    RunRecord,
    RunReports,
    locked_folder,
    make_loggers,
    open_record,
    refuse_older_run,
)
from torchrl_moe.trainers.samples import (
    Evaluation,
    RewardFunction,
    RolloutSource,
    batch_metrics,
    make_collector,
    sample_rows,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


class StepClock:
    """Counts the seconds of each phase of a training step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time inside the context towards a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began


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


ALIASES = {
    "train_dataset": "dataset",
    "eval_dataset": "held_out",
    "reward_funcs": "rewards",
    "processing_class": "tokenizer",
}
"""TRL's names of what is the same here."""
TRL = {
    "args": "config=",
    "reward_weights": "config.data.weights",
    "peft_config": "config.model.lora, or a model with an adapter",
    "callbacks": "config.hooks, or register_op",
    "environment_factory": "env=",
    "rollout_func": "env=",
}
"""TRL's names of what is given in another way here."""
STAGES = (
    "setup", "batch_process", "pre_steps_log", "pre_optim_steps", "pre_epoch_log", "pre_epoch", "process_optim_batch",
    "post_optim", "post_optim_log", "post_epoch_log", "post_epoch", "post_optim_complete_log", "post_steps",
    "post_steps_log", "shutdown",
)  # fmt: skip
"""Where hooks run, by TorchRL's names and in its order."""
INSIDE = ("post_loss", "process_loss", "optimizer")
"""TorchRL's stages inside of an optimizer step, which is one call here."""


class Hooks:
    """What a user has registered: plain callables, by TorchRL's names of the stages of a step."""

    def __init__(self, log: Callable[[Mapping[str, object]], None]) -> None:
        self._log = log
        self._ops: dict[str, list[Callable[..., Any]]] = {stage: [] for stage in STAGES}

    def add(self, stage: str, op: Callable[..., Any], **kwargs: object) -> None:
        """Register a hook; keywords are passed to each call.

        Raises:
            ValueError: no hook runs at that stage.
        """
        if stage in INSIDE:
            raise ValueError(
                f"no hook runs at {stage!r}, inside of an optimizer step, which is one call here: register it at "
                "'process_optim_batch' (before it) or 'post_optim' (after it); 'batch_process' has the whole batch"
            )
        if stage not in self._ops:
            raise ValueError(f"there is no stage {stage!r} for a hook: {nearest(stage, STAGES)}")
        self._ops[stage].append(partial(op, **kwargs) if kwargs else op)

    def run(self, stage: str, *given: object) -> None:
        """Call the hooks of a stage; what those whose names end in ``_log`` return, goes to the loggers."""
        for op in self._ops[stage]:
            found = op(*given)
            if stage.endswith("_log") and found is not None:
                self._log(found)

    def changed(self, stage: str, batch: TensorDictBase) -> TensorDictBase:
        """Return a batch as the hooks of a stage leave it: what they return, or what they have changed in place."""
        for op in self._ops[stage]:
            found = op(batch)
            batch = found if isinstance(found, TensorDictBase) else batch
        return batch


STEPPER = "trainer_module.optimization_stepper"  # as in the checkpoints of runs of older versions
NEVER_EVALUATED = -1e300
REWARDED = 5
"""Steps whose mean reward selects the best checkpoint when there is no held-out data."""


class MoEGRPOTrainer(RunReports):
    """Trains a model with its own engine: rollouts, advantages, updates on the recorded experts, weight sync.

    Args:
        model: a transformers model, a folder or a hub name; default: ``config.model.source``.
        dataset: rows with a prompt: a list of dicts, a Hugging Face dataset, a file or folder of JSON lines, a hub
            name; default: ``config.data.source``. Or ``env``.
        env: an environment, a callable that makes one, or an async function that runs a sample, see
            :class:`~torchrl_moe.collectors.AsyncLLMCollector`.
        rewards: a function or functions of an answer, with any of ``prompt``, ``completion``, ``completion_ids`` and
            the columns of the dataset as parameters.
        held_out: another dataset, or environment, to evaluate on; default: as ``config.data.held_out`` says.
        config: all other settings, or a dict of them, such as ``{"steps": 3, "optim": {"lr": 1e-5}}``.
        tokenizer: default: the one in the model's folder; a model object needs one.
        engine: an :class:`~torchrl_moe.modules.AsyncVLLM` of a model of the same shape; default: it starts its own.
        **others: ``train_dataset``, ``eval_dataset``, ``reward_funcs`` and ``processing_class``, as TRL calls dataset,
            held_out, rewards and tokenizer. All else is refused, with its name here.

    Each rank started by a launcher such as ``torchrun`` makes a trainer, with the same arguments. Rank 0 has data and
    engine, and sends the others their share of each batch; ``config.placement`` says how they share the model.

    Raises:
        ConfigError: an invalid setting; nearly all are found before anything is started or written, and what was
            started is ended.
        RankError: another rank failed, or did not arrive in time.
        TypeError: an argument that it does not have; the nearest that it has.
        UnsupportedRouterError: replay of a model without experts, or with routers that cannot be replayed.

    Hooks are plain callables at the stages of TorchRL's trainer, for example
    ``trainer.register_op("batch_process", hook)``; by then a batch has advantages. Those inside of an optimizer step
    (``post_loss``, ``process_loss``, ``optimizer``) are refused: ``"process_optim_batch"`` is before it,
    ``"post_optim"`` after it. TorchRL's own hooks register themselves by ``hook.register(trainer)``. Use a trainer as
    a context manager, or call :meth:`shutdown`.

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
        dataset, held_out, rewards, tokenizer = _by_their_names(
            others, dataset=dataset, held_out=held_out, rewards=rewards, tokenizer=tokenizer
        )
        config = _read(config)
        model = Path(model).expanduser() if isinstance(model, str) and model.startswith("~") else model
        try:
            set_up = [import_function(name) for name in config.hooks]
        except ValueError as error:
            raise ConfigError(f"hooks: {error}") from error
        self.clock, self.health, self.hooks = StepClock(), HealthMonitor(), Hooks(self._log)
        self.steps_done = self.trained_tokens = self._restored_version = self._unsynced = self._step = 0
        self._has_ended = self._stops = self._is_asked_to_stop = self._is_interrupted = False
        self._batches: Iterator[TensorDictBase | None] | None = None
        self._process = os.getpid()
        self.source = RolloutSource(config, dataset=dataset, env=env, rewards=rewards, held_out=held_out)
        # ends what was made if something after it fails
        with ExitStack() as made:
            self.ranks = ranks = join_ranks(config.placement.timeout, config.placement.collective_timeout)
            made.callback(ranks.close)
            with ranks.guard():
                resumes, resumed = False, replace(config, resume=True, overwrite=False)
                # cheap checks first: loading a model or starting an engine takes minutes
                if ranks.is_first:
                    self.source.check_names()
                    if engine is None and config.engine.connect is None:
                        check_arguments(config)
                    resumes = resumes_after_restart(config, launch_of())
                    refuse_older_run(resumed if resumes else config, model)
                # a launcher that starts all ranks again makes rank 0 resume, so the others ask it
                self.config = config = resumed if ranks.from_first(resumes, "whether to resume") else config
                self.placement = Placement.of(ranks, config)
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
                        pad_model_input=self._row_width(),
                    )
                    # rank 0 has data, engine, collector and files: data before the lock, the lock before any file
                    if ranks.is_first:
                        self.source.load(self.policy_model.tokenizer)
                        made.enter_context(locked_folder(config))
                    self.learner = Learner(actor, self.policy_model, config, self.placement)
                    made.callback(self.learner.shutdown)
                    self.rollout_engine = RolloutEngine(
                        self.policy_model, config, Path(config.out), engine, is_first=ranks.is_first
                    )
                    start = self.rollout_engine.start
                    made.callback(self.rollout_engine.shutdown)
                    self.collector: AsyncLLMCollector | None = None
                    loggers = []
                    if self.rollout_engine.policy is not None:
                        self.collector = make_collector(config, self.source, self.rollout_engine.policy)
                        made.callback(self.collector.shutdown)
                        self.rollout_engine.sender.register_collector(self.collector)
                        loggers = make_loggers(config)
                    self.evaluation = Evaluation(lambda: self.evaluate(), config.eval.every if ranks.is_first else 0)
                    made.callback(self.evaluation.close)
                    ranks.meet("assembling the run", patient=True)
                    # any mistake, on any rank, was noticed before this point; an older run is replaced by the first
                    # step's end
                    self._restore(made)
                    self.record.loggers = loggers
                    self.progress = Progress(config)
                    for hook in set_up:
                        hook(self)
                except BaseException:
                    # the run does not begin: the model that it would have started from goes too, after the engine
                    if start is not None and ranks.is_first:
                        made.callback(shutil.rmtree, start, True)
                    raise
            self._made = made.pop_all()

    def _row_width(self) -> int | None:
        """Return the width of rows under ``parity=exact``; ``None``: batches are laid out as is best."""
        if self.config.parity != "exact":
            return None
        if self.placement.is_shared or self.policy_model.dtype != torch.float32:
            raise ConfigError(
                "parity=exact needs one rank, and a trainer that computes in float32: model.dtype=float32"
            )
        return int(self.config.engine.arguments["max_model_len"])

    def _restore(self, made: ExitStack) -> None:
        """Continue from the newest checkpoint, if the run resumes; open its record, and give the engine its weights."""
        config, folder = self.config, Path(self.config.out)
        # weights and optimizer are written by TrainedState, in parts, and these small components beside them
        parts = {"collector": self.collector, "run": self, STEPPER: self.learner.stepper}
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            TrainedState(self.policy_model.model, self.learner.optimizer),
            {name: part for name, part in parts.items() if part is not None},
            config.checkpoint.keep,
            self.ranks,
        )
        made.callback(self.checkpoints.close)
        if config.checkpoint.every:
            self.checkpoints.check_folder()
        if config.resume and not self.checkpoints.load():
            LOG.warning("there is no checkpoint in %s: starting from the beginning", folder)
        # the checkpoint brought the optimizer's settings of that time
        self.learner.apply(config.optim)
        if self.ranks.is_first:
            self.record = open_record(config, self.steps_done, self.rollout_engine.start)
        else:
            self.record = RunRecord(folder, "", is_kept=False)  # rank 0 writes it
        started_from_it = self.ranks.from_first(self.rollout_engine.owns_engine, "the engine's weights")
        # an engine that is lent, or that started from older weights, gets the trainer's before it answers
        if self.steps_done or not started_from_it:
            self.rollout_engine.restore(self._restored_version)

    # -- hooks

    def register_op(self, dest: str, op: Callable[..., object], **kwargs: object) -> None:
        """Register a hook at a stage of TorchRL's trainer; keywords are passed to each call.

        Raises:
            ValueError: there is no such stage, or it is inside of an optimizer step.
        """
        self.hooks.add(dest, op, **kwargs)

    register_hook = register_op

    def register_module(self, module_name: str, module: object) -> None:
        """Keep a hook's state in checkpoints, and restore it if this run has resumed from one that has it.

        Raises:
            ValueError: the name is taken.
        """
        self.checkpoints.add(module_name, module)

    @property
    def _optim_count(self) -> int:
        """Optimizer steps so far: TorchRL's own hooks read it."""
        return self.learner.stepper.count

    def _log(self, values: Mapping[str, object]) -> None:
        self.record.log(values, self._step)

    # -- a step

    def step(self) -> bool:
        """Make one step of GRPO, and return true; false: the run is over. All ranks call it, as :meth:`train` does.

        Raises:
            RuntimeError: the run has ended, was shut down or interrupted.
        """
        self._check_not_ended()
        if self._stops or self.steps_done >= self.config.steps:
            return False
        config, engine, optim, stepper = self.config, self.rollout_engine, self.config.optim, self.learner.stepper
        clock, run, changed = self.clock, self.hooks.run, self.hooks.changed
        with self.ranks.guard():
            clock.seconds, self._step = {}, self.steps_done
            # collect: rank 0 has the answers, with the experts that the engine chose
            with clock("generate"):
                if self._batches is None:
                    self._batches = iter(()) if self.collector is None else iter(self.collector)
                self.evaluation.begin(self.steps_done, not self._unsynced)
                try:
                    collected = next(self._batches, None)
                except BaseException:
                    self._batches = None  # an iterator that has raised is at its end; the collector may not be
                    raise
            # the trainer may need the engine's memory, which cannot evaluate meanwhile
            if collected is not None and config.engine.sleep:
                self.evaluation.wait()
                # after a signal there is no time for what runs; it goes on afterwards
                engine.engine.sleep(mode="keep" if self._is_interrupted else "wait")
            with clock("score"):
                # prepare: metrics and advantages of the whole batch; then each rank has its share of the groups
                metrics: dict[str, float] = {}
                if collected is not None:
                    version = engine.version + self._unsynced  # also an update that the engine lacks
                    rows = sample_rows(collected.unbind(0))
                    metrics = batch_metrics(rows, version)
                    if config.log.samples:
                        self.record.add_samples(self.steps_done, collected, config.log.samples)
                    collected = advantages(config.loss.advantage, collected, sum(row.ends for row in rows))
                    collected.set("current_version", torch.full(collected.batch_size, version))
                batch = self._share(collected)
                if batch is None:
                    return False
                # score: log-probs before the first update, and how far engine and trainer are apart
                is_measured = _is_due(self.steps_done, config.eval.mismatch_every)
                metrics |= self.learner.scores(batch, int(batch.get("current_version")[0]), is_measured)
                self._refuse_a_fault(batch, metrics)
            # optimise in minibatches, in a new order in each epoch
            batch = changed("batch_process", batch)
            with clock("train"):
                run("pre_steps_log", batch)
                run("pre_optim_steps")
                losses: list[TensorDictBase] = []
                for _ in range(optim.epochs):
                    run("pre_epoch_log", batch)
                    for part in minibatches(changed("pre_epoch", batch), optim.minibatches, self.ranks):
                        part = changed("process_optim_batch", part)
                        losses.append(stepper.step(part))
                        run("post_optim")
                        run("post_optim_log", part)
                    run("post_epoch_log", batch)
                    run("post_epoch")
                run("post_optim_complete_log", stepper.count, _mean(losses))
            metrics |= stepper.take_metrics()
            self.steps_done += 1
            # an evaluation that still runs asks for answers by the weights that now change
            metrics |= self.evaluation.take()
            # sync: every few steps if so configured, and always the weights of the last step
            with clock("sync"):
                self._unsynced += 1
                if self.steps_done % config.engine.sync_every == 0 or self.steps_done == config.steps:
                    self.ranks.meet("weight sync", patient=True)
                    engine.sync()
                    self._unsynced = 0
                if config.engine.sleep:
                    engine.engine.wake_up()
            run("post_steps")
            # record; the next evaluation runs beside the next step, or ends the last one
            if self.ranks.is_first:
                self._record(metrics)
            run("post_steps_log", batch)
            # save; the run is over after its last step, or because a rank was asked to stop, or interrupted
            self.ranks.meet("the end of a step", patient=True)
            is_over = self._is_asked_to_stop or self._is_interrupted or self.steps_done >= config.steps
            self._stops = any(self.ranks.gather(is_over))
            self.save_trainer(force_save=self._stops)
            return True

    def _check_not_ended(self) -> None:
        if self._has_ended:
            how = "continue with another trainer and config.resume=True"
            raise RuntimeError(f"this run has ended, was shut down or interrupted: {how}")

    def _share(self, batch: TensorDictBase | None) -> TensorDictBase | None:
        """Give each rank whole groups of rank 0's batch; return this one's, or ``None`` if there is no batch."""
        if self.placement.is_shared:
            payloads: list[bytes | None] | None = None
            if self.ranks.is_first:
                payloads = [None] * self.ranks.size
            if batch is not None:
                # so many groups that each minibatch has at least one sample
                groups = math.ceil(self.config.optim.minibatches / self.config.rollout.group_size)
                batch, *others = self.placement.to_ranks(shares(batch, self.placement.data_size, groups))
                payloads = [None, *map(pack, others)]
            self.ranks.meet("rollouts", patient=True)  # rank 0 generates meanwhile, which may take long
            payload = self.ranks.scatter(payloads)
            batch = batch if payload is None else unpack(payload)
        return None if batch is None else in_rows(batch)

    def _refuse_a_fault(self, batch: TensorDictBase, metrics: Mapping[str, float]) -> None:
        """End the run if engine and trainer differ by more than rounding on answers by the same weights."""
        if self.config.parity == "exact" and (first := self.learner.first_gap(batch, limit=0.0)):
            raise EngineError(
                f"parity=exact, and a log-prob of step {self.steps_done} is not the engine's bit by bit: {first}. "
                "Usual causes: another number of threads (OMP_NUM_THREADS) or another kind of device on one side, or "
                "weights that did not arrive; parity=off trains on"
            )
        limit, gap = self.config.eval.max_mismatch, metrics.get("mismatch_kl", 0.0)
        # only in float32, and on tokens of the newest weights, is a difference no rounding and no age; rank 0 knows it
        is_new = metrics.get("staleness") == 0
        if limit is None or gap <= limit or not is_new or self.policy_model.dtype != torch.float32:
            return
        if self.rollout_engine.dtype not in ("float32", "torch.float32"):
            return
        first = "" if self.placement.is_shared else self.learner.first_gap(batch) or "none is off by more than 0.1"
        where = first and f" The first such token: {first}."
        raise EngineError(
            f"engine and trainer disagree on answers by the same weights, in float32: mismatch_kl={gap:.2g}, agreement="
            f"{metrics.get('agreement', math.nan):.2g}.{where} Usual causes: a kernel of the engine (torchrl-moe "
            "conformance MODEL finds it), weights that did not arrive (engine.sync.verify=canary), or routes of other "
            "tokens. eval.max_mismatch=null trains on"
        )

    def _record(self, metrics: dict[str, float]) -> None:
        """Write and show the step's metrics, and warn of what they show."""
        seconds = dict(self.clock.seconds)
        self.trained_tokens += int(metrics["tokens"])
        # the next evaluation runs beside the next step; after the last there is none to run beside
        if self.steps_done >= self.config.steps:
            self.evaluation.begin(self.steps_done, not self._unsynced, is_last=True)
            metrics |= self.evaluation.take()
        assert self.collector is not None
        stats = self.collector.stats()
        row = self.record.add(
            {
                "step": self.steps_done - 1,
                **metrics,
                "version": self.rollout_engine.version,
                "trained_tokens": self.trained_tokens,
                "tokens_per_second": metrics["tokens"] / sum(seconds.values()),
                **{f"seconds_{phase}": value for phase, value in seconds.items()},
                # groups that failed so far, in a reward or an environment, and what the first of them said
                "failures": int(stats.get("collector/failures", 0)),
                "first_failure": self.collector.first_failure or "",
                **{name: value for name, value in stats.items() if "idle" in name},
            }
        )
        self.health.check(self.record.rows)
        self.progress.show(row)
        if _is_due(self.steps_done, self.config.log.plot_every):
            self.draw()
        self.evaluation.begin(self.steps_done, not self._unsynced)

    # -- a run

    def _interrupt(self) -> None:
        """Stop after this step; the time that a signal leaves is for the checkpoint."""
        self._is_interrupted = True
        self.evaluation.stop()

    def train(self) -> None:
        """Run all remaining steps. After a Ctrl-C, ``config.resume`` continues from the last checkpoint."""
        if self.steps_done >= self.config.steps:
            LOG.warning("all %d steps are done", self.config.steps)
            return
        self._check_not_ended()
        grace = self.config.checkpoint.grace if self.config.checkpoint.every else 0
        with self.ranks.guard(), ExitStack() as ends:
            ends.callback(self.progress.end)
            if self.ranks.is_first:
                self.progress.begin(self.steps_done)
            ends.callback(setattr, self, "_has_ended", True)  # in mid-step, weights and collector may be inconsistent
            # the ranks agree on an interrupt at the end of a step
            with finishing(self._interrupt, self.shutdown, grace):
                self.hooks.run("setup")
                while not self._stops and self.step():
                    pass
                self.hooks.run("shutdown")
                if self.collector is not None:
                    self.collector.shutdown()
                can_continue = self.steps_done < self.config.steps and self.config.checkpoint.every > 0
                self.progress.say(
                    f"{self.steps_done} of {self.config.steps} steps are done"
                    f"{', and resume=true continues' if can_continue else ''}; metrics, samples and checkpoints: "
                    f"{self.config.out}"
                )

    def request_stop(self, reason: str | None = None) -> None:
        """Stop after this step, on all ranks."""
        if reason:
            LOG.info("the run stops: %s", reason)
        self._is_asked_to_stop = True

    def save_trainer(self, force_save: bool = False) -> None:
        """Begin to write a checkpoint, if one is due; one that does not fit on the disk is a warning.

        Args:
            force_save: also if none is due, and return when it is written; not if ``checkpoint.every`` is 0.
        """
        every = self.config.checkpoint.every
        if not ((force_save and every) or _is_due(self.steps_done, every)):
            return
        self.evaluation.wait()  # it rates the weights that are saved
        # the score that selects the best checkpoint: weights that were not evaluated are never the best
        if self.source.held_out and self.config.eval.every:
            score = self.evaluation.scores.get(self.steps_done, NEVER_EVALUATED)
        else:
            rewards = self.record.column("reward")[-REWARDED:]
            score = sum(rewards) / max(len(rewards), 1)
        self.checkpoints.save(self.steps_done, score)
        if force_save:
            self.checkpoints.wait()

    # -- state, as a component of a checkpoint

    def state_dict(self) -> dict[str, int]:
        """Return the run's position; weights, optimizer and collector are separate components."""
        # a resumed run gives the engine these weights, also where it had none of the last updates: another version
        version = self.rollout_engine.version + bool(self._unsynced)
        return {"step": self.steps_done, "tokens": self.trained_tokens, "version": version}

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


def _mean(losses: Sequence[TensorDictBase]) -> TensorDict:
    """Return the mean of each loss term over the optimizer steps that have it."""
    names = dict.fromkeys(name for one in losses for name in list(one.keys()))
    return TensorDict({name: torch.stack([one[name] for one in losses if name in one]).mean(0) for name in names})


def _is_due(step: int, every: int) -> bool:
    """Whether what happens every so many steps happens at this one; 0 is never."""
    return every > 0 and step % every == 0


def _by_their_names(others: Mapping[str, Any], **given: Any) -> list[Any]:
    """Return arguments, each by our name or by TRL's; refuse names that are neither."""
    for name, value in others.items():
        ours = ALIASES.get(name)
        if ours is None:
            known = [one for one in inspect.signature(MoEGRPOTrainer).parameters if one != "others"]
            hint = f"here it is {TRL[name]}" if name in TRL else nearest(name, known)
            raise TypeError(f"MoEGRPOTrainer has no {name}: {hint}; settings are in config=GRPOConfig(...)")
        if given[ours] is not None:
            raise TypeError(f"{name} is another name of {ours}: give one of them")
        given[ours] = value
    return list(given.values())


def _read(given: object) -> GRPOConfig:
    """Return a configuration of its own, checked."""
    config = GRPOConfig(**given) if isinstance(given, Mapping) else GRPOConfig() if given is None else given
    if not isinstance(config, GRPOConfig):
        raise ConfigError(
            f"config must be a GRPOConfig or a dict of its settings, got {given!r:.60}: a file is read by "
            "torchrl_moe.trainers.compose.load_config"
        )
    if config.plan:
        raise ConfigError("plan=True: a trainer starts a run. For the plan, call RunPlan.of(config)")
    config = copy.deepcopy(config)  # the user's own may change while the run goes on
    config.check()
    return config
