"""``PlacementConfig``: how ranks share a model."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PlacementConfig"]


@dataclass(kw_only=True)
class PlacementConfig:
    """How the ranks that a launcher starts share the model. All ranks that are left shard it by FSDP2.

    Attributes:
        tensor_parallel: ranks that split each layer, and see the same samples.
        expert_parallel: ranks that own different experts: a multiple of ``tensor_parallel`` that divides the ranks of
            a copy.
        replicate: copies of the sharded model (HSDP): one for each node, say.
        cpu_offload: whether weights, gradients and optimizer lie in the memory of the host.
        reshard_after_forward: whether a layer's weights are let go after its forward pass, and gathered again for its
            backward pass; ``False`` needs more memory and sends less.
        timeout: seconds that one rank waits for another before the run ends with an error that names it.
        collective_timeout: seconds that a collective may take: of the default process group, if it is made here, and
            of the model's groups. In those of a weight sync ranks wait for the weight store, too, so it must be above
            ``engine.sync.timeout_seconds``.
    """

    tensor_parallel: int = 1
    expert_parallel: int = 1
    replicate: int = 1
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    timeout: float = 600.0
    collective_timeout: float = 600.0
