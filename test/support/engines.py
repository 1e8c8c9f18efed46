"""The one real vLLM engine that tests share.

One takes two gigabytes, so there is never more than one alive, and tests that ask for the same engine run one after
another (``conftest.py`` sorts them).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.testing.tiny_moe import save_tiny_moe

SMALL: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}
SMALL |= {"kv_cache_memory_bytes": 1 << 26}
ADAPTED: dict[str, Any] = {"enable_lora": True, "lora_target_modules": ["qkv_proj", "o_proj"], "max_lora_rank": 8}
ADAPTED |= {"max_num_seqs": 1, "scheduling_policy": "priority"}
"""For requests with an adapter; and it runs one at a time, by priority."""


def start_engine(folder: Path, num_replicas: int = 1, **arguments: Any) -> AsyncVLLM:
    """Start a small engine of a model; ``arguments`` go before those of ``SMALL``."""
    return AsyncVLLM.from_pretrained(folder, num_replicas=num_replicas, **{**SMALL, **arguments})


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """A family of ``make_tiny_moe`` and what differs from ``SMALL``; equal specs share one engine."""

    family: str
    num_replicas: int
    arguments: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, family: str = "qwen3_moe", num_replicas: int = 1, **arguments: Any) -> EngineSpec:
        return cls(family, num_replicas, tuple(sorted(arguments.items())))


class EngineShelf:
    """Holds the engine that was asked for last."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self._make_folder = make_folder
        self._folders: dict[str, Path] = {}
        self._held: tuple[EngineSpec, AsyncVLLM] | None = None

    def folder(self, family: str) -> Path:
        """Return the folder of a family's model and tokenizer, saved once."""
        if family not in self._folders:
            self._folders[family] = save_tiny_moe(self._make_folder(family), family)
        return self._folders[family]

    def get(self, spec: EngineSpec) -> AsyncVLLM:
        """Return the engine of ``spec``, ending another one first."""
        if self._held is None or self._held[0] != spec or not self._held[1].is_running:
            self.clear()
            engine = start_engine(self.folder(spec.family), spec.num_replicas, **dict(spec.arguments))
            self._held = spec, engine
        return self._held[1]

    def clear(self) -> None:
        """End the engine, for a test that starts one of its own."""
        if self._held is not None:
            self._held[1].shutdown()
            self._held = None
