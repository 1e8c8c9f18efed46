"""Collectors that run in a Ray actor, from the driver's side: LLMCollector and AsyncLLMCollector."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal

from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import RayReplayBuffer, ReplayBuffer

from torchrl_moe._checks import renamed
from torchrl_moe.collectors.arguments import EnvLike, GroupFilter
from torchrl_moe.collectors.collector_host import unpack
from torchrl_moe.collectors.environments import MAX_TURNS
from torchrl_moe.collectors.remote_host import RemoteHost, actor_options
from torchrl_moe.collectors.reports import SampleReader
from torchrl_moe.collectors.schedule import Order
from torchrl_moe.errors import CollectionError
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper
from torchrl_moe.render.tables import html_table, print_table
from torchrl_moe.render.tokens import MOST_TOKENS, Color, show_token_samples

__all__ = ["RayAsyncLLMCollector", "RayCollector", "RayLLMCollector"]


# The driver's side of a collector in a Ray actor; base of the two collectors in Ray.


LOG = logging.getLogger(__name__)

OF_RAY = ("ray_init_config", "remote_config", "num_cpus", "num_gpus", "sync_iter")
SHOW_SECONDS = 5.0
END_SECONDS = 15.0
JOIN_SECONDS = 5.0


class RayCollector(BaseCollector):
    """Forwards calls to the actor, which holds the local collector. Thread-safe.

    Args:
        kind: the local collector's name in ``torchrl_moe.collectors``.
        given: its arguments by name, and those of Ray; ``"self"`` and ``"__class__"`` are ignored.

    Raises:
        TypeError: an argument cannot be sent to an actor.
        ValueError: resources are given twice, and differ.
        CollectionError: the actor was not placed in time.
        Exception: what the local collector raises.
    """

    init_random_frames = 0
    """For TorchRL's trainer."""
    _rests = False
    """Whether the local collector works only when asked, and has a state only between batches."""

    def __init__(self, kind: str, given: Mapping[str, Any]) -> None:
        super().__init__()
        arguments = {name: value for name, value in given.items() if name not in ("self", "__class__", *OF_RAY)}
        self.sync_iter: bool = given["sync_iter"]
        self.verbose: bool = given["verbose"]
        self.replay_buffer = arguments["replay_buffer"]
        weight_updater = arguments.pop("weight_updater")  # it stays where the weights are
        self._extends_here = isinstance(self.replay_buffer, ReplayBuffer) and not isinstance(
            self.replay_buffer, RayReplayBuffer
        )
        self._is_over = False
        self._failure: BaseException | None = None
        self._taking = threading.Lock()
        self._awaited: Any = None  # the batch that was requested
        self._ahead: deque[TensorDictBase | None] = deque()  # batches of a state that was loaded
        self._changed = threading.Condition()
        self._pauses = 0
        self._is_writing = False
        self._writer: threading.Thread | None = None
        options = actor_options(given["remote_config"], num_cpus=given["num_cpus"], num_gpus=given["num_gpus"])
        self._host = RemoteHost(kind, self._sendable(arguments), options, given["ray_init_config"])
        self.total_dialog_turns = self.total_frames = given["total_dialog_turns"]
        self.dialog_turns_per_batch = self.requested_frames_per_batch = self._host.dialog_turns_per_batch
        self.weight_updater = weight_updater

    def _sendable(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Replace a buffer by what the actor may use of it."""
        if isinstance(self.replay_buffer, RayReplayBuffer):
            return {**arguments, "replay_buffer": self.replay_buffer.client()}
        if self._extends_here:
            flatten = arguments["flatten_data"]
            if flatten is None and not arguments["yield_only_last_steps"]:
                flatten = True  # the default with a buffer, which the actor does not see
            return {**arguments, "replay_buffer": None, "flatten_data": flatten}
        return arguments

    # -- calls ------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the :class:`CollectorHost`."""
        if self._is_over:
            raise CollectionError("the collector was shut down")
        return self._host.wait(self._host.begin(method, *arguments))

    # -- batches ----------------------------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches; with a buffer, ``None`` for each one that it was extended with."""
        if self._failure is not None:
            raise self._failure
        while found := self._take():
            (batch,) = found
            if self._extends_here:
                self.replay_buffer.extend(batch)
                batch = None
            yield batch

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        """Yield batches. After an error the actor stays, so that its state can be saved."""
        return self.iterator()

    def next(self) -> TensorDictBase | None:
        """Return the next batch; ``None`` at the end, or if it went into the buffer."""
        return next(self.iterator(), None)

    def _take(self) -> tuple[TensorDictBase | None, ...]:
        """Wait for the next batch; an empty tuple at the end. After a Ctrl-C the next call waits for the same batch."""
        with self._taking:
            if self._is_over:
                return ()
            if self._ahead:
                return (self._ahead.popleft(),)
            try:
                if self._awaited is None:
                    self._check_unpaused()
                    self._awaited = self._begin()
                found: tuple[TensorDictBase | None, ...] = unpack(self._host.wait(self._awaited))
            except Exception:
                self._awaited = None
                if self._is_over:  # shut down meanwhile, which is why it failed
                    return ()
                raise
            asks_ahead = found and not self.sync_iter and not self._pauses
            self._awaited = self._begin() if asks_ahead else None
            return found

    def _begin(self) -> Any:
        return self._host.begin("next", threading.current_thread() is self._writer)

    def _check_unpaused(self) -> None:
        """Refuse to ask a paused local collector, which would yield nothing; a pause waits for the writer."""
        if self._rests and self._pauses and threading.current_thread() is not self._writer:
            raise RuntimeError("the collector is paused")

    def _is_here(self) -> bool:
        """Whether a requested batch has arrived; waits for it if the local collector works only when asked."""
        awaited = self._awaited
        return awaited is not None and self._host.is_done(awaited, None if self._rests else 0.0)

    # -- free running -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Fill the replay buffer from now on, as the local collector does; a thread of this process asks for batches.

        Raises:
            RuntimeError: there is no buffer.
        """
        if self.replay_buffer is None:
            raise RuntimeError("start() fills a replay buffer: pass replay_buffer=, or iterate over the collector")
        if not self.is_running():
            self._writer = threading.Thread(target=self._write, name="torchrl_moe-ray-writer", daemon=True)
            self._writer.start()

    def _write(self) -> None:
        batches = self.iterator()
        try:
            while self._may_write() and next(batches, self) is not self:
                pass
        except BaseException as error:  # noqa: BLE001  the trainer gets it from getattr_rb
            self._failure = error
            LOG.error("the collector has ended: %r", error)
        finally:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()

    def _may_write(self) -> bool:
        """Wait for the end of a pause; return False if the collector was shut down."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pauses or self._is_over)
            self._is_writing = not self._is_over
            return self._is_writing

    def is_running(self) -> bool:
        """Whether :meth:`start` was called and its thread has not ended."""
        return self._writer is not None and self._writer.is_alive()

    @contextmanager
    def pause(self, resume: bool = True) -> Iterator[None]:
        """Pause the local collector within the context, and request nothing from it.

        Args:
            resume: whether to continue afterwards.
        """
        with self._changed:
            self._pauses += 1
        try:
            with self._changed:
                # another one may wait for the weight update that comes after the pause
                self._changed.wait_for(lambda: not (self._rests and self._is_writing))
            self._is_here()
            self._ask("pause", resume)
            try:
                yield
            finally:
                if not self._is_over:
                    self._ask("end_pause")
        finally:
            if resume:
                with self._changed:
                    self._pauses -= 1
                    self._changed.notify_all()

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the buffer.

        Raises:
            Exception: the error that ended the collection. TorchRL's trainer waits here for the first write.
        """
        if self._failure is not None:
            raise self._failure
        return getattr(self.replay_buffer, attr)

    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of the policy, which must be picklable."""
        return self._ask("call", "getattr_policy", attr)

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the environment, which must be picklable."""
        return self._ask("call", "getattr_env", attr)

    # -- weights ----------------------------------------------------------------------------------------------------

    def increment_version(self) -> None:
        """Note a weight update; a sender calls it, see ``sender.register_collector``."""
        if self._is_over:
            return
        try:
            self._ask("increment_version")
        except CollectionError as error:
            self._failure = error  # only this collector's trainer gets it; the sender may have other collectors

    @property
    def policy_version(self) -> Any:
        """The newest version of the engine's weights, as the local collector knows it."""
        return self._ask("read", "policy_version")

    def get_policy_version(self) -> Any:
        """:attr:`policy_version`, as TorchRL has it."""
        return self.policy_version

    def update_policy_weights_(self, policy_or_weights: Any = None, **kwargs: Any) -> None:
        """Push weights with TorchRL's weight updater, from this process; else the sync scheme's sender has done so."""
        if self.weight_updater is not None:
            self.weight_updater.push_weights(policy_or_weights, **kwargs)
        self.increment_version()

    # -- batches and reports ----------------------------------------------------------------------------------------

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Set what is applied to each batch, in the actor.

        Raises:
            RuntimeError: it is set already.
        """
        self._ask("set_postproc", postproc)

    @property
    def post_collect_hook(self) -> Callable[[TensorDictBase], None] | None:
        """What is called with each batch, in the actor."""
        return self._post_collect_hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[TensorDictBase], None] | None) -> None:
        self._ask("call", "set_post_collect_hook", hook)
        self._post_collect_hook = hook

    def stats(self) -> dict[str, int | float | bool]:
        """Return metrics by name, plain numbers for a logger."""
        found: dict[str, int | float | bool] = self._ask("call", "stats")
        return found

    @renamed(colour="color")
    def show_samples(
        self,
        n: int = 4,
        characters: int = 160,
        *,
        color: Color | None = None,
        layer: int | None = None,
        tokens: int = MOST_TOKENS,
    ) -> None:
        """Show the newest samples of the last batch; see :meth:`LLMCollector.show_samples`."""
        if color is not None:
            show_token_samples(self._ask("call", "token_samples", n, tokens), color, layer)
            return
        title, cells = self._ask("call", "sample_cells", n, characters)
        print_table(title, SampleReader.COLUMNS, cells, wide=SampleReader.WIDE)

    def to_pandas(self) -> Any:
        """Return a pandas ``DataFrame`` with a row for each batch; see :meth:`LLMCollector.to_pandas`."""
        return self._ask("call", "to_pandas")

    def _repr_html_(self) -> str:
        """Return the table of the local collector; of one that is over, or says nothing, why."""
        is_known, text = self._shown("_repr_html_")
        return text if is_known else html_table(type(self).__name__, ("",), [], note=text)

    def evaluate(
        self, env: EnvLike, n: int, *, dataloader: Iterable[Any] | None = None, **generate_kwargs: Any
    ) -> TensorDictBase:
        """Answer ``n`` held-out prompts in the actor, at top priority, while the collection continues."""
        found: TensorDictBase = self._ask("evaluate", env, n, dataloader, generate_kwargs)
        return found

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the local collector's state; ``"ahead"``: a batch requested ahead, or interrupted by a Ctrl-C."""
        with self.pause() if self._rests else nullcontext():
            ahead = list(self._ahead)
            if self._taking.acquire(blocking=False):  # else a thread is taking it
                try:
                    if self._is_here():
                        with suppress(Exception):  # the next request for a batch raises it
                            ahead += [batch for batch in unpack(self._host.wait(self._awaited)) if batch is not None]
                finally:
                    self._taking.release()
            return {**self._ask("call", "state_dict"), "ahead": ahead}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where a collector of the same data stopped, even a local one. Call it before the first batch."""
        state = dict(state_dict)
        ahead = state.pop("ahead", ())
        with self._taking:
            self._is_here()  # else the batch that was requested could be made from what is loaded
            self._awaited = None
            self._ask("call", "load_state_dict", state)
            self._ahead = deque(ahead)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the actor's data and environment.

        Returns:
            The next seed to use.
        """
        return int(self._ask("call", "set_seed", seed, static_seed))

    # -- end --------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Shut the local collector down and end the actor. Idempotent; the engine stays up for its owner.

        Args:
            timeout: seconds that the local collector gets to shut down.
            close_env: whether it closes its environments.
            raise_on_error: no effect.
        """
        del raise_on_error
        if self._is_over:
            return
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        seconds = END_SECONDS if timeout is None else timeout + JOIN_SECONDS
        self._host.end(seconds, self._awaited, timeout, close_env)
        if self._writer is not None and self._writer is not threading.current_thread():
            self._writer.join(JOIN_SECONDS)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown('__repr__')[1]})"

    def _shown(self, method: str) -> tuple[bool, str]:
        """Return what the local collector says of itself, or false and why it says nothing; nobody waits long for
        it.
        """
        try:
            if self._is_over:
                raise CollectionError("the collector was shut down")
            reference = self._host.begin("call", method)
            if not self._host.is_done(reference, SHOW_SECONDS):
                raise CollectionError(f"its actor gave no answer within {SHOW_SECONDS:g} s")
            return True, str(self._host.wait(reference))
        except CollectionError as error:
            return False, str(error).partition("\n")[0]


# ``RayLLMCollector``: an ``LLMCollector`` in a Ray actor.


class RayLLMCollector(RayCollector):
    """An :class:`LLMCollector` in a Ray actor.

    The actor ends with :meth:`shutdown`, when the collector is garbage collected, and with this process. Errors are
    those raised in the actor, or ``CollectionError`` if the actor has died.

    Args:
        env: see :class:`LLMCollector`, also for all arguments not listed here. Factories, and functions of batches, are
            called in the actor.
        policy: a policy that can be pickled, so over an engine in Ray; else give a ``policy_factory`` that connects to
            a named engine: ``lambda: vLLMWrapper(AsyncVLLM.connect("policy"))``.
        replay_buffer: a ``RayReplayBuffer`` is extended by the actor, a local buffer by this process.
        weight_updater: stays here.
        ray_init_config: for ``ray.init``, if this process is not connected to a cluster; default: an existing cluster
            if Ray finds one, else a new one, which ends with this process.
        remote_config: Ray's options for the actor, such as ``resources`` or ``runtime_env``.
        num_cpus: of the actor; instead of in ``remote_config``.
        num_gpus: of the actor; instead of in ``remote_config``.
        sync_iter: False to generate the next batch, with the current weights, while the last one is trained on.

    Raises:
        TypeError: an argument cannot be sent to an actor.
        ValueError: an argument makes no sense.
        CollectionError: no node of the cluster has room for the actor.
    """

    _rests = True

    def __init__(
        self,
        env: EnvLike,
        *,
        policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
        policy_factory: Callable[[], Callable[[TensorDictBase], TensorDictBase]] | None = None,
        dialog_turns_per_batch: int | None = None,
        yield_only_last_steps: bool | None = None,
        yield_completed_trajectories: bool | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        total_dialog_turns: int = -1,
        async_envs: bool | None = None,
        replay_buffer: ReplayBuffer | None = None,
        reset_at_each_iter: bool = False,
        flatten_data: bool | None = None,
        weight_updater: Any = None,
        queue: Any = None,
        track_policy_version: Any = False,
        verbose: bool = False,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        sync_iter: bool = True,
    ) -> None:
        super().__init__("LLMCollector", locals())


# ``RayAsyncLLMCollector``: an ``AsyncLLMCollector`` in a Ray actor; several of them share one engine.


class RayAsyncLLMCollector(RayCollector):
    """An :class:`AsyncLLMCollector` in a Ray actor, so environments, rewards and tokenizing cost the trainer no CPU.

    Give it a policy over an engine in Ray, or a ``policy_factory`` that connects to one. Several collectors, each with
    its own data, can share that engine. The actor ends with :meth:`shutdown`, when the collector is garbage collected,
    and with this process. Errors are those raised in the actor, or ``CollectionError`` if the actor has died.

    Args:
        env: see :class:`AsyncLLMCollector`, also for all arguments not listed here. Factories, and functions of batches
            or groups, are called in the actor.
        policy: a policy that can be pickled, so not one over a local engine.
        replay_buffer: a ``RayReplayBuffer`` is extended by the actor, a local buffer by this process.
        weight_updater: stays here.
        ray_init_config: for ``ray.init``, if this process is not connected to a cluster; default: an existing cluster
            if Ray finds one, else a new one, which ends with this process.
        remote_config: Ray's options for the actor, such as ``resources`` or ``runtime_env``.
        num_cpus: of the actor; instead of in ``remote_config``.
        num_gpus: of the actor; instead of in ``remote_config``.
        sync_iter: no effect: it generates while the trainer trains.

    Raises:
        TypeError: an argument cannot be sent to an actor, or the policy or the environment is of another kind.
        ValueError: an argument makes no sense.
        CollectionError: no node of the cluster has room for the actor.

    Example::

        collectors = [
            RayAsyncLLMCollector(
                make_env,
                policy_factory=lambda: vLLMWrapper(AsyncVLLM.connect("policy")),
                dataloader=part,
                group_size=8,
                groups_per_batch=16,
            )
            for part in parts
        ]
    """

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
        weight_updater: Any = None,
        queue: Any = None,
        track_policy_version: Any = False,
        verbose: bool = False,
        dataloader: Iterable[Any] | None = None,
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
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        sync_iter: bool = True,
    ) -> None:
        super().__init__("AsyncLLMCollector", {**locals(), "sync_iter": True})
