"""Seconds and memory of work on a device, and the device's peak rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch

__all__ = ["Cost", "Device"]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Per run: seconds, and the peak growth of allocated memory in bytes, 0 on a CPU."""

    seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    @property
    def time(self) -> float:
        """The median, in seconds."""
        return median(self.seconds)

    def __str__(self) -> str:
        memory = f"{max(self.memory) / 2**30:.2f} GiB" if any(self.memory) else "memory not measured"
        return f"{1e3 * self.time:.1f} ms ({1e3 * min(self.seconds):.1f} to {1e3 * max(self.seconds):.1f}), {memory}"


class Device:
    """A CUDA device, or the CPU.

    Args:
        name: ``"cuda"`` or ``"cpu"``.
        repeats: runs of each piece of work, after a warm-up run.
    """

    def __init__(self, name: str, repeats: int) -> None:
        self.device = torch.device(name)
        self.repeats = repeats
        self.is_gpu = self.device.type == "cuda"

    def __str__(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.is_gpu else "CPU: not a measurement of a GPU"

    def measure(self, *works: Callable[[], object]) -> list[Cost]:
        """Run the pieces of work in turn, and return the cost of each."""
        costs = [Cost() for _ in works]
        for run in range(self.repeats + 1):
            for cost, work in zip(costs, works, strict=True):
                seconds, memory = self._once(work)
                if run:
                    cost.seconds.append(seconds)
                    cost.memory.append(memory)
        return costs

    def _once(self, work: Callable[[], object]) -> tuple[float, int]:
        before = 0
        if self.is_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        work()
        if self.is_gpu:
            torch.cuda.synchronize()
            return time.perf_counter() - start, torch.cuda.max_memory_allocated() - before
        return time.perf_counter() - start, 0

    def roofline(self, rows: int) -> tuple[float, float]:
        """Return the FLOP/s of a product of bfloat16 matrices ``[rows, rows]``, and the bytes/s of copying one."""
        a, b = (torch.randn(rows, rows, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        product, copy = self.measure(lambda: a @ b, lambda: b.copy_(a))
        return 2 * rows**3 / product.time, 2 * a.numel() * a.element_size() / copy.time
