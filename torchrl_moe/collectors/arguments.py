"""How :class:`~torchrl_moe.collectors.AsyncLLMCollector` reads its arguments, and which values it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, TypeAlias

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_moe._checks import LONGEST, check_bool, check_number, shown
from torchrl_moe.collectors.environments import MAX_TURNS, EnvironmentPool, take_dataloader, with_batch_size
from torchrl_moe.collectors.schedule import Order
from torchrl_moe.collectors.workflow import EpisodeFunction, Workflow, is_episode_function
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper
from torchrl_moe.modules.serving.service import GenerationService

Policy: TypeAlias = "Callable[[TensorDictBase], TensorDictBase]"
GroupFilter: TypeAlias = "Callable[[TensorDictBase], bool]"
"""Whether to train on a group, ``[rows]``."""
Runs: TypeAlias = "EnvBase | EpisodeFunction | Workflow"
"""An environment, the async function that runs a sample, or what runs it in its own way."""
EnvLike: TypeAlias = "Runs | Callable[[], EnvBase]"


@dataclass(frozen=True, slots=True, kw_only=True)
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

    def by_name(self) -> dict[str, object]:
        # dataclasses.asdict would copy what the user gave, a filter with a lock in it, say
        return {field.name: getattr(self, field.name) for field in fields(self)}


def refuse(
    *,
    yield_completed_trajectories: bool | None,
    async_envs: bool | None,
    flatten_data: bool | None,
    queue: object,
    track_policy_version: object,
    on_weight_update: object,
) -> None:
    """Refuse values of TorchRL's arguments that have no meaning here."""
    # the other value of each changes nothing, so it is taken
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


def refuse_queue(queue: object) -> None:
    if queue is not None:
        raise ValueError("queue: it would lose the oldest data silently. Iterate, or pass replay_buffer=.")


def refuse_seed(policy: vLLMWrapper) -> None:
    """Refuse one seed for all answers: those to a prompt would be the same."""
    seed = policy.sampling_params.get("seed")
    # vLLM's -1 means no seed, as None does
    if seed not in (None, -1):
        raise ValueError(
            f"the policy samples with seed={seed}, so all answers to a prompt are the same: leave it out and seed the "
            "engine, collector.set_seed(seed), or use AsyncLLMCollector, which gives each answer a seed of its own"
        )


def refuse_version_tracker(track_policy_version: object) -> None:
    """Refuse TorchRL's transform, which would overwrite the versions in the rows."""
    if not isinstance(track_policy_version, bool):
        raise ValueError("track_policy_version: the rows carry the engine's versions; leave the transform out")


def one_env(env: EnvBase | Callable[[], EnvBase]) -> EnvBase:
    """Return the environment of a collector that has one."""
    # an environment is callable too, and an async function would return a coroutine
    env = env() if callable(env) and not isinstance(env, EnvBase) and not is_episode_function(env) else env
    if not isinstance(env, EnvBase):
        raise TypeError(
            f"env must be an environment or a callable that makes one, got {type(env).__name__}; async functions are "
            "played by AsyncLLMCollector"
        )
    return env


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


def engine_of(policy: Policy) -> GenerationService | None:
    """Return the engine behind a policy; ``None`` for a policy that is not ours."""
    return policy.engine if isinstance(policy, vLLMWrapper) else None


def policy_of(policy: Policy | None, factory: Callable[[], Policy] | None) -> vLLMWrapper:
    """Return the policy of a collector that asks the engine for one answer at a time."""
    policy = one_policy(policy, factory)
    if not isinstance(policy, vLLMWrapper):
        raise TypeError(f"the policy must be a torchrl_moe vLLMWrapper, got {type(policy).__name__}")
    if policy.num_samples is not None:
        raise ValueError(f"the policy has num_samples={policy.num_samples}: use the collector's group_size instead")
    return policy


class Source(NamedTuple):
    """Where samples come from."""

    env: Runs
    make: Callable[[], EnvBase] | None
    """Makes more environments; ``None``: the given one is copied."""
    dataloader: Iterable[object]
    group_size: int
    """Samples of a prompt; at least 1."""


def source_of(env: EnvLike, dataloader: Iterable[object] | None, group_size: int | None) -> Source:
    """Return where samples come from. Data and group size are those of the environment if they are not given."""
    check_number("group_size", group_size, 1, 1 << 16, whole=True, none=True)
    if is_episode_function(env):
        return Source(env, None, _data(dataloader), group_size or 1)
    if not isinstance(env, EnvBase) and not callable(env):
        got = type(env).__name__
        raise TypeError(f"env must be an environment, a callable that makes one, or an async function, got {got}")
    # one is made even of a factory: it says which data there are, and of what size the groups
    first, found, repeats = take_dataloader(env if isinstance(env, EnvBase) else env())
    size = group_size or repeats or 1
    make = None if isinstance(env, EnvBase) else lambda: with_batch_size(take_dataloader(env())[0], size)
    return Source(with_batch_size(first, size), make, _data(found if dataloader is None else dataloader), size)


def _data(dataloader: Iterable[object] | None) -> Iterable[object]:
    if dataloader is None:
        raise ValueError("there is no data: pass dataloader=, or an environment that has a DataLoadingPrimer")
    return dataloader


def pool_of(env: Runs, make: Callable[[], EnvBase] | None) -> EnvironmentPool | Workflow:
    """Return what runs samples, in environments or by an async function."""
    if isinstance(env, EnvBase):
        return EnvironmentPool(env, make)
    return env if isinstance(env, Workflow) else Workflow(env)


def groups_in_batch(groups: int | None, turns: int | None, group_size: int) -> int:
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
