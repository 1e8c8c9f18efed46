"""What of a run's answers is over, and what stays of one that was cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from torchrl_moe.modules.backends.replica import CompletionOutput
from torchrl_moe.modules.backends.vllm.engine_requests import Part


def output(index: int, tokens: int, reason: str) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        token_ids=np.zeros(tokens, np.int64),
        text="",
        finish_reason=reason,
        policy_versions=np.zeros(tokens, np.int32),
    )


def params(**changes: Any) -> Any:
    plain = {"structured_outputs": None, "presence_penalty": 0.0, "frequency_penalty": 0.0, "bad_words": []}
    return SimpleNamespace(**{**plain, **changes})


def test_a_part_says_what_of_it_stays() -> None:
    part = Part("r", 3, cut=True, restarted={2})
    done, cut, empty, late = output(0, 2, "stop"), output(1, 2, "abort"), output(1, 0, "abort"), output(2, 2, "stop")
    assert [part.over(item) for item in (done, cut, empty, late)] == [True, False, False, False]
    assert [part.keeps(item, params()) for item in (done, cut, empty, late)] == [True, True, False, False]
    assert not part.keeps(cut, params(structured_outputs="a grammar"))
    assert Part("r", 1).over(output(0, 2, "abort"))
