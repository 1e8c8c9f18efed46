"""``RayLLMCollector``: an ``LLMCollector`` in a Ray actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from torchrl_moe.collectors.arguments import EnvLike
from torchrl_moe.collectors.ray_collector import RayCollector

__all__ = ["RayLLMCollector"]


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
