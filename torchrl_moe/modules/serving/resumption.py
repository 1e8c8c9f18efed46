"""Resuming completions: the requests for them, the checks, and those that need no engine.

Letters: P prompt tokens, G tokens so far, L decoder layers, K experts per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchrl_moe._checks import check_routes
from torchrl_moe._errors import RouteValueError
from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, Request
from torchrl_moe.modules.backends.request_routes import rows_of_answer

__all__ = ["check_resume", "request_to_resume", "whole"]


def request_to_resume(completion: Completion, **fields: Any) -> Request:
    """Return the request that finishes a completion; one without tokens starts from its prompt."""
    ids = completion.prompt_token_ids.astype(np.int32)
    if not completion.aborted or any(len(output.token_ids) for output in completion.outputs):
        return Request(prompt_token_ids=ids, resume=completion, **fields)
    if completion.prompt is not None:
        return Request(prompt=completion.prompt, **fields)
    return Request(prompt_token_ids=ids, **fields)


def whole(request: Request) -> Completion | None:
    """Return the answer of a request whose completion is already complete."""
    given = request.resume
    return None if given is None or given.aborted else given


def check_resume(request: Request, position: int, layout: RoutingLayout | None) -> None:
    """Check that a completion to resume fits the engine's routers and the request's parameters.

    Args:
        request: resumes a completion, or does not.
        position: of the completion in the user's list.
        layout: the engine's routers; ``None`` if it captures no routes.

    Raises:
        ValueError: it does not fit.
    """
    given = request.resume
    if given is None or whole(request) is not None:
        return
    answers = request.param("n") or 1
    if [output.index for output in given.outputs] != list(range(answers)):
        raise ValueError(
            f"resume[{position}] has {len(given.outputs)} answers, but sampling_params ask for n={answers}: pass those "
            "that it started with"
        )
    for output in given.outputs:
        if len(output.token_ids) and (wrong := _wrong(request, given, output, layout)):
            raise ValueError(f"resume[{position}], answer {output.index}: {wrong}")


def _wrong(request: Request, given: Completion, output: CompletionOutput, layout: RoutingLayout | None) -> str:
    tokens, prompt = len(output.token_ids), len(given.prompt_token_ids)
    kept = None if output.kept is None else output.kept.sizes
    values = {"policy_versions": output.policy_versions, "logprobs": output.logprobs, "kept": kept}
    lengths = {name: len(value) for name, value in values.items() if value is not None}
    if not prompt or any(length != tokens for length in lengths.values()):
        return f"no completion of an engine: {prompt} prompt tokens, {tokens} tokens, lengths {lengths}"
    if output.kept is not None and np.abs(output.kept.sizes).sum() != len(output.kept.ids):
        named, said = len(output.kept.ids), int(np.abs(output.kept.sizes).sum())
        return f"no completion of an engine: it has {named} kept ids, and their sizes say {said}"
    if output.logprobs is None and request.param("logprobs") is not None:
        return "it has no log-probs, which sampling_params ask for: pass those that it started with"
    if layout is None or not request.return_routed_experts:
        return ""
    if output.routed_experts is None:
        return "it has no routes: pass return_routed_experts=False, as when it started"
    rows = output.routed_experts
    expected = (prompt + tokens - 1, layout.num_layers, layout.top_k)
    if rows.shape != expected:
        return f"its routes have shape {list(rows.shape)}, but this engine gives {list(expected)}"
    if rows.dtype.kind not in "ui" or (rows.size and not 0 <= rows.min() <= rows.max() < layout.num_experts):
        held = f"{rows.min()}..{rows.max()}" if rows.size else "none"
        return f"its routes are {held} of {rows.dtype}, but this engine has experts 0..{layout.num_experts - 1}"
    try:
        check_routes(torch.from_numpy(rows_of_answer(rows, layout)), layout.moe_layers, layout.num_experts)
    except RouteValueError as error:
        return str(error)
    return ""
