"""The asynchronous core of a collector: starts groups as the schedule allows, and makes batches of complete ones.

All of it runs in one event loop, in its own thread. Environments are reset and stepped in other threads. The trainer's
thread asks for a batch and waits for a future.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol, TypedDict, TypeVar

from tensordict import TensorDictBase, lazy_stack

from torchrl_moe.collectors.arguments import Settings
from torchrl_moe.collectors.environments import EnvironmentPool, EnvironmentTimeoutError, gather
from torchrl_moe.collectors.group import CollectionStats, Group, GroupState
from torchrl_moe.collectors.prompt_stream import Prompt, PromptStream, StreamState
from torchrl_moe.collectors.schedule import Schedule
from torchrl_moe.collectors.workflow import Answers, Turns, Workflow
from torchrl_moe.errors import (
    CollectionError,
    CollectionStalledError,
    EngineError,
    ReplicaDiedError,
    RequestRefusedError,
    StaleReplicaError,
)
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies.vllm_wrapper import SampleRequest, vLLMWrapper
from torchrl_moe.modules.serving.requests import SamplingParameters

T = TypeVar("T")

# -- from the loop to the trainer -------------------------------------------------------------------------------------


class Delivery:
    """Hands each batch over once, whatever interrupts. Until a batch is accepted, the collector owns it."""

    def __init__(self, wait: Callable[[Future[TensorDictBase]], TensorDictBase] = Future.result) -> None:
        self._wait = wait
        self._awaited: Future[TensorDictBase] | None = None
        self._taking = threading.Lock()  # threads that wait for batches do so one after the other
        self._owner = threading.RLock()  # held while a batch changes its owner

    def take(
        self,
        ask: Callable[[Future[TensorDictBase]], object],
        accept: Callable[[TensorDictBase], T],
        waiting: AbstractContextManager[object],
    ) -> T:
        """Wait for the next batch; after a Ctrl-C, or an error in ``accept``, the next call takes the same batch."""
        with self._taking:
            # the future of a batch that was not accepted is asked for again, which gives the same batch
            with self._owner:
                if self._awaited is None:
                    self._awaited = Future()
                ask(self._awaited)
            try:
                with waiting:
                    batch = self._wait(self._awaited)
            except Exception:  # a Ctrl-C leaves it
                self._awaited = None
                raise
            with self._owner:
                accepted = accept(batch)
                self._awaited = None
            return accepted

    @contextmanager
    def hold(self) -> Iterator[Future[TensorDictBase] | None]:
        """Hand nothing over within the context; yields the future of a batch that the trainer does not own yet."""
        with self._owner:
            yield self._awaited


# -- requests to the engine -------------------------------------------------------------------------------------------


RETRY_SECONDS = 0.1


class Generates(Protocol):
    """What is asked of an engine."""

    @property
    def agenerate(self) -> Callable[..., Awaitable[Completion]]:
        """Answer one request."""


class GenerationSlots:
    """Bounds how many answers are generated at a time."""

    def __init__(self, engine: Generates, count: int | Literal["auto"], stats: CollectionStats) -> None:
        self._engine = engine
        # an engine has a queue of its own: a bound here is for those that must not fill it
        self._room: contextlib.AbstractAsyncContextManager[None] = (
            contextlib.nullcontext() if count == "auto" else asyncio.Semaphore(count)
        )
        self._stats = stats

    async def answer(self, arguments: Mapping[str, Any]) -> Completion:
        """Generate one answer, holding a slot meanwhile."""
        async with self._room:
            self._stats.in_flight += 1
            try:
                completion = await self._ask(arguments)
            finally:
                self._stats.in_flight -= 1
        if completion.aborted:  # by somebody else, and half an answer is none
            raise EngineError(f"request {completion.request_id!r} was aborted", [completion])
        return completion

    async def _ask(self, arguments: Mapping[str, Any]) -> Completion:
        while True:
            try:
                return await self._engine.agenerate(**arguments)
            except StaleReplicaError:  # the replica with the newest weights died; others will get them
                await asyncio.sleep(RETRY_SECONDS)


# -- running groups ---------------------------------------------------------------------------------------------------


LOG = logging.getLogger(__name__)
STOP_SECONDS = 5.0
UPDATE_SECONDS = 30.0  # wait for a weight update before it is logged
SIGNALS = (
    "a reward or an environment sets a signal, such as signal.alarm, which Python allows in the main thread only, and "
    "they run in others: switch that timeout off, since reward_timeout bounds their time (Math-Verify: "
    "parse(..., parsing_timeout=None) and verify(..., timeout_seconds=None)), or run the verifier in a process"
)
NO_SIGNALS = ("signal only works in main thread", "signal.alarm")  # Python's message, and Math-Verify's
FIRST_FAILURES = 8  # that are borne before anything has succeeded, or a batch's worth
DROPPED_BATCHES = 100
GROUP_ERRORS = (RequestRefusedError, ReplicaDiedError)  # other engine errors affect all groups


class RolloutsState(TypedDict):
    """A collection in a checkpoint."""

    prompts: StreamState
    answers: dict[int, dict[int, Turns]]
    ready: list[GroupState]
    begun: int


class Rollouts:
    """Running groups, and those that wait for the trainer. Use it only in its event loop."""

    def __init__(
        self,
        policy: vLLMWrapper,
        environments: EnvironmentPool | Workflow,
        prompts: PromptStream,
        settings: Settings,
        schedule: Schedule,
        stats: CollectionStats,
    ) -> None:
        self._policy = policy
        self._engine = policy.model
        self._environments = environments
        self._prompts = prompts
        self._settings = settings
        self.schedule = schedule
        self._stats = stats
        self.pauses = 0
        """How many pauses are in effect."""
        self.error: BaseException | None = None
        self._data_error: Exception | None = None
        self._has_begun = False
        self._restored: deque[GroupState] = deque()  # complete groups of a checkpoint, not in line yet
        self._restored_at = 0  # the version that their ages count from
        self._step_is_due = False
        self.version = self._engine.replica_table.latest_version
        self.groups: dict[int, Group] = {}
        """Groups that are running or wait for the trainer, by number."""
        self._answers = Answers()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._asked: deque[Future[TensorDictBase]] = deque()
        self._given: tuple[Future[TensorDictBase], list[Group]] | None = None
        self._slots = GenerationSlots(self._engine, settings.max_in_flight, stats)
        self._is_paced_by_updates = self._has_logged_wait = self._has_completed = False
        self._dropped = 0  # groups, since the last batch
        self._progress_at = time.monotonic()

    # -- the trainer's side -----------------------------------------------------------------------------------------

    def ask(self, future: Future[TensorDictBase], trained: bool = True) -> None:
        """Fulfil a future with the next batch; the first call starts the collection."""
        if future.done() or future in self._asked:
            return
        if not self._has_begun:
            self._has_begun = True
            self._check_version()
            self._restored_at = self.version
        # asking for the next batch says that the trainer has the last one, and is done with it
        self._given = None
        self._is_paced_by_updates = not trained
        if trained:
            self.schedule.trained()
        self._asked.append(future)
        self.step()

    def step(self) -> None:
        """Hand out a batch that is ready, and start one group if one may start; the next follows in the next step."""
        if self.error is not None:
            self._fail_all()
            return
        try:
            self._check_version()
            self._drop_stale()
            self._hand_out()
            if self._has_begun and self.schedule.may_begin:
                self._begin_next()
        except Exception as error:  # noqa: BLE001  the trainer raises it, whatever it is
            self.fail(error)

    def _step_soon(self) -> None:
        """Schedule one :meth:`step` for the loop's next round, after the other callbacks there."""

        def due() -> None:
            self._step_is_due = False
            self.step()

        if not self._step_is_due:
            self._step_is_due = True
            asyncio.get_running_loop().call_soon(due)

    def _begin_next(self) -> None:
        """Put the next group in line. An error of the data is raised once no complete batch is left to hand out."""
        # a checkpoint's complete groups come in the order of the data, between the prompts that are read again
        if self._restored and self._restored[0]["position"] < self._prompts.next_position:
            group = Group.restored(self.schedule.begin(), self._restored.popleft(), self._restored_at)
            self.groups[group.number] = group
            self._ready(group)
        elif self.pauses or self._data_error is not None:
            return
        else:
            try:
                prompt = next(self._prompts)
            except BaseException as error:  # noqa: BLE001  user code; a SystemExit would end the loop
                self._data_error = (
                    error if isinstance(error, Exception) else CollectionError(f"the data raised {error!r}")
                )
                LOG.warning("the data has ended: %r", error)
            else:
                self._begin(prompt)
        self._step_soon()

    def _check_version(self) -> None:
        newest = self._engine.replica_table.latest_version
        if newest > self.version:
            # several updates may be seen as one; where updates confirm batches, that counts as one
            times = 1 if self._is_paced_by_updates else newest - self.version
            self.schedule.updated(times, self._is_paced_by_updates)
            self.version = newest

    def _hand_out(self) -> None:
        while self._asked and (numbers := self.schedule.take()):
            groups = [self.groups.pop(number) for number in numbers]
            self._dropped = 0
            self._progress_at = time.monotonic()
            self._stats.gave_out(groups, self.version)
            batch = lazy_stack([row for group in groups if group.rows is not None for row in group.rows.unbind(0)])
            # until the next request it may still be the collector's, and part of its state
            self._given = self._asked.popleft(), groups
            self._given[0].set_result(batch)
        # the data have ended: what is in line may still make a batch
        if self._asked and self._data_error is not None and self.schedule.in_line < self.schedule.groups_per_batch:
            raise self._data_error

    # -- groups -----------------------------------------------------------------------------------------------------

    def _begin(self, prompt: Prompt) -> None:
        number = self.schedule.begin()
        group = self.groups[number] = Group(number, prompt, self.version)
        oldest_allowed = self.version - self.schedule.slack
        self._tasks[number] = task = asyncio.get_running_loop().create_task(self._play(group, oldest_allowed))

        def over(_: asyncio.Task[None]) -> None:
            self._tasks.pop(number, None)
            if (group := self.groups.get(number)) is None or group.is_ready:  # else the collection ended meanwhile
                self._answers.forget(prompt.position)

        task.add_done_callback(over)

    async def _play(self, group: Group, oldest_allowed: int) -> None:
        """Finish a group: complete, or failed and replaced."""
        try:
            size = self._environments.group_size
            count = self._settings.group_size
            # an environment holds one sample, or the whole group
            runs = [self._run_samples(group, start, oldest_allowed) for start in range(0, count, size)]
            episodes = await gather(runs)
            if group.number not in self.groups:  # dropped meanwhile
                return
            rewarded = [turns for turns in episodes if turns]
            if len(rewarded) < min(2, len(episodes)):  # an environment of a whole group is one episode
                raise ValueError(
                    f"{len(episodes) - len(rewarded)} of {len(episodes)} answers have no reward (None was returned for "
                    f"them, or a harness made no call): a group needs at least {min(2, len(episodes))} that have"
                )
            group.complete(rewarded, self._settings.only_last_turns, self._settings.track_policy_version)
            self._progress_at, self._has_completed = time.monotonic(), True
            # the filter is the user's code, so in a thread, and the group may be dropped meanwhile
            keep = self._settings.group_filter
            is_kept = keep is None or await self._environments.call(keep, group.rows)
            if group.number not in self.groups:
                return
            if is_kept:
                self._ready(group)
            else:
                self._drop(group, "filtered")
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  environments and rewards are user code
            if group.number in self.groups:
                self._failed(group, error)
        self.step()

    def _ready(self, group: Group) -> None:
        group.is_ready = True
        self._stats.completed(group)
        self.schedule.ready(group.number)

    async def _run_samples(self, group: Group, start: int, oldest_allowed: int) -> list[TensorDictBase]:
        """Run the samples of one environment."""

        async def generate(request: SampleRequest, index: int) -> Completion:
            return await self._generate(request, group.prompt.position, start + index, oldest_allowed)

        settings = self._settings
        return await self._environments.play(
            self._policy, generate, group.prompt.data, settings.reward_timeout, settings.max_turns
        )

    async def _generate(self, request: SampleRequest, position: int, sample: int, oldest_allowed: int) -> Completion:
        """Ask the engine for one answer, holding a slot meanwhile."""
        # its own seed and names, and, after a restore, the tokens that it had
        asked = _own_seed(request.arguments, position * self._settings.group_size + sample)
        arguments = self._answers.ask(position, sample, asked, self.version)
        if oldest_allowed > 0:
            arguments["min_version"] = max(oldest_allowed, arguments.get("min_version") or 0)
        try:
            completion = await self._slots.answer(arguments)
        except (EngineError, RuntimeError) as error:  # the latter from an engine that was shut down
            # at once, not by way of the group, which would count as one of max_failures
            if not isinstance(error, GROUP_ERRORS):
                self.fail(error)
            raise
        self._answers.add(position, sample, completion)
        self._progress_at = time.monotonic()
        return completion

    def _failed(self, group: Group, error: Exception) -> None:
        """Count a failure; more than ``max_failures`` end the collection, or a few while nothing has succeeded."""
        if self.error is not None:
            return
        if isinstance(error, CollectionError):
            self.fail(error)
            return
        if _sets_signals(error):  # so does every group
            end = CollectionError(f"{SIGNALS} ({error})")
            end.__cause__ = error
            self.fail(end)
            return
        self._stats.failures += 1
        prompt = group.prompt
        LOG.warning("group %d failed at prompt %d (%s): %r", group.number, prompt.position, prompt.excerpt, error)
        error.add_note(f"at prompt {prompt.position}: {prompt.excerpt}")
        self._drop(group, "reward_timeout" if isinstance(error, EnvironmentTimeoutError) else "failed")
        most = self._settings.max_failures
        if not self._has_completed:  # a reward with a mistake in it fails at every prompt
            most = min(most, max(FIRST_FAILURES, self._settings.groups_per_batch))
        if self._stats.failures > most:
            self.fail(error)

    def _drop(self, group: Group, reason: str) -> None:
        """Remove a group; another one starts in its place, unless too many were dropped in a row."""
        self.schedule.drop(group.number)
        del self.groups[group.number]
        self._stats.dropped(reason)
        if reason not in ("filtered", "stale") or not self._asked:  # failures have a limit of their own
            return
        self._dropped += 1
        most = self._settings.max_dropped_groups
        most = DROPPED_BATCHES * self.schedule.groups_per_batch if most is None else most
        if self._dropped > most:
            why = "group_filter rejects them" if reason == "filtered" else "they are older than max_staleness"
            self.fail(
                CollectionError(
                    f"{self._dropped} groups were dropped without a batch in between, the last because {why}: is every "
                    f"reward the same, or every answer too old? max_dropped_groups={most} is the limit"
                )
            )

    def _drop_stale(self) -> None:
        """Drop groups that are too old, including running ones."""
        if self._settings.on_stale != "drop":
            return
        for group in list(self.groups.values()):
            oldest = group.oldest if group.is_ready else group.begun_version
            if self.version - oldest > self._settings.max_staleness:
                self._drop(group, "stale")
                if (task := self._tasks.get(group.number)) is not None:
                    task.cancel()

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(
        self, awaited: Future[TensorDictBase] | None = None, cut: Mapping[str, Completion] | None = None
    ) -> RolloutsState:
        """Return the position in the data, the running prompts with their answers so far, and the complete groups."""
        self._check_version()  # an update may have come since the last step, and the ages count from here
        untaken = self._given[1] if self._given is not None and self._given[0] is awaited else []
        under_way = [group.prompt for group in self.groups.values() if not group.is_ready]
        complete = [group for group in (*untaken, *self.groups.values()) if group.is_ready]
        # groups of the last checkpoint that are not in line yet have become older too
        aged = self.version - self._restored_at if self._has_begun else 0
        ready = [group.state_dict(self.version) for group in complete]
        for entry in self._restored:
            ready.append({**entry, "age": entry["age"] + aged})
        return {
            "prompts": self._prompts.state_dict(under_way),
            "answers": self._answers.state_dict(cut or {}),
            "ready": ready,
            "begun": self.schedule.begun,
        }

    def load_state_dict(self, state: RolloutsState) -> None:
        """Continue from a state: complete groups and running prompts are put in line in the order of the data."""
        if self._has_begun or self.error is not None:
            raise RuntimeError("load_state_dict must be called before the first batch is asked for")
        self._prompts.load_state_dict(state["prompts"])
        self._answers.load_state_dict(state["answers"])
        self.schedule.restart(state["begun"])
        self._restored = deque(sorted(state["ready"], key=lambda entry: entry["position"]))

    # -- ends -------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End with an error, which the trainer raises."""
        if self.error is None:
            self.error = error
        self._cancel_all()
        self._fail_all()

    def _fail_all(self) -> None:
        assert self.error is not None
        while self._asked:
            future = self._asked.popleft()
            if not future.done():
                future.set_exception(self.error)

    def _cancel_all(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()

    async def stop(self) -> None:
        """End all running work."""
        tasks = list(self._tasks.values())
        self._cancel_all()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS)

    async def watch(self) -> None:
        """Fail after too long without progress while a batch is awaited; look for new weights."""
        limit = self._settings.heartbeat_timeout
        while self.error is None:
            await asyncio.sleep(min(0.5, limit / 4 if limit else 0.5))
            self.step()
            # waiting for nobody, or for an update that the trainer has yet to make, is no stall
            if not self._asked or self.pauses:
                self._progress_at = time.monotonic()
            elif not self._tasks and not self.schedule.may_begin:
                self._wait_for_update()
            elif limit is not None and time.monotonic() - self._progress_at > limit:
                self.fail(CollectionStalledError(f"nothing has moved for {limit:g} s: {self.waits()}"))

    def _wait_for_update(self) -> None:
        """Log once if that takes long; a training step may."""
        if not self._has_logged_wait and time.monotonic() - self._progress_at > UPDATE_SECONDS:
            self._has_logged_wait = True
            LOG.warning(
                "start() has written all that max_staleness=%d allows before the weights change: it continues "
                "after the next update",
                self._settings.max_staleness,
            )

    def waits(self) -> str:
        """Describe what the collection waits for."""
        running = [group.number for group in self.groups.values() if not group.is_ready]
        paused = "it is paused; " if self.pauses else ""
        return (
            f"{paused}{len(running)} groups are running (the oldest is {min(running, default=None)}), "
            f"{self.schedule.ready_groups} are ready, {self.schedule.groups_per_batch} make a batch; "
            f"{self._stats.in_flight} answers are being generated; {self._engine.replica_table!r}"
        )


def _sets_signals(error: BaseException | None) -> bool:
    """Whether a signal handler was set outside the main thread; Math-Verify has a message of its own for that."""
    while error is not None:
        if isinstance(error, ValueError) and any(message in str(error) for message in NO_SIGNALS):
            return True
        error = error.__cause__
    return False


def _own_seed(arguments: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a request's arguments with its own seed, if it has one: all answers of a group would be the same."""
    params = arguments["sampling_params"]
    if params.get("seed") in (None, -1):
        return arguments
    return {**arguments, "sampling_params": SamplingParameters({**params, "seed": params["seed"] + number})}
