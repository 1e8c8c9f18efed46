"""``AsyncLLMCollector``: answers are generated while the trainer trains, in whole groups, none older than allowed.

This is the trainer's side: it asks the collection's event loop for batches, and owns what it has accepted. What happens
in the loop is in ``rollouts.py``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal, TypeVar

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.collectors.weight_update import WeightUpdaterBase
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase
from tqdm.auto import tqdm

from torchrl_moe._checks import check_number
from torchrl_moe.collectors.environments import MAX_TURNS, gather
from torchrl_moe.collectors.llm_collector import one_policy, refuse_queue, refuse_version_tracker
from torchrl_moe.collectors.prompt_stream import Prompt, PromptStream
from torchrl_moe.collectors.reports import FreeRunning, Reports
from torchrl_moe.collectors.rollouts import GroupFilter, Rollouts, Settings
from torchrl_moe.collectors.schedule import Order, Schedule
from torchrl_moe.collectors.workflow import EnvLike, source_of
from torchrl_moe.errors import CollectionError, CollectionStalledError, EngineError, RequestRefusedError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies.vllm_wrapper import SampleRequest, vLLMWrapper
from torchrl_moe.modules.serving.event_loop import EventLoop
from torchrl_moe.modules.serving.replica_table import ReplicaState
from torchrl_moe.modules.serving.service import GenerationService

T = TypeVar("T")

LOG = logging.getLogger(__name__)
FIRST = -1 << 30
"""A priority ahead of any collection's."""
JOIN_SECONDS = 5.0
SNAPSHOT_SECONDS = 10.0
OVER = "the collector was shut down"


# -- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(
    policy: vLLMWrapper,
    env: EnvLike,
    count: int,
    dataloader: Iterable[object] | None = None,
    reward_timeout: float | None = None,
    use_tqdm: bool = True,
    max_turns: int = MAX_TURNS,
    **generate_kwargs: Any,
) -> TensorDictBase:
    """Answer prompts, and return the last turn of each, ``[count]``, in the order of the data; without routes.

    A prompt for which an async function returned ``None`` is left out; so is, with a warning, one that the engine
    refuses, such as one that is too long.

    ``("next", "episode_reward")`` is the sum of the rewards of all its turns, of the shape of the last one's reward;
    it is present if each turn has a reward.

    Args:
        policy: asks its engine.
        env: an environment, a callable that makes one, or an async function that runs a sample.
        count: how many prompts, from the start of the data; a loader with fewer is read again.
        dataloader: default: that of the environment.
        reward_timeout: seconds that a call of an environment may take.
        use_tqdm: whether to show a progress bar, on a terminal or in a notebook; in a log file there is none.
        max_turns: of a sample; one that is not done by then is an error.
        generate_kwargs: change the policy's, such as ``temperature=0.0``.

    Raises:
        ValueError: ``count`` is below 1, there is no data, or no prompt is left.
        EnvironmentTimeoutError: a call took longer.
        CollectionError: the same of an environment that is not given as a callable, which cannot be made again.
        RequestRefusedError: the engine refused every prompt.
    """
    check_number("count", count, 1, whole=True)
    source = source_of(env, dataloader, 1)
    prompts = list(islice(PromptStream(source.dataloader), count))
    environments = source.pool()
    bar = tqdm(total=len(prompts), desc="evaluate", unit="answer", disable=None if use_tqdm else True)
    refused: list[RequestRefusedError] = []

    async def generate(request: SampleRequest, _: int) -> Completion:
        return await policy.model.agenerate(**{**request.arguments, "priority": FIRST})

    async def answer(prompt: Prompt) -> TensorDictBase | None:
        turns: list[TensorDictBase] = []
        try:
            turns = await environments.play(
                policy, generate, prompt.data, reward_timeout, max_turns, return_routed_experts=False, **generate_kwargs
            )
        except RequestRefusedError as error:
            refused.append(error)
            LOG.warning("prompt %d is left out of the evaluation (%s): %s", prompt.position, prompt.excerpt, error)
        bar.update()
        if not turns:
            return None
        # the batch size of an evaluation's environments is 1: [0] is the sample
        last: TensorDictBase = turns[-1][0]
        rewards = [turn[0].get(("next", "reward"), None) for turn in turns]
        if any(reward is None for reward in rewards):
            return last
        total = sum(float(reward.sum()) for reward in rewards)
        return last.set(("next", "episode_reward"), torch.full_like(rewards[-1], total, dtype=torch.float32))

    async def answer_all() -> list[TensorDictBase | None]:
        return await gather([answer(prompt) for prompt in prompts])

    loop = EventLoop("torchrl_moe-evaluation")  # of its own: a notebook has a running one in this thread
    try:
        with bar:
            # side by side: the first error of another kind ends them all
            answers = [one for one in loop.result(loop.spawn(answer_all())) if one is not None]
    finally:  # after a Ctrl-C answers are not waited for, and their requests are aborted
        loop.stop()
        loop.join(JOIN_SECONDS)
        environments.close(keep=source.env if source.make is None else None)  # the caller may use the given one again
    if len(refused) == len(prompts):
        raise refused[0]
    if not answers:
        raise ValueError(f"none of {len(prompts)} answers has a reward: None was returned for each")
    return lazy_stack(answers)


# -- the collector ----------------------------------------------------------------------------------------------------


class _ShutDown(CollectionError):
    """The collector was shut down, and nothing was wrong."""


class AsyncLLMCollector(FreeRunning, Reports):
    """Collects groups of answers continuously, for a trainer that takes them batch by batch.

    Args:
        env: an environment, or a callable that makes one. With batch size ``(group_size,)`` it runs whole groups of one
            turn; with ``(1,)`` one sample of any number of turns. A ``ChatEnv`` of another size is rebuilt. Or an async
            function that runs a sample: ``await episode(data, ask)`` returns the reward.
        policy: a :class:`~torchrl_moe.modules.vLLMWrapper`, without ``num_samples``. This and the next arguments, to
            ``verbose``, are those of :class:`LLMCollector`. ``reset_at_each_iter`` has no effect, since each sample
            starts with a reset. ``async_envs=True``, ``yield_completed_trajectories=False`` and ``flatten_data=False``
            are refused: environments are stepped in threads, samples are complete, batches are flat.
        dialog_turns_per_batch: samples in a batch, if ``groups_per_batch`` is not given; a multiple of ``group_size``.
        total_dialog_turns: rows after which the collection ends; -1 for never.
        verbose: whether to show a progress bar over answers, with mean reward, mean age and queued groups.
        dataloader: the prompts; default: the dataloader of the environment's ``DataLoadingPrimer``.
        group_size: answers to a prompt; default: the primer's ``repeats``, or 1.
        groups_per_batch: complete groups in a batch; default: one.
        max_staleness: S, bounds the age of a token when it is trained on, in weight updates, time in the queue
            included: at most S with ``order="fifo"``, S + ceil((W - 1) / P) with ``"window"``. With 0, a batch starts
            when the last one has been trained on.
        order: which groups make the next batch: ``"fifo"``: the oldest; ``"window"``: any of the oldest W = window (S +
            1) P groups (S ``max_staleness``, P ``groups_per_batch``); ``"ready"``: any complete ones.
        window: the share in that formula, above 0 and at most 1.
        on_stale: ``"wait"`` starts groups late enough that none gets too old; ``"drop"`` drops groups that are too old
            and starts others. With ``order="ready"`` only ``"drop"`` bounds the age.
        on_weight_update: must be ``None``: what an update does to running answers is the weight sync's ``mode``.
        max_in_flight: answers generated at a time; ``"auto"``: as many as the engine admits.
        over_sample: starts so many times the groups needed and drops the late ones; needs ``on_stale="drop"``.
        group_filter: of a group's rows ``[rows]``, whether to train on it; a rejected group is replaced.
        max_failures: how many groups may fail in their environment or reward before the error is raised. Before any
            group was complete: at most 8, or as many as make a batch.
        max_dropped_groups: how many groups may be dropped without a batch in between, because ``group_filter`` rejects
            them or they are too old; ``None``: 100 batches' worth.
        max_turns: of a sample; one that is not done by then has failed.
        reward_timeout: seconds that a call of an environment may take.
        heartbeat_timeout: seconds without progress after which it raises; ``None`` for never.

    Raises:
        ValueError: an argument makes no sense.
        TypeError: the policy or the environment is of another kind.

    Example::

        collector = AsyncLLMCollector(env, policy=policy, group_size=8, groups_per_batch=16, max_staleness=2)
        sender.register_collector(collector)
        for batch in collector:
            train(batch)
            sender.update_weights()
    """

    is_paced_by_updates = False  # True in an actor whose driver fills a buffer from a thread

    def __init__(
        self,
        env: EnvLike,
        *,
        policy: vLLMWrapper | None = None,
        policy_factory: Callable[[], vLLMWrapper] | None = None,
        dialog_turns_per_batch: int | None = None,
        yield_only_last_steps: bool | None = None,
        yield_completed_trajectories: bool | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        total_dialog_turns: int = -1,
        async_envs: bool | None = None,
        replay_buffer: ReplayBuffer | None = None,
        reset_at_each_iter: bool = False,
        flatten_data: bool | None = None,
        weight_updater: WeightUpdaterBase | Callable[[], WeightUpdaterBase] | None = None,
        queue: object = None,
        track_policy_version: bool = False,
        verbose: bool = False,
        dataloader: Iterable[object] | None = None,
        group_size: int | None = None,
        groups_per_batch: int | None = None,
        max_staleness: int = 2,
        order: Order = "window",
        window: float = 0.3,
        on_stale: Literal["wait", "drop"] = "wait",
        on_weight_update: None = None,
        max_in_flight: int | Literal["auto"] = "auto",
        over_sample: float = 1.0,
        group_filter: GroupFilter | None = None,
        max_failures: int = 0,
        max_dropped_groups: int | None = None,
        max_turns: int = MAX_TURNS,
        reward_timeout: float | None = None,
        heartbeat_timeout: float | None = 300.0,
    ) -> None:
        super().__init__()
        del reset_at_each_iter  # each sample starts with a reset
        # the other value of each changes nothing, so it is accepted
        if yield_completed_trajectories is False:
            raise ValueError("yield_completed_trajectories=False: only whole groups are yielded")
        if async_envs is True:
            raise ValueError("async_envs=True: environments are stepped in threads anyway: leave it out")
        if flatten_data is False:
            raise ValueError("flatten_data=False: answers have different lengths: batches are flat")
        refuse_queue(queue)
        refuse_version_tracker(track_policy_version)
        if on_weight_update is not None:
            raise ValueError(
                f"on_weight_update={on_weight_update!r}: what an update does to running answers is the "
                "weight sync's mode, VLLMWeightSyncScheme(mode=...)"
            )
        check_number("total_dialog_turns", total_dialog_turns, -1, whole=True)
        ours = one_policy(policy, policy_factory)
        if not isinstance(ours, vLLMWrapper):
            raise TypeError(f"the policy must be a torchrl_moe vLLMWrapper, got {type(ours).__name__}")
        if ours.num_samples is not None:  # the engine is asked for one answer at a time
            raise ValueError(f"the policy has num_samples={ours.num_samples}: use the collector's group_size instead")
        self.policy = ours
        source = source_of(env, dataloader, group_size)
        self.env = source.env
        self.settings = settings = Settings(
            group_size=source.group_size,
            groups_per_batch=_groups_in_batch(groups_per_batch, dialog_turns_per_batch, source.group_size),
            max_staleness=max_staleness,
            order=order,
            window=window,
            on_stale=on_stale,
            max_in_flight=max_in_flight,
            over_sample=over_sample,
            group_filter=group_filter,
            max_failures=max_failures,
            max_dropped_groups=max_dropped_groups,
            max_turns=max_turns,
            reward_timeout=reward_timeout,
            heartbeat_timeout=heartbeat_timeout,
            only_last_turns=bool(yield_only_last_steps),
            track_policy_version=track_policy_version,
        )
        self.postproc, self.replay_buffer = postproc, replay_buffer
        self.total_dialog_turns = self.total_frames = total_dialog_turns
        self.weight_updater = weight_updater
        self._prompts = PromptStream(source.dataloader)
        self._schedule = Schedule(settings.groups_per_batch, max_staleness, order, window, over_sample)
        self._environments = source.pool()
        self._begin_reports(self.policy, vars(settings), total_dialog_turns, verbose)
        # the state of the collection; the loop's thread starts with the first call into it
        self._frames = 0
        self._rollouts = Rollouts(self.policy, self._environments, self._prompts, settings, self._schedule)
        self._loop = EventLoop("torchrl_moe-collector")
        self._runs = self._is_over = False
        self._writer: threading.Thread | None = None
        self._iterator: Iterator[TensorDictBase | None] | None = None
        self._awaited: Future[TensorDictBase] | None = None  # a batch that was asked for and is not accepted yet
        self._taking = threading.Lock()  # threads that wait for batches do so one after the other
        self._owning = threading.RLock()  # held while a batch changes its owner
        self.policy.register_collector(self)

    # -- batches ----------------------------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches, ``[rows]``; with a buffer, extend it and yield ``None``."""
        if self._failure is not None:
            raise self._failure
        with self._progress:
            while not self._is_over and (self.total_dialog_turns < 0 or self._frames < self.total_dialog_turns):
                try:
                    batch = self._take()
                except _ShutDown:  # by another thread
                    return
                yield batch

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        """Yield batches; after an error the collector is shut down and raises it again. It survives a Ctrl-C."""
        try:
            yield from self.iterator()
        except BaseException as error:
            self._iterator = None  # next() needs another one
            if isinstance(error, Exception):
                self._rollouts.error = self._rollouts.error or error
                self.shutdown()
            raise

    @property
    def _failure(self) -> BaseException | None:
        """What ended the collection, if not a shutdown."""
        error = self._rollouts.error
        return None if isinstance(error, _ShutDown) else error

    def _take(self) -> TensorDictBase | None:
        """Wait for the next batch, and hand it over once, whatever interrupts.

        Until it is accepted, the collector owns it: after a Ctrl-C, an event loop that stood still, or an error on its
        way to the trainer, the next call takes the same batch.
        """
        with self._taking:
            with self._owning:
                if self._awaited is None:
                    self._awaited = Future()
                self._progress.begin(self._frames)
                # where the writer asks, or one in another process, only weight updates say what was trained on
                trained = not (threading.current_thread() is self._writer or self.is_paced_by_updates)
                # a future that was asked for again gives the same batch
                if not self._call(self._rollouts.ask, self._awaited, trained):
                    if self._is_over:
                        raise _ShutDown(OVER)
                    raise RuntimeError("a collector does not work in a forked process")
            try:
                with self.record.wait():
                    batch = self._loop.result(self._awaited, self._check_loop)
            except Exception:
                # a Ctrl-C leaves it, and so does a loop that stands still: what comes later is the next call's
                if self._awaited.done() and self._awaited.exception() is not None:
                    self._awaited = None
                raise
            with self._owning:
                accepted = self._accept(batch)
                self._awaited = None
            return accepted

    def _check_loop(self) -> None:
        """Fail if user code blocks the loop, which watches everything else."""
        limit = self.settings.heartbeat_timeout
        if limit is not None and time.monotonic() - self._rollouts.round_at > limit + JOIN_SECONDS:
            raise CollectionStalledError(
                f"the collector's event loop has stood still for {limit:g} s, in {self._loop.where()}: an async "
                "function must await what takes time, and run blocking code in asyncio.to_thread"
            )

    def _accept(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Give a batch to the trainer, or to the buffer."""
        frames = self._frames + batch.numel()
        # reported as it was collected; counted once the buffer has it, so that a failure in between loses nothing
        self._report(batch, frames)
        if self.postproc is not None:
            batch = self.postproc(batch)
        if self._post_collect_hook is not None:
            self._post_collect_hook(batch)
        if self.replay_buffer is not None:
            self.replay_buffer.extend(batch)
        self._frames = frames
        return batch if self.replay_buffer is None else None

    def _call(self, function: Callable[..., object], *arguments: object) -> bool:
        # not in the constructor: a collector that nobody asks for anything has no thread
        if not self._runs:
            self._runs = True
            self._loop.spawn(self._rollouts.run())
        return self._loop.call(function, *arguments)

    def _in_loop(self, function: Callable[..., T], *arguments: object) -> T:
        """Return what a function returns in the loop, whose state is no other thread's to read."""
        self._refuse_own_loop()
        return self._loop.run(function, *arguments, patience=JOIN_SECONDS)

    def _refuse_own_loop(self) -> None:
        if self._loop.is_here:
            raise RuntimeError("this call would wait for itself: await asyncio.to_thread(collector.method)")

    # -- free running -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Fill the replay buffer from now on, in a thread, ``max_staleness + 1`` batches ahead of the weight updates.

        Raises:
            RuntimeError: there is no buffer.
            Exception: the error that ended the collection earlier.
        """
        self._check_buffer()
        if self._failure is not None:
            raise self._failure
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="torchrl_moe-writer", daemon=True)
            self._writer.start()

    def _write(self) -> None:
        try:
            for _ in self.iterator():
                pass
        except BaseException as error:  # noqa: BLE001  the trainer gets it from getattr_rb
            self._rollouts.error = self._rollouts.error or error  # here too: its loop may stand still
            self._call(self._rollouts.fail, error)

    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of the policy."""
        return getattr(self.policy, attr)

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the environment."""
        return getattr(self.env, attr)

    @contextmanager
    def pause(self, resume: bool = True) -> Iterator[None]:
        """Start no new group within the context; running ones continue.

        Args:
            resume: whether to start groups again afterwards.
        """
        self._in_loop(self._rollouts.pause, 1)
        try:
            yield
        finally:
            if resume and not self._is_over:
                self._in_loop(self._rollouts.pause, -1)

    # -- weights ----------------------------------------------------------------------------------------------------

    def increment_version(self) -> None:
        """Note a weight update; a sender calls it, see ``sender.register_collector``."""
        self._loop.call(self._rollouts.wake)

    @property
    def policy_version(self) -> int:
        """The newest version of the engine's weights."""
        return int(self.policy.model.replica_table.latest_version)

    def get_policy_model(self) -> GenerationService:
        """Return the engine."""
        return self.policy.model

    # -- metrics ----------------------------------------------------------------------------------------------------

    @property
    def dialog_turns_per_batch(self) -> int:
        """Answers in a batch."""
        return self.settings.group_size * self.settings.groups_per_batch

    requested_frames_per_batch = dialog_turns_per_batch

    def stats(self) -> dict[str, int | float | bool]:
        """Return metrics by name, plain numbers for a logger: ``logger.log_metrics(collector.stats(), step)``."""
        in_line = {"collector/groups_in_line": self._schedule.in_line}
        return {**super().stats(), **in_line, **self._rollouts.stats.scalars()}

    @property
    def first_failure(self) -> str | None:
        """The prompt and the error of the first group that failed; ``None`` if none has."""
        return self._rollouts.stats.first_failure

    def evaluate(
        self, env: EnvLike, n: int, *, dataloader: Iterable[object] | None = None, **generate_kwargs: Any
    ) -> TensorDictBase:
        """Answer ``n`` held-out prompts, at top priority, while the collection continues; see :func:`evaluate`."""
        generate_kwargs.setdefault("max_turns", self.settings.max_turns)
        return evaluate(self.policy, env, n, dataloader, **generate_kwargs)

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, the complete groups and the answers so far; generation continues.

        Batches that were yielded count as trained on.
        """
        self._refuse_own_loop()
        # first the answers so far, which takes seconds: what completes meanwhile is in the loop's state as a whole
        cut = snapshots(self.policy.model)
        with self._owning:
            return {"frames": self._frames, **self._in_loop(self._rollouts.state_dict, self._awaited, cut)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where another collector of the same data stopped; call it before the first batch."""
        self._in_loop(self._rollouts.load_state_dict, state_dict)
        self._frames = state_dict["frames"]

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed data, engine and environment (of a callable, the first); see :meth:`LLMCollector.set_seed`."""
        self._prompts.seed(seed)
        self.policy.model.set_seed(seed)
        return int(self.env.set_seed(seed, static_seed=static_seed)) if isinstance(self.env, EnvBase) else seed + 1

    # -- end --------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Abort running requests and end the threads. Idempotent; the engine stays up for its owner.

        Args:
            timeout: seconds to wait for running groups; ``None``: 10.
            close_env: whether to close the environments; else the first one stays open.
            raise_on_error: TorchRL's, not used.
        """
        del raise_on_error
        if self._is_over:
            return
        self._is_over = True
        over = self._rollouts.error = self._rollouts.error or _ShutDown(OVER)
        # end the running groups in their loop, then the loop, then the thread that waits for batches
        stopped = threading.Event()

        async def stop() -> None:
            await self._rollouts.stop(over)
            stopped.set()

        self._progress.close()
        if self._loop.call(self._rollouts.wake):
            self._loop.spawn(stop())
            stopped.wait(10.0 if timeout is None else timeout)
        self._loop.stop()
        self._loop.join(JOIN_SECONDS)
        if self._writer is not None and self._writer is not threading.current_thread():
            self._writer.join(JOIN_SECONDS if timeout is None else timeout)
        self._environments.close(keep=None if close_env else self.env)

    def _summary(self) -> str:
        settings, failed = self.settings, ""
        if self.first_failure:
            failed = f"; {self._rollouts.stats.failures} groups failed, the first {self.first_failure}"
        return (
            f"AsyncLLMCollector({settings.groups_per_batch} groups of {settings.group_size} a batch, at most "
            f"{settings.max_staleness} versions old, {settings.order}; {self.record.batches} batches, "
            f"{self._schedule.in_line} groups in line, {self._rollouts.stats.in_flight} answers in flight{failed})"
        )


def snapshots(engine: GenerationService) -> dict[str, Completion]:
    """Return the partial answers of the requests that an engine's replicas run, by request id; generation continues.

    A replica that does not answer is left out and logged; its answers start again after a restore.
    """
    found: dict[str, Completion] = {}
    for entry in list(engine.replica_table):
        if entry.state in (ReplicaState.STARTING, ReplicaState.DEAD):
            continue
        try:
            found.update({one.request_id: one for one in entry.replica.call(Engine.snapshot, SNAPSHOT_SECONDS)})
        except EngineError as error:
            LOG.warning("running answers at replica %d are not in the checkpoint: %r", entry.index, error)
    return found


def _groups_in_batch(groups: int | None, turns: int | None, group_size: int) -> int:
    """Return how many groups make a batch, by either of the two arguments that say so."""
    check_number("dialog_turns_per_batch", turns, 1, whole=True, none=True)
    if groups is None and turns is not None:
        if turns % group_size:
            raise ValueError(f"dialog_turns_per_batch={turns} is no multiple of group_size={group_size}")
        return turns // group_size
    if groups is not None and turns is not None and turns != groups * group_size:
        raise ValueError(
            f"dialog_turns_per_batch={turns} differs from groups_per_batch * group_size = {groups * group_size}"
        )
    return 1 if groups is None else groups
