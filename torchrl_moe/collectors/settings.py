"""The checked settings of an :class:`AsyncLLMCollector`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from tensordict import TensorDictBase

from torchrl_moe.collectors.episode import MAX_TURNS
from torchrl_moe.collectors.schedule import Order

__all__ = ["Settings"]

GroupFilter = Callable[[TensorDictBase], bool]
"""Whether to train on a group, ``[rows]``."""


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
        for name in ("group_size", "groups_per_batch", "max_turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.on_stale not in ("wait", "drop"):
            raise ValueError(f"on_stale must be 'wait' or 'drop', got {self.on_stale!r}")
        if self.over_sample > 1 and self.on_stale != "drop":
            raise ValueError(
                f"over_sample={self.over_sample} begins more groups than can be used in time: it needs on_stale='drop'"
            )
        if self.max_in_flight != "auto" and (isinstance(self.max_in_flight, str) or self.max_in_flight < 1):
            raise ValueError(f"max_in_flight must be 'auto' or at least 1, got {self.max_in_flight!r}")
        if self.max_failures < 0:
            raise ValueError(f"max_failures must be at least 0, got {self.max_failures}")
        if self.max_dropped_groups is not None and self.max_dropped_groups < 0:
            raise ValueError(f"max_dropped_groups must be at least 0, or None, got {self.max_dropped_groups}")
        for name in ("reward_timeout", "heartbeat_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name} must be above 0 seconds, or None, got {seconds}")

    def by_name(self) -> dict[str, Any]:
        """Return them as a mapping."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
