"""The checked settings of an :class:`AsyncLLMCollector`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from tensordict import TensorDictBase

from torchrl_moe._checks import LONGEST, check_bool, check_number, shown
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
        for name, most in {"group_size": 1 << 16, "groups_per_batch": 1 << 20}.items():
            check_number(name, getattr(self, name), 1, most, whole=True)
        check_number("max_turns", self.max_turns, 1, whole=True)
        for name in ("only_last_turns", "track_policy_version"):
            check_bool(name, getattr(self, name))
        if self.on_stale not in ("wait", "drop"):
            raise ValueError(f"on_stale must be 'wait' or 'drop', got {self.on_stale!r}")
        if not callable(self.group_filter) and self.group_filter is not None:
            raise ValueError(f"group_filter must be a function of a group, or None, got {shown(self.group_filter)}.")
        check_number("over_sample", self.over_sample, 1, 100)
        if self.over_sample > 1 and self.on_stale != "drop":
            raise ValueError(
                f"over_sample={self.over_sample} begins more groups than can be used in time: it needs on_stale='drop'"
            )
        if self.max_in_flight != "auto":
            check_number("max_in_flight", self.max_in_flight, 1, whole=True, hint="'auto': as the engine admits.")
        check_number("max_failures", self.max_failures, 0, whole=True)
        check_number("max_dropped_groups", self.max_dropped_groups, 0, whole=True, none=True)
        for name in ("reward_timeout", "heartbeat_timeout"):
            check_number(name, getattr(self, name), above=0, most=LONGEST, none=True, hint="It is in seconds.")

    def by_name(self) -> dict[str, Any]:
        """Return them as a mapping."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
