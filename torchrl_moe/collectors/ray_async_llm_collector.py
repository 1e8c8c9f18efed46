"""``RayAsyncLLMCollector``: an ``AsyncLLMCollector`` in a Ray actor; several of them share one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from torchrl_moe.collectors.arguments import EnvLike
from torchrl_moe.collectors.episode import MAX_TURNS
from torchrl_moe.collectors.ray_collector import RayCollector
from torchrl_moe.collectors.schedule import Order
from torchrl_moe.collectors.settings import GroupFilter
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper

__all__ = ["RayAsyncLLMCollector"]


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
