"""The replicas of an engine one by one, under TorchRL's names for its actors' methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchrl_moe.modules.serving.fleet import CALL_SECONDS

__all__ = ["ActorHandle"]

WEIGHTS = "weights come by a sender, which checks them: VLLMWeightSyncScheme(...).create_sender()"
INSTEAD = {
    "collective_rpc_v0": "engine.collective_rpc(...) calls the workers of all replicas",
    "collective_rpc_v1": "engine.collective_rpc(...) calls the workers of all replicas",
    "init_weight_transfer_engine": WEIGHTS,
    "load_weights_from_storage": WEIGHTS,
    "sleep": "replicas sleep together: engine.sleep()",
    "update_weights_native": WEIGHTS,
    "wake_up": "replicas wake up together: engine.wake_up()",
}
"""Methods that TorchRL's actors have and a handle lacks -> what to do instead."""


@dataclass(frozen=True, repr=False)
class ActorHandle:
    """A handle of one replica of an engine: its methods run on this replica. ``engine.actors`` lists the handles.

    It is not a Ray actor: its methods are called as they are, without ``.remote``.
    """

    engine: Any
    index: int

    def generate(self, prompts: Any = None, sampling_params: Any = None, **kwargs: Any) -> Any:
        """Generate as the engine does; arguments as in :meth:`GenerationService.generate`, without ``actor_index``."""
        return self.engine.generate(prompts, sampling_params, actor_index=self.index, **kwargs)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return self.engine.get_tokenizer()

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that this driver has in flight there."""
        return int(self.engine.get_num_unfinished_requests(self.index))

    def get_cache_usage(self) -> float:
        """Return the share of KV-cache blocks in use, 0 to 1; NaN if it is dead or starting."""
        return float(self.engine.get_cache_usage(self.index))

    def get_world_size(self) -> int:
        """Return the number of its devices: tensor x pipeline x data parallel ranks."""
        info = self.engine.infos[0]
        return int(info.tensor_parallel_size * info.pipeline_parallel_size * info.data_parallel_size)

    def ready(self) -> bool:
        """Whether it would accept a request now."""
        return bool(self.engine.is_running and self.engine.replica_table[self.index].may_take)

    def reset_prefix_cache(self) -> bool:
        """Drop cached prefixes; return False if it could not, because requests are running."""
        table = self.engine.replica_table
        done = bool(table[self.index].replica.reset_prefix_cache(CALL_SECONDS))
        table.forget_prefixes(self.index)
        return done

    def __getattr__(self, name: str) -> Any:
        if name in INSTEAD:
            raise AttributeError(f"a replica of this engine has no {name}: {INSTEAD[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine.replica_table[self.index]!r})"
