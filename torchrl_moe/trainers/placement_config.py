"""``PlacementConfig``: how ranks share a model."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_moe._checks import LONGEST
from torchrl_moe.trainers.settings import Settings, setting

__all__ = ["PlacementConfig"]


@dataclass(kw_only=True)
class PlacementConfig(Settings, group="placement"):
    """How the ranks that a launcher starts share the model. FSDP2 shards it over the remaining ranks.

    Attributes:
        tensor_parallel: number of ranks that split each layer, and see the same samples.
        expert_parallel: number of ranks that own different experts: a multiple of ``tensor_parallel`` that divides the
            number of ranks of a copy.
        replicate: number of copies of the sharded model (HSDP), for example one per node.
        cpu_offload: whether weights, gradients and optimizer are kept in host memory.
        reshard_after_forward: whether a layer's gathered weights are freed after its forward pass, and gathered again
            for its backward pass; ``False`` needs more memory and less communication.
        timeout: seconds that one rank waits for another before the run ends with an error that names it.
        collective_timeout: seconds that a collective may take, in the default process group, if it is made here, and in
            the model's groups. During a weight sync, collectives also wait for the weight store, so it must be above
            ``engine.sync.timeout_seconds``.
    """

    tensor_parallel: int = setting(1, least=1)
    expert_parallel: int = setting(1, least=1)
    replicate: int = setting(1, least=1)
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    timeout: float = setting(600.0, above=0, most=LONGEST)
    collective_timeout: float = setting(600.0, above=0, most=LONGEST)
