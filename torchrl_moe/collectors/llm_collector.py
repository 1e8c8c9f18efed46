"""``LLMCollector``: TorchRL's, with errors that reach the trainer, a pause, and a position in the data."""

from __future__ import annotations

import logging
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.collectors import llm as torchrl_llm
from torchrl.collectors.weight_update import WeightUpdaterBase
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase
from torchrl.envs.llm.transforms import DataLoadingPrimer, PolicyVersion

from torchrl_moe.collectors.environments import primer_of, rows_of_primer, with_versions
from torchrl_moe.collectors.prompt_stream import Prompt, PromptStream, StreamState
from torchrl_moe.collectors.reports import Reports
from torchrl_moe.collectors.workflow import is_episode_function
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper

LOG = logging.getLogger(__name__)
END = object()
Policy: TypeAlias = "Callable[[TensorDictBase], TensorDictBase]"


# -- arguments, of both kinds of collectors ---------------------------------------------------------------------------


def one_policy(policy: Policy | None, factory: Callable[[], Policy] | None) -> Policy:
    """Return the policy; one of ours in history mode sends the ids of earlier turns."""
    if policy is None and factory is not None:
        policy = factory()
    elif policy is None or factory is not None:
        raise ValueError("pass either policy= or policy_factory=")
    # rendering a chat again may give other ids for a turn, and its log-probs and routes would be lost
    if isinstance(policy, vLLMWrapper) and policy.input_mode == "history" and not policy.prefer_tokens:
        return policy.get_new_version(prefer_tokens=True)
    return policy


def refuse_queue(queue: object) -> None:
    if queue is not None:
        raise ValueError("queue: it would lose the oldest data silently. Iterate, or pass replay_buffer=.")


def refuse_version_tracker(track_policy_version: object) -> None:
    """Refuse TorchRL's transform, which would overwrite the versions in the rows."""
    if not isinstance(track_policy_version, bool):
        raise ValueError("track_policy_version: the rows carry the engine's versions; leave the transform out")


# -- the data ---------------------------------------------------------------------------------------------------------


class FeedState(StreamState):
    """A feed's, too."""

    copies: list[tuple[int, TensorDictBase]]


class PromptFeed:
    """Gives each sample that an environment resets a prompt, and keeps that prompt until its rows were yielded."""

    def __init__(self, primer: DataLoadingPrimer) -> None:
        self._data = rows_of_primer(primer)
        self.stream = PromptStream(self._data)
        self._repeats = max(1, primer.repeats)
        self._stack: Callable[[Sequence[TensorDictBase]], TensorDictBase] = primer.stack_method
        self._device = primer.device
        self._copies: deque[Prompt] = deque()  # to be drawn next
        self._open: dict[int, deque[Prompt]] = {}  # by sample; the last one is running, earlier ones are done
        # the primer's own default would read on in data of which nobody knows the position
        primer.default_value = self

    def __call__(self, reset: Tensor | None = None) -> TensorDictBase:
        """Return a prompt for each sample that is reset; see ``DataLoadingPrimer``."""
        if reset is None or not reset.ndim:
            return self._draw(0)
        samples = reset.reshape(len(reset), -1).any(-1).nonzero()[:, 0].tolist()
        return self._stack([self._draw(sample) for sample in samples])

    def _draw(self, sample: int) -> TensorDictBase:
        if not self._copies:
            self._copies.extend([next(self.stream)] * self._repeats)
        prompt = self._copies.popleft()
        self._open.setdefault(sample, deque()).append(prompt)
        data = prompt.data.copy()
        return data if self._device is None else data.to(self._device)

    def restart(self) -> None:
        """Restart the data; if it can be read only once, draw all open prompts again."""
        self.give_back()
        if not isinstance(self._data, Iterator):
            self.stream = PromptStream(self._data)
            self._copies.clear()

    def finished(self, sample: int) -> Prompt:
        """Close the oldest open prompt of a sample and return it."""
        return self._open[sample].popleft()

    def forget_finished(self) -> None:
        """Keep only the prompts of running samples."""
        for prompts in self._open.values():
            while len(prompts) > 1:
                prompts.popleft()

    def give_back(self, finished: Sequence[Prompt] = ()) -> None:
        """Draw all open prompts again, before any other."""
        self._copies = deque(self._unfinished(finished))
        self._open.clear()

    def _unfinished(self, finished: Sequence[Prompt]) -> list[Prompt]:
        held = [*finished, *(prompt for prompts in self._open.values() for prompt in prompts), *self._copies]
        return sorted(held, key=lambda prompt: prompt.position)

    def state_dict(self, finished: Sequence[Prompt] = ()) -> FeedState:
        """Return the position in the data and the open prompts."""
        copies = [(prompt.position, prompt.data) for prompt in self._unfinished(finished)]
        return {**self.stream.state_dict(), "copies": copies}

    def load_state_dict(self, state: FeedState) -> None:
        """Continue where another feed stopped: its open prompts come first."""
        if isinstance(self._data, Iterator):
            # TorchRL has drawn rows for a first reset: put them back, if they are all that was read
            held = {prompt.position: prompt.data for prompt in self._unfinished([])}
            if list(held) != list(range(self.stream.position)):
                raise ValueError(
                    "data that can be read only once cannot go back: load the state before the first batch"
                )
            self._data = chain(held.values(), self._data)
            self.stream = PromptStream(self._data)
        self.stream.load_state_dict(state)
        self._open.clear()
        self._copies = deque(Prompt(position, data) for position, data in state["copies"])


# -- the collector ----------------------------------------------------------------------------------------------------


class _PausedError(RuntimeError):
    """Raised where a wait would deadlock; the collector continues after the pause."""


class LLMCollector(Reports, torchrl_llm.LLMCollector):
    """TorchRL's collector, which runs all samples of the environment turn by turn in lockstep.

    Arguments and batches are TorchRL's. The differences:

    - An error in the thread of :meth:`start` is logged, and raised by :meth:`getattr_rb`, by iterating, and by
      :meth:`async_shutdown`. TorchRL's trainer waits in ``getattr_rb`` for the first write.
    - :meth:`pause` exists.
    - :meth:`set_seed` also seeds the engine and what shuffles the data.
    - :meth:`state_dict` holds the position in the data and the prompts that were read and not yielded: a restored
      collector yields each prompt once.
    - No prompt is lost: TorchRL drops the first batch, and with ``reset_at_each_iter`` one at each iteration. A batch
      whose ``postproc``, hook or buffer fails comes again after a Ctrl-C, and its prompts are in the state.
    - In history mode, later turns send the token ids of the earlier ones, so their log-probs and routes stay those of
      these tokens.
    - :attr:`policy_version` is the engine's; rows carry those of their tokens.

    Args:
        env: an environment, or a callable that makes one.
        policy: a :class:`~torchrl_moe.modules.vLLMWrapper`, or another policy of TorchRL's.
        policy_factory: makes the policy; give one of the two.
        dialog_turns_per_batch: turns in a batch, at least; it must be given unless complete samples are yielded (1).
        yield_only_last_steps: whether to keep only the last turn of each sample.
        yield_completed_trajectories: whether to yield complete samples when they are done.
        postproc: applied to each batch.
        total_dialog_turns: turns after which the collection ends, those included that are not yielded; -1 for never.
        async_envs: has an effect only with an ``AsyncEnvPool``.
        replay_buffer: extended with each batch; ``None`` is yielded in the batch's place.
        reset_at_each_iter: whether to drop samples that are not done at the end of a batch.
        flatten_data: whether batches are ``[rows]``; else ``[*batch_size, turns]``.
        weight_updater: TorchRL's, used by :meth:`update_policy_weights_`.
        queue: refused, because it drops the oldest data silently.
        track_policy_version: with a policy of ours, rows always carry ``"policy_version"``; whether to write it to
            ``next`` too, as TorchRL does.
        verbose: whether to show a progress bar.

    Raises:
        ValueError: an argument makes no sense.
        TypeError: an argument is of a type that TorchRL refuses.
    """

    _undelivered: TensorDictBase | None = None
    """A batch that has not passed ``postproc``, hook and buffer yet."""
    _counted = 0
    """Its rows, once TorchRL has counted them."""

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        *,
        policy: Policy | None = None,
        policy_factory: Callable[[], Policy] | None = None,
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
        track_policy_version: bool | PolicyVersion = False,
        verbose: bool = False,
    ) -> None:
        self._borders = threading.Condition()
        self._pausing: list[threading.Thread] = []
        self._stop = False
        self._collecting: threading.Thread | None = None  # the one that is within a batch
        self._failure: BaseException | None = None
        refuse_queue(queue)
        policy = one_policy(policy, policy_factory)
        self._engine = policy.engine if isinstance(policy, vLLMWrapper) else None  # of a policy that is ours
        if isinstance(policy, vLLMWrapper):
            # vLLM's -1 means no seed, as None does
            if (seed := policy.sampling_params.get("seed")) not in (None, -1):
                raise ValueError(
                    f"the policy samples with seed={seed}, so all answers to a prompt are the same: leave it out and "
                    "seed the engine, collector.set_seed(seed), or use AsyncLLMCollector, which gives each answer a "
                    "seed of its own"
                )
            refuse_version_tracker(track_policy_version)
        # an environment is callable too, and an async function would return a coroutine
        if callable(env) and not isinstance(env, EnvBase) and not is_episode_function(env):
            env = env()
        if not isinstance(env, EnvBase):
            raise TypeError(
                f"env must be an environment or a callable that makes one, got {type(env).__name__}; async functions "
                "are played by AsyncLLMCollector"
            )
        if isinstance(policy, vLLMWrapper):
            env, track_policy_version = with_versions(env) if track_policy_version else env, False
        # the data are read by a feed of ours, which knows its position and what was not yielded
        primer = primer_of(env)
        self._feed = None if primer is None else PromptFeed(primer)
        self._finished: deque[Prompt] = deque()
        """Prompts of samples that are done and wait to be yielded, in the order of TorchRL's ``_trajectory_queue``."""
        with warnings.catch_warnings():
            # TorchRL warns of an argument that only its other collectors take.
            warnings.filterwarnings("ignore", ".*auto_register_policy_transforms", FutureWarning)
            super().__init__(
                env,
                policy=policy,
                dialog_turns_per_batch=dialog_turns_per_batch,
                yield_only_last_steps=yield_only_last_steps,
                yield_completed_trajectories=yield_completed_trajectories,
                postproc=postproc,
                total_dialog_turns=total_dialog_turns,
                async_envs=async_envs,
                replay_buffer=replay_buffer,
                reset_at_each_iter=reset_at_each_iter,
                flatten_data=flatten_data,
                weight_updater=weight_updater,
                track_policy_version=track_policy_version,
            )
        if self._feed is not None:
            self._feed.restart()  # TorchRL has reset the environment once and drops that reset
        settings = {
            "dialog_turns_per_batch": self.dialog_turns_per_batch,
            "yield_completed_trajectories": self.yield_completed_trajectories,
            "yield_only_last_steps": self.yield_only_last_steps,
            "reset_at_each_iter": self.reset_at_each_iter,
        }
        self._begin_reports(policy, settings, total_dialog_turns, verbose)

    # -- batches ----------------------------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches; with a buffer, extend it and yield ``None``.

        Raises:
            RuntimeError: it was shut down, or this thread has paused it and would wait for ever.
        """
        if self._failure is not None:
            raise self._failure
        if self.closed:
            raise RuntimeError("the collector was shut down")
        batches = super().iterator()
        with self._progress:
            # a pause, a state and a shutdown wait for the border between two batches
            while self._may_collect():
                self._progress.begin(self._frames)
                try:
                    with self.record.wait():
                        batch = next(batches, END)
                    if batch is not END:
                        self._delivered()  # before a state may be taken
                finally:
                    with self._borders:
                        self._collecting = None
                        self._borders.notify_all()
                if batch is END:
                    return
                yield batch

    def _may_collect(self) -> bool:
        """Wait while it is paused; return False if it was shut down meanwhile."""
        is_background = threading.current_thread() is getattr(self, "_thread", None)
        with self._borders:
            if threading.current_thread() in self._pausing and not is_background:
                raise _PausedError("the collector is paused")
            self._borders.wait_for(lambda: not self._pausing or self._stop)
            if self._stop:
                return False
            self._collecting = threading.current_thread()
            return True

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        """Yield batches; after an error the collector is shut down. It survives a Ctrl-C and a pause."""
        try:
            yield from self.iterator()
        except BaseException as error:
            self._iterator = None  # next() needs another one
            if isinstance(error, Exception) and not isinstance(error, _PausedError):
                self.shutdown()
            raise

    def _postproc(self, tensordict_out: TensorDictBase) -> TensorDictBase:
        # TorchRL calls it with each batch, whatever the mode, before anything else sees that
        self._report(tensordict_out, self._frames)
        return super()._postproc(tensordict_out)

    def _rollout_all(self) -> TensorDictBase:
        if self._undelivered is None and self.reset_at_each_iter and self._feed is not None:
            self._feed.give_back()
        return self._or_again(super()._rollout_all)

    def _rollout_yield_trajs(self) -> TensorDictBase:
        return self._or_again(super()._rollout_yield_trajs)

    def _or_again(self, rollout: Callable[[], TensorDictBase]) -> TensorDictBase:
        """Collect; a batch that was not delivered comes first.

        If collecting is interrupted, by a Ctrl-C say, its prompts come again and its answers are lost.
        """
        if self._undelivered is not None:
            # TorchRL counts its rows once more
            self._frames -= self._counted
            self._counted = 0
            return self._undelivered
        try:
            self._undelivered = rollout()
        except BaseException:
            if self._feed is not None:
                self._feed.give_back(self._finished)
            self._begin_again()
            raise
        return self._undelivered

    def _increment_frames(self, numel: int) -> bool:
        self._counted = numel
        has_enough: bool = super()._increment_frames(numel)
        return has_enough

    def _delivered(self) -> None:
        """Forget the prompts of the batch, which the trainer or the buffer has now."""
        batch, self._undelivered, self._counted = self._undelivered, None, 0
        if self._feed is None or batch is None:
            return
        if self.yield_completed_trajectories:
            # what TorchRL still queues is not yielded yet
            while len(self._finished) > len(self._trajectory_queue):
                self._finished.popleft()
            return
        self._feed.forget_finished()
        if self.reset_at_each_iter:  # running samples are dropped, and their first turns were yielded
            last = batch.reshape(self.env.batch_size.numel(), -1)[:, -1]
            for sample in (~last["next", "done"].reshape(len(last), -1).any(-1)).nonzero()[:, 0].tolist():
                self._feed.finished(sample)

    def _enqueue_completed_traj(self, idx: int) -> TensorDictBase:
        if self._feed is not None:
            self._finished.append(self._feed.finished(idx))
        return super()._enqueue_completed_traj(idx)

    # -- free running -----------------------------------------------------------------------------------------------

    def _run_iterator(self) -> None:
        """Collect in the thread of :meth:`start`; an error that ends it is kept for :meth:`getattr_rb`."""
        try:
            super()._run_iterator()
        except BaseException as error:  # noqa: BLE001  the trainer gets it from getattr_rb
            self._failure = error
            LOG.error("the collector has ended: %r", error)

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the buffer.

        Raises:
            Exception: the error that ended the collection.
        """
        if self._failure is not None:
            raise self._failure
        return super().getattr_rb(attr)

    @contextmanager
    def pause(self, resume: bool = True) -> Iterator[None]:
        """Collect nothing within the context; first waits for the current batch.

        Args:
            resume: whether to continue afterwards.
        """
        me = threading.current_thread()
        is_inside = False
        with self._borders:
            self._pausing.append(me)
        try:
            with self._borders:
                # a hook of the current batch must not wait for that batch
                self._borders.wait_for(lambda: self._collecting in (None, me))
            is_inside = True
            yield
        finally:
            if resume or not is_inside:
                with self._borders:
                    self._pausing.remove(me)
                    self._borders.notify_all()

    # -- weights ----------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> str | int | None:
        """The newest version of the engine's weights; with another policy, the count of TorchRL's transform."""
        return super().policy_version if self._engine is None else int(self._engine.replica_table.latest_version)

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return TorchRL's state and the position in the data. Waits for the current batch first.

        Prompts of yielded batches count as used; running samples start again.
        """
        # between two batches; TorchRL's part cannot be read once it is closed, so shutdown keeps it
        with self.pause():
            state = OrderedDict(self._last_state) if self.closed else super().state_dict()
            state["prompts"] = None if self._feed is None else self._feed.state_dict(self._finished)
            state["frames"] -= self._counted
        if self._feed is None:
            warnings.warn(
                "the collector's state has no position in the data: its environment has no DataLoadingPrimer in this "
                "process",
                stacklevel=2,
            )
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: object) -> None:
        """Continue where another collector of the same data stopped; running samples here are dropped.

        Args:
            state_dict: that collector's.
            kwargs: TorchRL's ``strict``.

        Raises:
            ValueError: only one of the two has a position in the data.
        """
        prompts = state_dict["prompts"]
        if (prompts is None) != (self._feed is None):
            raise ValueError("the state is of a collector whose data came from elsewhere")
        with self.pause():
            super().load_state_dict(OrderedDict(state_dict), **kwargs)
            self._begin_again()
            if self._feed is not None:
                self._feed.load_state_dict(prompts)

    def _begin_again(self) -> None:
        self._shuttle, self._undelivered, self._counted = None, None, 0
        self._result_numel = 0
        self._finished.clear()
        if self.yield_completed_trajectories:
            self._trajectory_queue.clear()
            for queue in self._yield_queues:
                queue.clear()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed what shuffles the data, the engine and the environment, and return the next seed to use.

        What an engine draws also depends on batching.
        """
        if self._feed is not None:
            self._feed.stream.seed(seed)
        if self._engine is not None:
            self._engine.set_seed(seed)
        return int(super().set_seed(seed, static_seed=static_seed))

    # -- end --------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Stop after the current batch and close the environment. Idempotent; the engine stays up for its owner.

        Args:
            timeout: seconds to wait for that batch; ``None``: no limit.
            close_env: whether to close the environment.
            raise_on_error: TorchRL's.
        """
        with self._borders:
            self._stop = True
            self._borders.notify_all()
            self._borders.wait_for(lambda: self._collecting in (None, threading.current_thread()), timeout)
        self._progress.close()
        if not self.closed:
            self._last_state = super().state_dict()
        super().shutdown(timeout, close_env, raise_on_error)

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """:meth:`shutdown`.

        Raises:
            Exception: the error that had ended the collection.
        """
        self.shutdown(timeout, close_env)
        if self._failure is not None:
            raise self._failure
