"""``HardwareConfig``: the machines that a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["HardwareConfig"]


@dataclass(kw_only=True)
class HardwareConfig:
    """What a plan is made for; a run does not read it.

    Attributes:
        gpu_gb: memory of a GPU, in 10^9 bytes.
        host_gb: memory of a host.
        gpus_per_host: number of GPUs of a host, for the trainer's hosts and the engine's.
        trainer_gpus: number of ranks that ``torchrun`` would start.
        expert_imbalance: tokens of the busiest rank under expert parallelism, as a multiple of the mean; the real value
            depends on the router, and is at most the number of such ranks.
        links: name -> 10^9 bytes per second, of the links that weights may be sent over.
    """

    gpu_gb: float = 80.0
    host_gb: float = 1000.0
    gpus_per_host: int = 8
    trainer_gpus: int = 1
    expert_imbalance: float = 2.0
    links: dict[str, float] = field(
        default_factory=lambda: {
            "NVLink (one direction)": 450.0,
            "PCIe 5 x16": 63.0,
            "InfiniBand 400 Gb/s": 50.0,
            "Ethernet 100 Gb/s": 12.5,
            "Ethernet 10 Gb/s": 1.25,
            "NVMe disk": 5.0,
        }
    )
