"""From the arguments of one ``generate`` call to the requests of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_moe.modules.backends.replica import Request
from torchrl_moe.modules.serving.prompts import Prompt

__all__ = ["check_timeout", "common_fields", "make_request", "one_each"]


def common_fields(
    sampling_params: Any, lora_request: Any, prompt_adapter_request: Any, guided_options: Any, priority: int
) -> dict[str, Any]:
    """Return the fields that all requests of a call share.

    Raises:
        ValueError: a prompt adapter.
    """
    if prompt_adapter_request is not None:
        raise ValueError("prompt_adapter_request must be None: vLLM has dropped prompt adapters. Use a LoRA request.")
    return {
        "sampling_params": sampling_params,
        "lora_request": lora_request,
        "guided_options": guided_options,
        "priority": priority,
    }


def make_request(prompt: Prompt, **fields: Any) -> Request:
    """Return the request of one prompt, text or token ids."""
    if isinstance(prompt, str):
        return Request(prompt=prompt, **fields)
    return Request(prompt_token_ids=prompt, **fields)


def one_each(values: str | Sequence[str] | None, count: int, name: str) -> list[str] | None:
    """Return one name per prompt, or ``None`` for none at all.

    Raises:
        ValueError: another number of them, or a request id twice.
    """
    if values is None:
        return None
    listed = [values] if isinstance(values, str) else list(values)
    if len(listed) != count:
        raise ValueError(f"{name} must have one entry per prompt: got {len(listed)} for {count} prompts")
    if name == "request_ids" and len(set(listed)) != count:
        raise ValueError("request_ids must differ from each other: an abort names a request by its id")
    return listed


def check_timeout(seconds: float | None) -> float | None:
    """Return it, or raise ``ValueError`` if it is not positive."""
    if seconds is not None and seconds <= 0:
        raise ValueError(f"timeout_seconds must be positive or None, got {seconds:g}")
    return seconds
