"""``RayLLMCollector`` and ``RayAsyncLLMCollector``: a collector in a Ray actor, and the driver's side of it.

From the top: the arguments; the actor, which holds a local collector and passes calls on to it; the driver's side,
which asks the actor for batches; and one class for each kind of collector.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, Unpack

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from tensordict import TensorDictBase
from torchrl.collectors.weight_update import WeightUpdaterBase
from torchrl.data import RayReplayBuffer, ReplayBuffer

from torchrl_moe.collectors.async_collector import AsyncLLMCollector, evaluate
from torchrl_moe.collectors.llm_collector import LLMCollector, Policy
from torchrl_moe.collectors.reports import FreeRunning
from torchrl_moe.collectors.rollouts import GroupFilter
from torchrl_moe.collectors.schedule import Order
from torchrl_moe.collectors.workflow import EnvLike
from torchrl_moe.data.packed import pack, unpack
from torchrl_moe.errors import CollectionError, EngineError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.ray.cluster import join_cluster, shortage
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper
from torchrl_moe.modules.serving.launch import TIMEOUT_VARIABLE, default_timeout
from torchrl_moe.modules.serving.replica_table import ReplicaState, ReplicaTable
from torchrl_moe.render.tables import html_table

if TYPE_CHECKING:
    import pandas

LOG = logging.getLogger(__name__)
P = ParamSpec("P")
ASK_SECONDS = 2.0
SHOW_SECONDS = 5.0
END_SECONDS = 15.0
JOIN_SECONDS = 5.0
CALLS = 8
"""Calls that the actor handles concurrently."""
HOW_TO_SEND = {
    "policy": "pass policy_factory=, which makes the policy in the actor. There it can connect to a shared engine: "
    "lambda: vLLMWrapper(AsyncVLLM.connect('name'))",
    "env": "pass a callable that makes it",
}

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


OF_RAY = {"ray_init_config": None, "remote_config": None, "num_cpus": None, "num_gpus": None, "sync_iter": True}
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


def actor_options(remote_config: Mapping[str, object] | None, **resources: float | None) -> dict[str, object]:
    """Return Ray's options for the actor; a resource may be named in both places if they agree."""
    options = {"max_concurrency": CALLS, **(remote_config or {})}
    for name, asked in resources.items():
        if asked is not None and options.setdefault(name, asked) != asked:
            raise ValueError(f"{name}={asked} and remote_config={remote_config!r} differ: pass one")
    return options


def _put(arguments: Mapping[str, object]) -> ObjectRef:
    """Put arguments into Ray's object store."""
    try:
        return ray.put(dict(arguments))
    except Exception:  # pickling calls the user's code, which may raise anything
        # find out which one it was: Ray's error does not say
        for name, value in arguments.items():
            try:
                ray.cloudpickle.dumps(value)
            except Exception as error:
                how = HOW_TO_SEND.get(name, "pass what can be pickled")
                raise TypeError(f"{name}= cannot be sent to the collector's actor ({error!r}): {how}") from error
        raise


# -- the actor --------------------------------------------------------------------------------------------------------


class CollectorHost:
    """Holds a collector for a driver in another process. Methods may be called from several threads at a time."""

    def __init__(self) -> None:
        self._made: AsyncLLMCollector | LLMCollector | None = None
        self._batches: Iterator[TensorDictBase | None] | None = None
        self._pauses: list[AbstractContextManager[None]] = []

    def make(self, kind: type[AsyncLLMCollector] | type[LLMCollector], arguments: Mapping[str, Any]) -> int | None:
        """Make the collector, and return the answers in a batch."""
        self._made = kind(**arguments)
        return self._made.dialog_turns_per_batch

    @property
    def _collector(self) -> AsyncLLMCollector | LLMCollector:
        # Ray makes the object again after the actor has died, and nobody calls make a second time
        if self._made is None:
            raise CollectionError("Ray has restarted the collector's actor, and its position in the data is lost")
        return self._made

    def next(self, is_writer: bool = False) -> bytes:
        """Return a packed tuple of the next batch, or of the ``None`` in its place; an empty tuple at the end."""
        if isinstance(self._collector, AsyncLLMCollector):
            self._collector.is_paced_by_updates = is_writer
        self._batches = iter(self._collector) if self._batches is None else self._batches
        try:
            return pack((next(self._batches),))
        except StopIteration:
            return pack(())
        except Exception:
            self._batches = None  # the generator is closed, and would look exhausted
            raise

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the collector."""
        return getattr(self._collector, method)(*arguments)

    def read(self, attribute: str) -> object:
        """Return an attribute of the collector."""
        return getattr(self._collector, attribute)

    def increment_version(self) -> None:
        """Record a weight update, after asking the replicas for their versions, since their stats arrive later."""
        table: ReplicaTable | None = getattr(getattr(self._collector.policy, "model", None), "replica_table", None)
        for entry in table or ():
            if table is not None and entry.state is ReplicaState.SERVING:
                with suppress(EngineError, OSError):  # the stats will report the version, or the death
                    version = entry.replica.call(Engine.weights_version, ASK_SECONDS)
                    with table.lock:
                        # its stats may have come in between
                        if version > entry.version:
                            table.set_version(entry.index, version)
        self._collector.increment_version()

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Set what is applied to each batch."""
        if self._collector.postproc is not None:
            raise RuntimeError("postproc is set already")
        self._collector.postproc = postproc

    def evaluate(
        self, env: EnvLike, n: int, dataloader: Iterable[object] | None, generate_kwargs: Mapping[str, Any]
    ) -> TensorDictBase:
        """Answer held-out prompts; see :func:`~torchrl_moe.collectors.async_collector.evaluate`."""
        if isinstance(self._collector, AsyncLLMCollector):  # whose max_turns are an evaluation's, too
            return self._collector.evaluate(env, n, dataloader=dataloader, **generate_kwargs)
        return evaluate(self._collector.policy, env, n, dataloader, **generate_kwargs)

    def pause(self, resume: bool) -> None:
        """Enter the collector's ``pause`` and stay in it until :meth:`end_pause`."""
        # the driver's context is left in another call, perhaps in another thread
        pause = self._collector.pause(resume)
        pause.__enter__()
        self._pauses.append(pause)

    def end_pause(self) -> None:
        """Leave the last pause."""
        self._pauses.pop().__exit__(None, None, None)

    def shutdown(self, timeout: float | None, close_env: bool) -> None:
        """Shut the collector down."""
        if self._made is not None:
            self._made.shutdown(timeout=timeout, close_env=close_env)


def _place(options: Mapping[str, Any]) -> ActorHandle:
    """Return an actor once it is placed."""
    actor = ray.remote(CollectorHost).options(**options).remote()
    seconds = default_timeout()
    try:
        if ray.wait([actor.__ray_ready__.remote()], timeout=seconds)[0]:
            return actor
        # it may still come: say what it waits for, and do not leave it in the cluster's queue
        asked = {"CPU": options.get("num_cpus", 1), "GPU": options.get("num_gpus"), **(options.get("resources") or {})}
        waits_for = shortage({name: float(amount) for name, amount in asked.items() if amount})
        raise CollectionError(
            f"the collector's actor was not placed within {seconds:g} s (the environment's {TIMEOUT_VARIABLE}). "
            f"{waits_for}"
        )
    except BaseException:
        with suppress(RayError):
            ray.kill(actor)
        raise


# -- the driver --------------------------------------------------------------------------------------------------------


class RayCollector(FreeRunning):
    """Forwards calls to the actor, which holds the local collector of that ``kind``. Thread-safe."""

    _failure: BaseException | None = None
    _rests = False
    """Whether the local collector works only when asked, and has a state only between batches."""

    def __init__(
        self, kind: type[AsyncLLMCollector] | type[LLMCollector], env: EnvLike, options: CollectorOptions
    ) -> None:
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
        num_cpus, num_gpus = options.get("num_cpus"), options.get("num_gpus")
        placement = actor_options(options.get("remote_config"), num_cpus=num_cpus, num_gpus=num_gpus)
        self.total_dialog_turns = self.total_frames = options.get("total_dialog_turns", -1)
        ray_init_config = options.get("ray_init_config")
        if ray_init_config is None:
            join_cluster()
        elif not ray.is_initialized():
            ray.init(**ray_init_config)
        # the local collector's arguments, with what the actor may use of a buffer; the updater stays with the weights
        arguments = {name: value for name, value in options.items() if name not in (*OF_RAY, "weight_updater")}
        if isinstance(self.replay_buffer, RayReplayBuffer):
            arguments["replay_buffer"] = self.replay_buffer.client()
        elif self._extends_here:
            arguments["replay_buffer"] = None
            if options.get("flatten_data") is None and not options.get("yield_only_last_steps"):
                arguments["flatten_data"] = True  # the default with a buffer, which the actor does not see
        # first what cannot be sent, since a place in the cluster may take minutes
        sent = _put({"env": env, **arguments})
        self._actor = _place(placement)
        try:
            self.dialog_turns_per_batch: int | None = self._ask("make", kind, sent)
        except BaseException:
            self._kill()
            raise
        self.requested_frames_per_batch = self.dialog_turns_per_batch
        self.weight_updater = options.get("weight_updater")

    # -- calls ------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, *arguments: object) -> Any:
        """Call a method of the :class:`CollectorHost`."""
        if self._is_over:
            raise CollectionError("the collector was shut down")
        return self._wait(self._begin(method, *arguments))

    def _local(self, method: str, *arguments: object) -> Any:
        return self._ask("call", method, *arguments)

    def _begin(self, method: str, *arguments: object) -> ObjectRef:
        if not ray.is_initialized():  # a call would start another cluster
            raise CollectionError("Ray was shut down, and the collector's actor with it")
        return getattr(self._actor, method).remote(*arguments)

    def _wait(self, reference: ObjectRef) -> Any:
        """Wait for a method's result; errors are raised as they were in the actor."""
        try:
            return ray.get(reference)
        except RayTaskError as error:
            if isinstance(error.cause, RayError):  # Ray's stand-in for an error that cannot be pickled
                raise CollectionError(str(error.cause)) from error
            raise error.cause from error
        except RayError as error:
            raise CollectionError(f"the collector's actor gave no answer: {error}") from error

    def _is_done(self, reference: ObjectRef, seconds: float | None = 0.0) -> bool:
        """Whether a method has returned or raised within some seconds; ``None``: wait without limit."""
        return bool(ray.wait([reference], timeout=seconds)[0])

    def _kill(self) -> None:
        ray.kill(self._actor)

    # -- batches ----------------------------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches; with a buffer, ``None`` for each one that it was extended with."""
        if self._failure is not None:
            raise self._failure
        while found := self._take():
            (batch,) = found
            if self._extends_here:
                try:
                    self.replay_buffer.extend(batch)
                except BaseException:  # the same batch comes again
                    with self._taking:
                        self._ahead.appendleft(batch)
                    raise
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
                    # a paused local collector would yield nothing; a pause waits for the writer
                    if self._rests and self._pauses and threading.current_thread() is not self._writer:
                        raise RuntimeError("the collector is paused")
                    self._awaited = self._ask_for_batch()
                found: tuple[TensorDictBase | None, ...] = unpack(self._wait(self._awaited))
            except Exception:
                self._awaited = None
                if self._is_over:  # shut down meanwhile, which is why it failed
                    return ()
                raise
            # the next batch is made while this one is trained on
            asks_ahead = found and not self.sync_iter and not self._pauses
            self._awaited = self._ask_for_batch() if asks_ahead else None
            return found

    def _ask_for_batch(self) -> ObjectRef:
        # the actor counts what the writer's batches were trained on by weight updates only
        return self._begin("next", threading.current_thread() is self._writer)

    def _is_here(self) -> bool:
        """Whether a requested batch has arrived; waits for it if the local collector works only when asked."""
        awaited = self._awaited
        return awaited is not None and self._is_done(awaited, None if self._rests else 0.0)

    # -- free running -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Fill the replay buffer from now on, as the local collector does; a thread of this process asks for batches.

        Raises:
            RuntimeError: there is no buffer.
        """
        self._check_buffer()
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
        """Pause the local collector within the context, and request nothing from it; see :meth:`LLMCollector.pause`."""
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
        return self._local("getattr_policy", attr)

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the environment, which must be picklable."""
        return self._local("getattr_env", attr)

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
        return self._ask("read", "policy_version")

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
        self._local("set_post_collect_hook", hook)
        self._post_collect_hook = hook

    def stats(self) -> dict[str, int | float | bool]:
        """Return metrics by name, plain numbers for a logger."""
        return self._local("stats")

    @property
    def first_failure(self) -> str | None:
        """The prompt and the error of the first group that failed; ``None`` if none has."""
        return self._ask("read", "first_failure")

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas ``DataFrame`` with a row for each batch; see :meth:`LLMCollector.to_pandas`."""
        return self._local("to_pandas")

    def _repr_html_(self) -> str:
        """Return the table of the local collector; of one that is over, or says nothing, why."""
        is_known, text = self._shown("_repr_html_")
        return text if is_known else html_table(type(self).__name__, ("",), [], note=text)

    def evaluate(
        self, env: EnvLike, n: int, *, dataloader: Iterable[object] | None = None, **generate_kwargs: object
    ) -> TensorDictBase:
        """Answer ``n`` held-out prompts in the actor, at top priority, while the collection continues."""
        return self._ask("evaluate", env, n, dataloader, generate_kwargs)

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
                            ahead += [batch for batch in unpack(self._wait(self._awaited)) if batch is not None]
                finally:
                    self._taking.release()
            return {**self._local("state_dict"), "ahead": ahead}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where a collector of the same data stopped, even a local one. Call it before the first batch."""
        state = dict(state_dict)
        ahead = state.pop("ahead", ())
        with self._taking:
            self._is_here()  # else the batch that was requested could be made from what is loaded
            self._awaited = None
            self._local("load_state_dict", state)
            self._ahead = deque(ahead)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the actor's data, engine and environment, and return the next seed to use."""
        return int(self._local("set_seed", seed, static_seed))

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
        if ray.is_initialized():  # else it is gone
            seconds = END_SECONDS if timeout is None else timeout + JOIN_SECONDS
            try:
                self._is_done(self._begin("shutdown", timeout, close_env), seconds)
            finally:
                self._kill()
            if self._awaited is not None:
                with suppress(Exception):  # read, so that Ray does not log it as unhandled
                    self._wait(self._awaited)
        if self._writer is not None and self._writer is not threading.current_thread():
            self._writer.join(JOIN_SECONDS)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown('__repr__')[1]})"

    def _shown(self, method: str) -> tuple[bool, str]:
        """Return what the local collector shows of itself, or false and why it does not; nobody waits long for it."""
        try:
            if self._is_over:
                raise CollectionError("the collector was shut down")
            reference = self._begin("call", method)
            if not self._is_done(reference, SHOW_SECONDS):
                raise CollectionError(f"its actor gave no answer within {SHOW_SECONDS:g} s")
            return True, str(self._wait(reference))
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
        super().__init__(LLMCollector, env, options)


class RayAsyncLLMCollector(RayCollector):
    """An :class:`AsyncLLMCollector` in a Ray actor, so environments, rewards and tokenizing cost the trainer no CPU.

    Give it a policy over an engine in Ray, or a ``policy_factory`` that connects to one. Several collectors, each with
    its own data, can share that engine. How the actor ends, and its errors, are as of :class:`RayLLMCollector`.

    Args:
        env: see :class:`AsyncLLMCollector` for its arguments, and :class:`RayLLMCollector` for Ray's and for what can
            be sent to an actor.
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
        super().__init__(AsyncLLMCollector, env, options)
