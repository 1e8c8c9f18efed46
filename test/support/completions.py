"""Completions cut short by hand, and what makes two of them the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from torchrl_moe.modules.backends.replica import Completion, CompletionOutput

ARRAYS = ("token_ids", "policy_versions", "logprobs", "routed_experts")


def ascii_text(ids: Sequence[int]) -> str:
    return bytes(ids).decode()


def cut(completion: Completion, *tokens: int | None, decode: Callable[[list[int]], str] = ascii_text) -> Completion:
    """What there would be of a completion after so many tokens of each answer; ``None``: that one had finished."""
    prompt = len(completion.prompt_token_ids)
    outputs = [
        output if count is None else _cut(output, prompt, count, decode)
        for output, count in zip(completion.outputs, tokens, strict=True)
    ]
    return replace(completion, outputs=outputs)


def _cut(output: CompletionOutput, prompt: int, count: int, decode: Callable[[list[int]], str]) -> CompletionOutput:
    routes = output.routed_experts
    return replace(
        output,
        token_ids=output.token_ids[:count],
        policy_versions=output.policy_versions[:count],
        logprobs=None if output.logprobs is None or not count else output.logprobs[:count],
        routed_experts=None if routes is None or not count else routes[: prompt + count - 1],
        kept=None if output.kept is None or not count else output.kept.first(count),
        text=decode(output.token_ids[:count].tolist()),
        finish_reason="abort",
        stop_reason=None,
    )


def assert_same_answers(one: Completion, two: Completion) -> None:
    """All but the request id and the times."""
    assert one.prompt == two.prompt
    assert one.prompt_token_ids.tolist() == two.prompt_token_ids.tolist()
    assert len(one.outputs) == len(two.outputs)
    for left, right in zip(one.outputs, two.outputs, strict=True):
        assert (left.index, left.text) == (right.index, right.text)
        assert (left.finish_reason, left.stop_reason) == (right.finish_reason, right.stop_reason)
        for name in ARRAYS:
            _assert_equal(getattr(left, name), getattr(right, name))
        for name in ("ids", "sizes"):
            _assert_equal(getattr(left.kept, name, None), getattr(right.kept, name, None))


def _assert_equal(one: Any, two: Any) -> None:
    assert (one is None) == (two is None)
    if one is not None:
        np.testing.assert_array_equal(one, two)
        assert one.dtype == two.dtype
