"""From the arguments of one ``generate`` call to the requests of replicas, and where each may go."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from torchrl_moe._checks import check_bool, check_instance, check_number, shown
from torchrl_moe._errors import RouteValueError
from torchrl_moe.modules.backends.replica import Completion, OnResume, Request
from torchrl_moe.modules.backends.sampling_fields import check_answers, check_fields, check_object, check_text
from torchrl_moe.modules.serving.fault_policy import FaultPolicy
from torchrl_moe.modules.serving.prompts import Prompt, PromptBatch
from torchrl_moe.modules.serving.resumption import request_to_resume

__all__ = [
    "Placement",
    "check_service",
    "check_timeout",
    "common_fields",
    "integers",
    "make_request",
    "one_each",
    "placements",
    "rows_each",
]

T = TypeVar("T")
MOST_BYTES = 1 << 31  # of routes: a million tokens of the largest models
MOST = 2**31 - 1  # of a priority: engines compare them with times


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a request may go: a replica by its index, the version it needs, and the context for strategies."""

    actor_index: int | None = None
    session_id: str | None = None
    min_version: int | None = None
    group_id: str | None = None
    request_context: Mapping[str, Any] | None = None


def placements(
    count: int,
    *,
    actor_index: int | None = None,
    session_ids: Any = None,
    min_version: Any = None,
    group_ids: Any = None,
    request_context: Any = None,
) -> list[Placement]:
    """Return the placement of each request of a call.

    Args:
        count: requests.
        actor_index: the replica of all of them.
        session_ids: a name for each, or ``None``.
        min_version: an int or ``None``, for all or for each.
        group_ids: a name for each, or ``None``.
        request_context: a mapping or ``None``, for all or for each.

    Raises:
        ValueError: a list of another length, or an ``actor_index`` that is none.
        TypeError: an entry of another type; the message names it.
    """
    check_number("actor_index", actor_index, whole=True, none=True)
    nobody = [None] * count
    sessions = one_each(session_ids, count, "session_ids") or nobody
    groups = one_each(group_ids, count, "group_ids") or nobody
    versions = _for_each(min_version, count, "min_version", lambda one, name: None if one is None else _int(one, name))
    contexts = _for_each(request_context, count, "request_context", _mapping)
    return [
        Placement(
            actor_index=actor_index, session_id=session, min_version=version, group_id=group, request_context=context
        )
        for session, version, group, context in zip(sessions, versions, groups, contexts, strict=True)
    ]


def common_fields(
    count: int,
    longest: int | None,
    sampling_params: Any,
    lora_request: Any,
    prompt_adapter_request: Any,
    guided_options: Any,
    return_routed_experts: bool,
    on_resume: OnResume | None,
) -> dict[str, Any]:
    """Return the fields that all ``count`` requests of a call share; ``longest`` is the engine's ``max_model_len``.

    Raises:
        ValueError: a sampling parameter of a wrong type or out of range, too many answers, a prompt adapter, or an
            unknown ``on_resume``.
    """
    check_fields(sampling_params, longest)
    check_answers(sampling_params, count)
    check_bool("return_routed_experts", return_routed_experts)
    for name, value in (("lora_request", lora_request), ("guided_options_request", guided_options)):
        check_object(name, value)
    if on_resume not in (None, *get_args(OnResume)):
        raise ValueError(f"on_resume must be None or one of {get_args(OnResume)}, got {on_resume!r}")
    if prompt_adapter_request is not None:
        raise ValueError("prompt_adapter_request must be None: vLLM has dropped prompt adapters. Use a LoRA request.")
    return {
        "sampling_params": sampling_params,
        "lora_request": lora_request,
        "guided_options": guided_options,
        "return_routed_experts": return_routed_experts,
        "on_resume": on_resume,
    }


def make_request(prompt: Prompt, **fields: Any) -> Request:
    """Return the request of one prompt: text, token ids, or a completion to resume."""
    if isinstance(prompt, Completion):
        return request_to_resume(prompt, **fields)
    if isinstance(prompt, str):
        return Request(prompt=prompt, **fields)
    return Request(prompt_token_ids=prompt, **fields)


def rows_each(values: Any, batch: PromptBatch) -> list[NDArray[Any] | None]:
    """Return the routes that each prompt must follow: the array for one prompt, a list for several.

    Args:
        values: an array, tensor or ``RoutedExperts``, ``[rows, L, K]``, or a list with one of them or ``None`` per
            prompt; ``None`` for no routes.
        batch: the prompts.

    Raises:
        ValueError: another number of them.
        RouteValueError: not an array of integers.
        TypeError: for several prompts not a list.
    """
    count = len(batch.prompts)
    if values is None:
        return [None] * count
    if not batch.single and not _is_list(values):
        raise TypeError(f"routed_experts must be a list with an entry per prompt, got {type(values).__name__}")
    given = [values] if batch.single else list(values)
    if len(given) != count:
        raise ValueError(f"routed_experts must have one entry per prompt: got {len(given)} for {count} prompts")
    return [None if one is None else _rows(one, i) for i, one in enumerate(given)]


def _rows(value: Any, position: int) -> NDArray[Any]:
    full = getattr(value, "full", value)
    try:
        rows = np.asarray(full.detach().cpu() if hasattr(full, "detach") else full)
    except (TypeError, ValueError, RuntimeError) as error:  # bfloat16, rows of different lengths, a meta tensor
        raise RouteValueError(f"routed_experts[{position}] must be an array of integers: {error}") from error
    if rows.dtype.kind not in "iu":
        kind = type(value).__name__ if rows.dtype.kind == "O" else f"{type(value).__name__} of {rows.dtype}"
        raise RouteValueError(f"routed_experts[{position}] must be an array of integers, got {kind}")
    if np.ma.is_masked(full):
        raise RouteValueError(f"routed_experts[{position}] has masked entries: fill them, with -1 where nothing is set")
    if rows.nbytes > MOST_BYTES:  # before a view of few bytes becomes as many
        raise RouteValueError(f"routed_experts[{position}] has {rows.nbytes} bytes, {MOST_BYTES} at most: {rows.shape}")
    return rows.astype(rows.dtype.newbyteorder("="), copy=False)


def one_each(values: Any, count: int, name: str) -> list[Any] | None:
    """Return one name per prompt, or ``None`` for no names. Session and group numbers become text.

    Raises:
        ValueError: another number of them, or a request id twice.
        TypeError: a name that is neither text nor an int, nor ``None`` for a prompt without session or group.
    """
    if values is None:
        return None
    are_ids = name == "request_ids"
    single = isinstance(values, str) or not _is_list(values)
    listed = _for_each([values] if single else values, count, name, _request_id if are_ids else _name)
    if are_ids and len(set(listed)) != count:
        raise ValueError("request_ids must differ from each other: an abort names a request by its id")
    return listed


def integers(value: Any, count: int, name: str) -> list[int]:
    """Return one int of at most 31 bits per prompt: the same for all, or those of a list, array or tensor.

    Raises:
        ValueError: another number of them, or a larger one.
        TypeError: a value is not an int.
    """
    found = _for_each(value, count, name, _int)
    for one in found:
        check_number(name, one, -MOST, MOST, whole=True)
    return found


def _is_list(value: Any) -> bool:
    if isinstance(value, str | bytes | Mapping):
        return False
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0


def _for_each(value: Any, count: int, name: str, check: Callable[[Any, str], T]) -> list[T]:
    """Return a checked value per prompt: the one for all, or those of a list."""
    if not _is_list(value):
        return [check(value, name)] * count
    listed = value.tolist() if hasattr(value, "tolist") else value
    if len(listed) != count:
        raise ValueError(f"{name} must have one entry per prompt: got {len(listed)} for {count} prompts")
    return [check(one, f"{name}[{i}]") for i, one in enumerate(listed)]


def _int(value: Any, name: str, kind: str = "an int") -> int:
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} must be {kind}, got {shown(value)}")


def _name(value: Any, name: str) -> str | None:
    return value if value is None or isinstance(value, str) else str(_int(value, name, "text, an int or None"))


def _request_id(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, got {shown(value)}")
    check_text(name, value)
    return value


def _mapping(value: Any, name: str) -> Mapping[str, Any] | None:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping or None, got {value!r}")
    return value


def check_service(sampling_params: Any, metrics: Any, max_concurrent_requests: Any, faults: Any) -> None:
    """Raise ``ValueError`` for a setting of a service that is none, before anything is started for it."""
    check_fields(sampling_params)
    check_bool("metrics", metrics)
    if max_concurrent_requests != "auto":
        check_number("max_concurrent_requests", max_concurrent_requests, 1, whole=True, none=True, hint="Or 'auto'.")
    check_instance("faults", faults, FaultPolicy, none=True)


def check_timeout(seconds: float | None) -> float | None:
    """Return it, or raise ``ValueError`` if it is no positive number; an infinite one is no limit."""
    check_number("timeout_seconds", seconds, above=0, none=True, infinite=True)
    return None if seconds == math.inf else seconds
