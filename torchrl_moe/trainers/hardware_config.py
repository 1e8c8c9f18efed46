"""``HardwareConfig``: the machines that a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_moe.trainers.settings import Settings, setting

__all__ = ["HardwareConfig"]


LINKS = {
    "NVLink (one direction)": 450.0,
    "PCIe 5 x16": 63.0,
    "InfiniBand 400 Gb/s": 50.0,
    "Ethernet 100 Gb/s": 12.5,
    "Ethernet 10 Gb/s": 1.25,
    "NVMe disk": 5.0,
}


@dataclass(kw_only=True)
class HardwareConfig(Settings, group="hardware"):
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

    gpu_gb: float = setting(80.0, above=0)
    host_gb: float = setting(1000.0, above=0)
    gpus_per_host: int = setting(8, least=1)
    trainer_gpus: int = setting(1, least=1)
    expert_imbalance: float = setting(2.0, above=0)
    links: dict[str, float] = setting(LINKS, above=0)
