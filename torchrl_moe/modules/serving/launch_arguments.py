"""What a service is launched with: arguments that are refused or translated before any process is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

__all__ = ["TIMEOUT_VARIABLE", "check_backend", "check_model", "default_timeout", "with_fp32_head"]

TIMEOUT_VARIABLE = "TORCHRL_VLLM_TIMEOUT_SECONDS"  # TorchRL's name
DEFAULT_TIMEOUT_SECONDS = 600.0


def with_fp32_head(overrides: Any) -> dict[str, Any]:
    """Return ``hf_overrides`` by which vLLM computes the last layer in float32."""
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ValueError("enable_fp32_output needs hf_overrides to be a mapping: have yours set head_dtype='float32'")
    return {**(overrides or {}), "head_dtype": "float32"}


def check_backend(backend: str, num_replicas: int, **of_ray: Any) -> None:
    """Refuse an unknown backend, no replica, and arguments that only Ray knows where it is not asked for."""
    if backend not in ("local", "ray"):
        raise ValueError(f"backend must be 'local' (child processes of this one) or 'ray' (actors), got {backend!r}")
    if num_replicas < 1:
        raise ValueError(f"num_replicas must be at least 1, got {num_replicas}")
    if backend == "local" and (given := [name for name, value in of_ray.items() if value is not None]):
        raise ValueError(f"{', '.join(given)} given with backend='local': only backend='ray' knows them")


def default_timeout() -> float:
    """Return the seconds that a start has, as the environment says."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_SECONDS))
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"the environment's {TIMEOUT_VARIABLE} must be a number of seconds, got {text!r}") from None


def check_model(path: str) -> str:
    """Refuse a folder without a model before any process is started; a hub name is vLLM's business."""
    looks_local = os.path.isabs(path) or path.startswith(".") or os.path.isdir(path)
    if looks_local and not os.path.isfile(os.path.join(path, "config.json")):
        state = "has no config.json" if os.path.isdir(path) else "does not exist"
        raise ValueError(f"no model at {path!r}: the folder {state}. Save one with model.save_pretrained(path).")
    return path
