"""The releases of vLLM that ``pyproject.toml`` allows: the first of each minor version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def releases() -> tuple[str, ...]:
    """Return them, the oldest first."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    (wanted,) = project["optional-dependencies"]["vllm"]
    limits = re.fullmatch(r"vllm>=0\.(\d+),<0\.(\d+)", wanted)
    assert limits is not None, f"{wanted!r} names no range of minor versions"
    return tuple(f"0.{minor}.0" for minor in range(int(limits[1]), int(limits[2])))
