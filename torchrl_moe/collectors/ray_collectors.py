"""``RayLLMCollector`` and ``RayAsyncLLMCollector``: the driver's side of a collector that runs in a Ray actor."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, Unpack

from tensordict import TensorDictBase
from torchrl.collectors.weight_update import WeightUpdaterBase
from torchrl.data import RayReplayBuffer, ReplayBuffer

from torchrl_moe._checks import renamed
from torchrl_moe.collectors.arguments import EnvLike, GroupFilter, Policy
from torchrl_moe.collectors.async_collector import AsyncLLMCollector
from torchrl_moe.collectors.collector_host import unpack
from torchrl_moe.collectors.llm_collector import LLMCollector
from torchrl_moe.collectors.remote_host import RemoteHost, actor_options
from torchrl_moe.collectors.reports import FreeRunning, SampleReader
from torchrl_moe.collectors.schedule import Order
from torchrl_moe.errors import CollectionError
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper
from torchrl_moe.render.tables import html_table, print_table
from torchrl_moe.render.tokens import MOST_TOKENS, Color, show_token_samples

if TYPE_CHECKING:
    import pandas
    from ray import ObjectRef

LOG = logging.getLogger(__name__)
P = ParamSpec("P")
SHOW_SECONDS = 5.0
END_SECONDS = 15.0
JOIN_SECONDS = 5.0

# -- arguments --------------------------------------------------------------------------------------------------------


class CollectorOptions(TypedDict, total=False):
    """What both collectors take by name, with Ray's own; the local collectors have the defaults."""

    dialog_turns_per_batch: int | None
    yield_only_last_steps: bool | None
    yield_completed_trajectories: bool | None
    postproc: Callable[[TensorDictBase], TensorDictBase] | None
    total_dialog_turns: int
    async_envs: bool | None
    replay_buffer: ReplayBuffer | None
    reset_at_each_iter: bool
    flatten_data: bool | None
    weight_updater: WeightUpdaterBase | Callable[[], WeightUpdaterBase] | None
    queue: object
    track_policy_version: bool
    verbose: bool
    ray_init_config: Mapping[str, object] | None
    remote_config: Mapping[str, object] | None
    num_cpus: float | None
    num_gpus: float | None
    sync_iter: bool


class LLMCollectorOptions(CollectorOptions, total=False):
    """Of :class:`RayLLMCollector`."""

    policy: Policy | None
    policy_factory: Callable[[], Policy] | None


class AsyncLLMCollectorOptions(CollectorOptions, total=False):
    """Of :class:`RayAsyncLLMCollector`."""

    policy: vLLMWrapper | None
    policy_factory: Callable[[], vLLMWrapper] | None
    dataloader: Iterable[object] | None
    group_size: int | None
    groups_per_batch: int | None
    max_staleness: int
    order: Order
    window: float
    on_stale: Literal["wait", "drop"]
    on_weight_update: None
    max_in_flight: int | Literal["auto"]
    over_sample: float
    group_filter: GroupFilter | None
    max_failures: int
    max_dropped_groups: int | None
    max_turns: int
    reward_timeout: float | None
    heartbeat_timeout: float | None


OF_RAY = {
    "ray_init_config": None,
    "remote_config": None,
    "num_cpus": None,
    "num_gpus": None,
    "sync_iter": True,
}
"""What the actor's collector does not take, and its defaults."""


def takes_arguments_of(local: type) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Show the parameters of a local collector, and Ray's, as those of a constructor, and refuse other names."""
    # the actor would refuse them too, after a process was started for it
    shown = inspect.signature(local.__init__)  # type: ignore[misc]
    types = inspect.get_annotations(CollectorOptions)
    of_ray = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
        for name, default in OF_RAY.items()
    ]
    shown = shown.replace(parameters=[*shown.parameters.values(), *of_ray])

    def decorate(constructor: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(constructor)
        def checked(*args: P.args, **kwargs: P.kwargs) -> None:
            shown.bind(*args, **kwargs)
            constructor(*args, **kwargs)

        checked.__signature__ = shown  # type: ignore[attr-defined]
        return checked

    return decorate


# -- both collectors --------------------------------------------------------------------------------------------------


class RayCollector(FreeRunning):
    """Forwards calls to the actor, which holds the local collector of that ``kind``. Thread-safe."""

    _failure: BaseException | None = None
    _rests = False
    """Whether the local collector works only when asked, and has a state only between batches."""

    def __init__(self, kind: str, env: EnvLike, options: CollectorOptions) -> None:
        super().__init__()
        self.sync_iter = options.get("sync_iter", True)
        self.verbose = options.get("verbose", False)
        self.replay_buffer: ReplayBuffer = options.get("replay_buffer")
        # TorchRL's own buffer in Ray is extended by the actor; any other one is memory of this process
        self._extends_here = isinstance(self.replay_buffer, ReplayBuffer) and not isinstance(
            self.replay_buffer, RayReplayBuffer
        )
        self._is_over = False
        self._taking = threading.Lock()
        self._awaited: ObjectRef | None = None  # the batch that was requested
        self._ahead: deque[TensorDictBase | None] = deque()  # batches of a state that was loaded
        self._changed = threading.Condition()
        self._pauses = 0
        self._is_writing = False
        self._writer: threading.Thread | None = None
        placement = actor_options(
            options.get("remote_config"), num_cpus=options.get("num_cpus"), num_gpus=options.get("num_gpus")
        )
        arguments = self._sendable(env, options)
        self._host = RemoteHost(kind, arguments, placement, options.get("ray_init_config"))
        self.total_dialog_turns = self.total_frames = options.get("total_dialog_turns", -1)
        self.dialog_turns_per_batch = self.requested_frames_per_batch = self._host.dialog_turns_per_batch
        self.weight_updater = options.get("weight_updater")

    def _sendable(self, env: EnvLike, options: CollectorOptions) -> dict[str, object]:
        """Return the local collector's arguments, with what the actor may use of a buffer."""
        # the updater stays where the weights are
        arguments = {name: value for name, value in options.items() if name not in (*OF_RAY, "weight_updater")}
        if isinstance(self.replay_buffer, RayReplayBuffer):
            arguments["replay_buffer"] = self.replay_buffer.client()
        elif self._extends_here:
            arguments["replay_buffer"] = None
            if options.get("flatten_data") is None and not options.get("yield_only_last_steps"):
                arguments["flatten_data"] = True  # the default with a buffer, which the actor does not see
        return {"env": env, **arguments}

    # -- calls ------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, *arguments: object) -> Any:
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
            # the next batch is made while this one is trained on
            asks_ahead = found and not self.sync_iter and not self._pauses
            self._awaited = self._begin() if asks_ahead else None
            return found

    def _begin(self) -> ObjectRef:
        # the actor counts what the writer's batches were trained on by weight updates only
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
            # a batch that was asked for comes first: a paused collector would not make it
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
    def policy_version(self) -> int | None:
        """The newest version of the engine's weights, as the local collector knows it."""
        version: int | None = self._ask("read", "policy_version")
        return version

    def get_policy_version(self) -> int | None:
        """:attr:`policy_version`, as TorchRL has it."""
        return self.policy_version

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

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas ``DataFrame`` with a row for each batch; see :meth:`LLMCollector.to_pandas`."""
        table: pandas.DataFrame = self._ask("call", "to_pandas")
        return table

    def _repr_html_(self) -> str:
        """Return the table of the local collector; of one that is over, or says nothing, why."""
        is_known, text = self._shown("_repr_html_")
        return text if is_known else html_table(type(self).__name__, ("",), [], note=text)

    def evaluate(
        self, env: EnvLike, n: int, *, dataloader: Iterable[object] | None = None, **generate_kwargs: object
    ) -> TensorDictBase:
        """Answer ``n`` held-out prompts in the actor, at top priority, while the collection continues."""
        found: TensorDictBase = self._ask("evaluate", env, n, dataloader, generate_kwargs)
        return found

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the local collector's state; ``"ahead"``: a batch requested ahead, or interrupted by a Ctrl-C."""
        # a local collector that generates all the time has a state at any time
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
        """Return what the local collector shows of itself, or false and why it does not; nobody waits long for it."""
        try:
            if self._is_over:
                raise CollectionError("the collector was shut down")
            reference = self._host.begin("call", method)
            if not self._host.is_done(reference, SHOW_SECONDS):
                raise CollectionError(f"its actor gave no answer within {SHOW_SECONDS:g} s")
            return True, str(self._host.wait(reference))
        except CollectionError as error:
            return False, str(error).partition("\n")[0]


# -- one for each local collector -------------------------------------------------------------------------------------


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

    @takes_arguments_of(LLMCollector)
    def __init__(self, env: EnvLike, **options: Unpack[LLMCollectorOptions]) -> None:
        super().__init__("LLMCollector", env, options)


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

    @takes_arguments_of(AsyncLLMCollector)
    def __init__(self, env: EnvLike, **options: Unpack[AsyncLLMCollectorOptions]) -> None:
        options["sync_iter"] = True  # it is ahead anyway
        super().__init__("AsyncLLMCollector", env, options)
