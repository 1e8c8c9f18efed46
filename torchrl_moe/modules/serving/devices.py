"""Which GPUs each local replica gets: exclusive sets, cut from those that this process may see."""

from __future__ import annotations

import os

import torch

__all__ = ["device_sets", "visible_devices"]


def visible_devices() -> list[str]:
    """Return the names of the CUDA devices that this process may use, as ``CUDA_VISIBLE_DEVICES`` spells them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count)] if named is None else [name.strip() for name in named.split(",")]
    return names[:count]


def device_sets(visible: list[str], num_replicas: int, per_replica: int) -> list[str | None]:
    """Return one value of ``CUDA_VISIBLE_DEVICES`` per replica; ``None`` for all of them on a machine without GPUs.

    Raises:
        ValueError: there are GPUs, but too few.

    >>> device_sets(["0", "1", "2", "3"], num_replicas=2, per_replica=2)
    ['0,1', '2,3']
    >>> device_sets([], num_replicas=2, per_replica=1)
    [None, None]
    """
    if not visible:
        return [None] * num_replicas
    if num_replicas * per_replica > len(visible):
        raise ValueError(
            f"{num_replicas} replicas of {per_replica} GPU(s) need {num_replicas * per_replica}, but {len(visible)} "
            f"are visible ({', '.join(visible)}). Use fewer replicas or a smaller tensor_parallel_size."
        )
    return [",".join(visible[i * per_replica : (i + 1) * per_replica]) for i in range(num_replicas)]
