"""The core of an asynchronous collector: starts groups as the schedule allows, and makes batches of complete ones.

The way of a prompt, downwards: :meth:`Rollouts.run` takes it from the stream and puts its group in line; ``_play`` runs
the group's samples, in an environment or by an async function; those ask the engine by ``_generate``; a complete group
waits in line until ``_hand_out`` puts it into a batch, for which the trainer's thread waits as for a future.

All of it runs in one event loop, in its own thread; environments are reset and stepped in other threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor

from torchrl_moe._checks import LONGEST, check_bool, check_number, shown
from torchrl_moe.collectors.environments import MAX_TURNS, EnvironmentPool, EnvironmentTimeoutError, gather
from torchrl_moe.collectors.prompt_stream import Prompt, PromptStream, StreamState
from torchrl_moe.collectors.schedule import Order, Schedule
from torchrl_moe.collectors.workflow import Workflow
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

LOG = logging.getLogger(__name__)
POLL_SECONDS = 0.5  # between looks at the clock, and at the engine's weights
RETRY_SECONDS = 0.1
STOP_SECONDS = 5.0
UPDATE_SECONDS = 30.0  # wait for a weight update before it is logged
FIRST_FAILURES = 8  # that are borne before anything has succeeded, or a batch's worth
DROPPED_BATCHES = 100
GROUP_ERRORS = (RequestRefusedError, ReplicaDiedError)  # other engine errors affect all groups
SIGNALS = (
    "a reward or an environment sets a signal, such as signal.alarm, which Python allows in the main thread only, and "
    "they run in others: switch that timeout off, since reward_timeout bounds their time (Math-Verify: "
    "parse(..., parsing_timeout=None) and verify(..., timeout_seconds=None)), or run the verifier in a process"
)
NO_SIGNALS = ("signal only works in main thread", "signal.alarm")  # Python's message, and Math-Verify's

GroupFilter: TypeAlias = "Callable[[TensorDictBase], bool]"
"""Whether to train on a group, ``[rows]``."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See :class:`AsyncLLMCollector`, whose arguments these are."""

    group_size: int = 1
    groups_per_batch: int = 1
    max_staleness: int = 2
    order: Order = "window"
    window: float = 0.3
    on_stale: Literal["wait", "drop"] = "wait"
    max_in_flight: int | Literal["auto"] = "auto"
    over_sample: float = 1.0
    group_filter: GroupFilter | None = None
    max_failures: int = 0
    max_dropped_groups: int | None = None
    max_turns: int = MAX_TURNS
    reward_timeout: float | None = None
    heartbeat_timeout: float | None = 300.0
    only_last_turns: bool = False
    track_policy_version: bool = False

    def __post_init__(self) -> None:
        """Refuse invalid values; the schedule checks its own."""
        for name, most in {"group_size": 1 << 16, "groups_per_batch": 1 << 20}.items():
            check_number(name, getattr(self, name), 1, most, whole=True)
        check_number("max_turns", self.max_turns, 1, whole=True)
        for name in ("only_last_turns", "track_policy_version"):
            check_bool(name, getattr(self, name))
        if self.on_stale not in ("wait", "drop"):
            raise ValueError(f"on_stale must be 'wait' or 'drop', got {self.on_stale!r}")
        if not callable(self.group_filter) and self.group_filter is not None:
            raise ValueError(f"group_filter must be a function of a group, or None, got {shown(self.group_filter)}.")
        check_number("over_sample", self.over_sample, 1, 100)
        # surplus groups end by being dropped: nothing else takes them out of the line
        if self.over_sample > 1 and self.on_stale != "drop":
            raise ValueError(
                f"over_sample={self.over_sample} begins more groups than can be used in time: it needs on_stale='drop'"
            )
        if self.max_in_flight != "auto":
            check_number("max_in_flight", self.max_in_flight, 1, whole=True, hint="'auto': as the engine admits.")
        check_number("max_failures", self.max_failures, 0, whole=True)
        check_number("max_dropped_groups", self.max_dropped_groups, 0, whole=True, none=True)
        for name in ("reward_timeout", "heartbeat_timeout"):
            check_number(name, getattr(self, name), above=0, most=LONGEST, none=True, hint="It is in seconds.")


# -- groups -----------------------------------------------------------------------------------------------------------


Answers: TypeAlias = "dict[int, dict[int, tuple[Completion, str]]]"
"""Sample -> turn -> its answer, complete or partial, and how it was requested. For a checkpoint."""


class GroupState(TypedDict):
    """A complete group in a checkpoint."""

    position: int
    data: TensorDictBase
    rows: TensorDictBase
    age: int
    tokens: int


@dataclass(slots=True)
class Turn:
    """A request for an answer, and the answer."""

    request_id: str
    how: str
    """What the answer depends on besides its prompt and the weights."""
    answer: Completion | None = None


@dataclass(slots=True)
class Group:
    """A prompt and the group of answers to it.

    After a restore its environments run again from the start. An answer of the checkpoint is used if its prompt is the
    same as before; where a random environment gives another prompt, a new answer is generated.
    """

    number: int
    prompt: Prompt
    begun_version: int
    restored: Answers = field(default_factory=dict)
    turns: dict[int, list[Turn]] = field(default_factory=dict)
    """Sample -> its turns, until the group is ready."""
    rows: TensorDictBase | None = None
    oldest: int = -1
    tokens: int = 0
    is_ready: bool = False
    ready_at: float = 0.0

    def ask(self, sample: int, name: str, arguments: Mapping[str, Any], version: int) -> tuple[Turn, dict[str, Any]]:
        """Note a sample's next turn; return it and its arguments of ``agenerate``, with an answer to resume."""
        turns = self.turns.setdefault(sample, [])
        how = f"{arguments['sampling_params']!r}, routes: {arguments.get('return_routed_experts', True)}"
        turn = Turn(f"{name}-{len(turns)}", how)
        had = self.restored.get(sample, {}).get(len(turns))
        turns.append(turn)
        # one session for a sample, so that its turns find their prefix in the cache of one replica
        asked = {"session_id": name, **arguments, "request_id": turn.request_id}
        if had is not None:
            answer, had_how = had
            same_ids = np.array_equal(answer.prompt_token_ids, np.asarray(arguments["prompt_token_ids"]))
            # an engine with older weights than the answer's cannot have made it: this is another run
            is_known = all(output.policy_versions.max(initial=0) <= version for output in answer.outputs)
            if same_ids and is_known and had_how == how:
                del asked["prompt_token_ids"]
                asked.pop("routed_experts", None)  # the answer has its own
                asked["resume"] = answer
        return turn, asked

    def answers(self, under_way: Mapping[str, Completion]) -> Answers:
        """Return all answers so far; those of the last checkpoint stay until they are asked for again."""
        found = {sample: dict(turns) for sample, turns in self.restored.items()}
        for sample, turns in list(self.turns.items()):
            for number, turn in enumerate(turns):
                answer = turn.answer or under_way.get(turn.request_id)
                if answer is not None:
                    found.setdefault(sample, {})[number] = answer, turn.how
        return found

    def complete(self, episodes: list[list[TensorDictBase]], only_last: bool, version_in_next: bool = False) -> None:
        """Take the rows of its episodes, sample by sample, each with its turns in order."""
        # from turns of several samples to samples of several turns
        samples: list[list[TensorDictBase]] = []
        for turns in episodes:
            samples += [list(rows) for rows in zip(*(turn.unbind(0) for turn in turns), strict=True)]
        every = [row for rows in samples for row in rows]
        _check_rewards(every)
        kept = [row for rows in samples for row in (rows[-1:] if only_last else rows)]
        for row in kept:
            row.set("group_id", torch.tensor(self.number))
            if version_in_next:
                row.set(("next", "policy_version"), row.get("policy_version"))
        # age and length are of all turns, those that are not kept too: -1 is a row without a sampled token
        versions = [int(row.get("policy_version")) for row in every]
        self.oldest = min((version for version in versions if version >= 0), default=self.begun_version)
        self.tokens = sum(len(row.get(("tokens", "response"))) for row in every)
        self.rows = lazy_stack(kept)
        self.ready_at = time.monotonic()

    def state_dict(self, version: int) -> GroupState:
        """Return a complete group for a checkpoint; later changes to its rows do not affect it."""
        assert self.rows is not None
        return {
            "position": self.prompt.position,
            "data": self.prompt.data,
            "rows": lazy_stack([row.copy() for row in self.rows.unbind(0)]),
            "age": version - self.oldest,
            "tokens": self.tokens,
        }

    @classmethod
    def from_state(cls, number: int, state: GroupState, version: int) -> Group:
        """Return the group of a state, with the age that it had; its rows keep their ``group_id``."""
        group = cls(number, Prompt(state["position"], state["data"]), version, rows=state["rows"])
        group.oldest, group.tokens, group.ready_at = version - state["age"], state["tokens"], time.monotonic()
        return group


def _check_rewards(rows: Sequence[TensorDictBase]) -> None:
    """Refuse what no advantage can be made of. That no row has a reward is fine: a ``postproc`` may add them."""
    rewards = [row.get(("next", "reward"), None) for row in rows]
    missing = sum(reward is None for reward in rewards)
    if 0 < missing < len(rewards):
        raise ValueError(f"{missing} of {len(rewards)} rows of a group have no reward")
    for reward in rewards[missing:]:
        if not isinstance(reward, Tensor):
            given = getattr(reward, "data", reward)  # of a NonTensorData
            raise TypeError(f"the environment's reward is {given!r:.200}: a reward must be a tensor")
        if not reward.float().isfinite().all():
            raise ValueError(f"the environment's reward is {reward.tolist()}: a reward must be finite, in float32")


class CollectionStats:
    """Counts of a collector, and metrics of its last batch, under the names of TorchRL's scripts where they have one.

    One thread writes; any may read.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.first_failure: str | None = None
        """The prompt and the error of the first group that failed."""
        self.left_out = 0
        """Samples that had no reward, in groups that could do without them."""
        self._in_flight = 0
        self._began = time.monotonic()
        self._changed_at = self._began
        self._idle = 0.0  # seconds without an answer in flight
        self.drops: Counter[str] = Counter()
        """Reason -> groups that were dropped and replaced."""
        self._sampled = [0, 0]  # answers, tokens: of all groups that were completed
        self._trained = [0, 0]
        self._batch: dict[str, float] = {}

    @property
    def in_flight(self) -> int:
        """Answers that are being generated."""
        return self._in_flight

    @in_flight.setter
    def in_flight(self, count: int) -> None:
        now = time.monotonic()
        # idle is the time at a count of 0, added up whenever the count changes
        if not self._in_flight:
            self._idle += now - self._changed_at
        self._changed_at = now
        self._in_flight = count

    def failed(self, prompt: Prompt, error: Exception) -> None:
        """Count a group that failed."""
        self.failures += 1
        if self.first_failure is None:
            self.first_failure = f"at prompt {prompt.position} ({prompt.excerpt}): {_told(error)}"

    def completed(self, group: Group) -> None:
        """Count a group that may be trained on."""
        self._sampled[0] += 1
        self._sampled[1] += group.tokens

    def gave_out(self, groups: Sequence[Group], version: int) -> None:
        """Set the metrics of a batch that is trained on at a version."""
        now = time.monotonic()
        ages = [max(version - group.oldest, 0) for group in groups]
        rows = [row for group in groups if group.rows is not None for row in group.rows.unbind(0)]
        segments = [int(row.get("num_segments")) for row in rows]
        for group in groups:
            self._trained[0] += 1
            self._trained[1] += group.tokens
        self._batch = {
            "inference/staleness_mean": sum(ages) / len(ages),
            "inference/staleness_max": float(max(ages)),
            "inference/queue_age": sum(now - group.ready_at for group in groups) / len(groups),
            "collector/partial_ratio": sum(count > 1 for count in segments) / len(segments),
            "collector/max_segments": float(max(segments)),
        }

    def scalars(self) -> dict[str, float]:
        """Return all metrics by name, for a logger."""
        now = time.monotonic()
        seconds = max(now - self._began, 1e-9)
        idle = self._idle + (0.0 if self._in_flight else now - self._changed_at)
        found = {
            **self._batch,
            "inference/in_flight": float(self._in_flight),
            "inference/idle": idle / seconds,
            "collector/failures": float(self.failures),
            "collector/samples_left_out": float(self.left_out),
            "collector/refills": float(sum(self.drops.values())),
        }
        found |= {f"collector/groups_dropped/{reason}": float(count) for reason, count in sorted(self.drops.items())}
        # below 1, long answers are dropped more often than short ones
        if self._trained[0] and self._sampled[1]:
            trained, sampled = (tokens / groups for groups, tokens in (self._trained, self._sampled))
            found["collector/length_trained_over_sampled"] = trained / sampled
        return found


# -- the loop ---------------------------------------------------------------------------------------------------------


class RolloutsState(TypedDict):
    """A collection in a checkpoint."""

    prompts: StreamState
    answers: dict[int, Answers]
    """By position in the data."""
    ready: list[GroupState]
    begun: int


class Rollouts:
    """Groups that run, and those that wait for the trainer. Use it only in its event loop, where :meth:`run` runs."""

    def __init__(
        self,
        policy: vLLMWrapper,
        environments: EnvironmentPool | Workflow,
        prompts: PromptStream,
        settings: Settings,
        schedule: Schedule,
    ) -> None:
        self._policy, self._engine = policy, policy.model
        self._environments, self._prompts = environments, prompts
        self._settings, self.schedule = settings, schedule
        self.stats = CollectionStats()
        self.pauses = 0
        """How many pauses are in effect."""
        self.error: BaseException | None = None
        self.round_at = time.monotonic()
        """When the loop last came around. Any thread may read it."""
        self.version = self._engine.replica_table.latest_version
        self.groups: dict[int, Group] = {}
        """Groups that are running or wait for the trainer, by number."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._asked: deque[Future[TensorDictBase]] = deque()
        self._given: tuple[Future[TensorDictBase], list[Group]] | None = None
        self._has_begun = self._has_completed = self._has_logged_wait = self._is_paced_by_updates = False
        self._data_error: Exception | None = None
        self._dropped = 0  # groups, since the last batch
        self._progress_at = time.monotonic()
        # an engine has a queue of its own: a bound here is for those that must not fill it
        count = settings.max_in_flight
        self._room: AbstractAsyncContextManager[None] = nullcontext() if count == "auto" else asyncio.Semaphore(count)
        self._name = uuid.uuid4().hex[:12]  # in the ids of its requests
        # of a checkpoint: complete groups that are not in line yet, the version that their ages count from, and the
        # answers of prompts that were not begun again yet
        self._restored: deque[GroupState] = deque()
        self._restored_at = 0
        self._restored_answers: dict[int, Answers] = {}

    async def run(self) -> None:
        """Give out batches and start groups until there is an error; each round does what has become possible."""
        limit = self._settings.heartbeat_timeout
        while self.error is None:
            self.round_at = time.monotonic()
            self._changed.clear()
            try:
                self._check_version()
                self._drop_stale()
                self._hand_out()
                has_begun = self._has_begun and self.schedule.may_begin and self._begin_next()
            except Exception as error:  # noqa: BLE001  the trainer raises it, whatever it is
                self.fail(error)
                return
            if has_begun:
                await asyncio.sleep(0)  # one group a round: answers that have come go first
                continue
            self._check_progress()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(POLL_SECONDS, limit / 4 if limit else POLL_SECONDS)):
                    await self._changed.wait()

    def wake(self) -> None:
        """Have :meth:`run` look what has changed."""
        self._changed.set()

    def pause(self, more: int) -> None:
        """Begin a pause, or end one with -1."""
        self.pauses += more
        self.wake()

    def ask(self, future: Future[TensorDictBase], trained: bool = True) -> None:
        """Fulfil a future with the next batch; the first call starts the collection."""
        if future.done() or future in self._asked:
            return
        if self.error is not None:
            future.set_exception(self.error)
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
        self.wake()

    def _check_version(self) -> None:
        newest = self._engine.replica_table.latest_version
        if newest > self.version:
            # several updates may be seen as one; where updates confirm batches, that counts as one
            times = 1 if self._is_paced_by_updates else newest - self.version
            self.schedule.updated(times, self._is_paced_by_updates)
            self.version = newest

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

    def _hand_out(self) -> None:
        while self._asked and (numbers := self.schedule.take()):
            groups = [self.groups.pop(number) for number in numbers]
            self._dropped = 0
            self._progress_at = time.monotonic()
            self.stats.gave_out(groups, self.version)
            batch = lazy_stack([row for group in groups if group.rows is not None for row in group.rows.unbind(0)])
            # until the next request it may still be the collector's, and part of its state
            self._given = self._asked.popleft(), groups
            self._given[0].set_result(batch)
        # the data have ended: what is in line may still make a batch
        if self._asked and self._data_error is not None and self.schedule.in_line < self.schedule.groups_per_batch:
            raise self._data_error

    def _begin_next(self) -> bool:
        """Put the next group in line. An error of the data is raised once no complete batch is left to hand out."""
        # a checkpoint's complete groups come in the order of the data, between the prompts that are read again
        if self._restored and self._restored[0]["position"] < self._prompts.next_position:
            group = Group.from_state(self.schedule.begin(), self._restored.popleft(), self._restored_at)
            self.groups[group.number] = group
            self._ready(group)
            return True
        if self.pauses or self._data_error is not None:
            return False
        try:
            prompt = next(self._prompts)
        except BaseException as error:  # noqa: BLE001  user code; a SystemExit would end the loop
            self._data_error = error if isinstance(error, Exception) else CollectionError(f"the data raised {error!r}")
            LOG.warning("the data has ended: %r", error)
            return True
        number = self.schedule.begin()
        group = Group(number, prompt, self.version, self._restored_answers.pop(prompt.position, {}))
        self.groups[number] = group
        oldest_allowed = self.version - self.schedule.slack
        self._tasks[number] = task = asyncio.get_running_loop().create_task(self._play(group, oldest_allowed))
        task.add_done_callback(lambda _: self._tasks.pop(number, None))
        return True

    # -- a group ----------------------------------------------------------------------------------------------------

    async def _play(self, group: Group, oldest_allowed: int) -> None:
        """Finish a group: complete, or failed and replaced."""
        settings = self._settings
        try:
            # an environment holds one sample, or the whole group
            episodes = await gather(
                [
                    self._environments.play(
                        self._policy,
                        partial(self._generate, group, oldest_allowed, start),
                        group.prompt.data,
                        settings.reward_timeout,
                        settings.max_turns,
                    )
                    for start in range(0, settings.group_size, self._environments.group_size)
                ]
            )
            if group.number not in self.groups:  # dropped meanwhile
                return
            rewarded = [turns for turns in episodes if turns]
            if len(rewarded) < min(2, len(episodes)):  # an environment of a whole group is one episode
                raise ValueError(
                    f"{len(episodes) - len(rewarded)} of {len(episodes)} answers have no reward, and a group needs at "
                    f"least {min(2, len(episodes))} that have: None was returned for them (is a `return` missing?), or "
                    "a harness made no call"
                )
            group.complete(rewarded, settings.only_last_turns, settings.track_policy_version)
            self.stats.left_out += len(episodes) - len(rewarded)
            self._progress_at, self._has_completed = time.monotonic(), True
            # the filter is the user's code, so in a thread, and the group may be dropped meanwhile
            keep = settings.group_filter
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
        self.wake()

    async def _generate(
        self, group: Group, oldest_allowed: int, start: int, request: SampleRequest, index: int
    ) -> Completion:
        """Ask the engine for one answer, to a sample of the environment whose first sample is ``start``."""
        position, sample = group.prompt.position, start + index
        asked, params = request.arguments, request.arguments["sampling_params"]
        # its own seed, since all answers of a group would be the same; vLLM's -1 means no seed, as None does
        if params.get("seed") not in (None, -1):
            seed = params["seed"] + position * self._settings.group_size + sample
            seed += len(group.turns.get(sample, ())) << 32  # beyond those of other answers
            asked = {**asked, "sampling_params": SamplingParameters({**params, "seed": seed})}
        # its own names, and, after a restore, the tokens that it had
        turn, arguments = group.ask(sample, f"{self._name}-{position}-{sample}", asked, self.version)
        if oldest_allowed > 0:
            arguments["min_version"] = max(oldest_allowed, arguments.get("min_version") or 0)
        try:
            async with self._room:
                self.stats.in_flight += 1
                try:
                    turn.answer = await self._answer(arguments)
                finally:
                    self.stats.in_flight -= 1
        except (EngineError, RuntimeError) as error:  # the latter from an engine that was shut down
            # at once, not by way of the group, which would count as one of max_failures
            if not isinstance(error, GROUP_ERRORS):
                self.fail(error)
            raise
        self._progress_at = time.monotonic()
        return turn.answer

    async def _answer(self, arguments: Mapping[str, Any]) -> Completion:
        while True:
            try:
                completion: Completion = await self._engine.agenerate(**arguments)
            except StaleReplicaError:  # the replica with the newest weights died; others will get them
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if completion.aborted:  # by somebody else, and half an answer is none
                raise EngineError(f"request {completion.request_id!r} was aborted", [completion])
            return completion

    # -- its end ----------------------------------------------------------------------------------------------------

    def _ready(self, group: Group) -> None:
        group.is_ready = True
        group.restored, group.turns = {}, {}
        self.stats.completed(group)
        self.schedule.ready(group.number)

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
        prompt = group.prompt
        self.stats.failed(prompt, error)
        LOG.warning(
            "group %d failed at prompt %d (%s): %s", group.number, prompt.position, prompt.excerpt, _told(error)
        )
        self._drop(group, "reward_timeout" if isinstance(error, EnvironmentTimeoutError) else "failed")
        most = self._settings.max_failures
        if not self._has_completed:  # a reward with a mistake in it fails at every prompt
            most = min(most, max(FIRST_FAILURES, self._settings.groups_per_batch))
        if self.stats.failures > most:
            error.add_note(f"at prompt {prompt.position}: {prompt.excerpt}")
            self.fail(error)

    def _drop(self, group: Group, reason: str) -> None:
        """Remove a group; another one starts in its place, unless too many were dropped in a row."""
        self.schedule.drop(group.number)
        del self.groups[group.number]
        self.stats.drops[reason] += 1
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

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(
        self, awaited: Future[TensorDictBase] | None = None, cut: Mapping[str, Completion] | None = None
    ) -> RolloutsState:
        """Return the position in the data, the running prompts with their answers so far, and the complete groups.

        Args:
            awaited: the batch that the trainer does not own yet.
            cut: partial answers, by request id.
        """
        self._check_version()  # an update may have come since the last round, and the ages count from here
        untaken = self._given[1] if self._given is not None and self._given[0] is awaited else []
        running = [group for group in self.groups.values() if not group.is_ready]
        complete = [group for group in (*untaken, *self.groups.values()) if group.is_ready]
        # groups of the last checkpoint that are not in line yet have become older too
        aged = self.version - self._restored_at if self._has_begun else 0
        ready = [group.state_dict(self.version) for group in complete]
        for entry in self._restored:
            ready.append({**entry, "age": entry["age"] + aged})
        answers = {group.prompt.position: group.answers(cut or {}) for group in running}
        return {
            "prompts": self._prompts.state_dict(group.prompt for group in running),
            "answers": {**self._restored_answers, **{position: of for position, of in answers.items() if of}},
            "ready": ready,
            "begun": self.schedule.begun,
        }

    def load_state_dict(self, state: RolloutsState) -> None:
        """Continue from a state: complete groups and running prompts are put in line in the order of the data."""
        if self._has_begun or self.error is not None:
            raise RuntimeError("load_state_dict must be called before the first batch is asked for")
        self._prompts.load_state_dict(state["prompts"])
        self._restored_answers = dict(state["answers"])
        self.schedule.begun = state["begun"]
        self._restored = deque(sorted(state["ready"], key=lambda entry: entry["position"]))

    # -- ends -------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End with an error, which the trainer raises."""
        self.error = self.error or error
        for task in list(self._tasks.values()):
            task.cancel()
        while self._asked:
            future = self._asked.popleft()
            if not future.done():
                future.set_exception(self.error)
        self.wake()

    async def stop(self, error: BaseException) -> None:
        """End all running work, with this error if there was none before."""
        tasks = list(self._tasks.values())
        self.fail(error)
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS)

    def _check_progress(self) -> None:
        """Fail after too long without progress while a batch is awaited."""
        limit = self._settings.heartbeat_timeout
        # waiting for nobody, or for an update that the trainer has yet to make, is no stall
        if not self._asked or self.pauses:
            self._progress_at = time.monotonic()
        elif not self._tasks and not self.schedule.may_begin:
            if not self._has_logged_wait and time.monotonic() - self._progress_at > UPDATE_SECONDS:
                self._has_logged_wait = True
                LOG.warning(
                    "start() has written all that max_staleness=%d allows before the weights change: it continues "
                    "after the next update",
                    self._settings.max_staleness,
                )
        elif limit is not None and time.monotonic() - self._progress_at > limit:
            running = [group.number for group in self.groups.values() if not group.is_ready]
            self.fail(
                CollectionStalledError(
                    f"nothing has moved for {limit:g} s: {len(running)} groups are running (the oldest is "
                    f"{min(running, default=None)}), {self.schedule.ready_groups} are ready, "
                    f"{self.schedule.groups_per_batch} make a batch; {self.stats.in_flight} answers are being "
                    f"generated; {self._engine.replica_table!r}"
                )
            )


def _told(error: Exception) -> str:
    """An error with its notes, which say in what it was raised; one that is raised again has them again."""
    return "; ".join([f"{error!r:.500}", *dict.fromkeys(getattr(error, "__notes__", ()))])


def _sets_signals(error: BaseException | None) -> bool:
    """Whether a signal handler was set outside the main thread; Math-Verify has a message of its own for that."""
    while error is not None:
        if isinstance(error, ValueError) and any(message in str(error) for message in NO_SIGNALS):
            return True
        error = error.__cause__
    return False
