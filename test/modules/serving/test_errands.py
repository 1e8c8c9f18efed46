"""What a call keeps of its requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torchrl_moe._errors import ReplicaDiedError
from torchrl_moe.modules.backends.replica import Request
from torchrl_moe.modules.serving.errands import Errand, Progress


def errand(params: Any = None, **fields: Any) -> Errand:
    fields.setdefault("prompt_token_ids", np.array([1, 2], np.int32))
    return Errand(3, Request(request_id="r", sampling_params=params, **fields))


def test_deaths_are_counted_and_the_last_one_is_told() -> None:
    one = errand()
    assert [one.died(ReplicaDiedError(name)) for name in ("first", "second")] == [1, 2]
    error = one.given_up([None])
    assert str(error) == "request 3 ('r') was given up: 2 replicas died under it. The last one: second"
    assert error.partial == [None]


@pytest.mark.parametrize("params", [{"n": 2, "logprobs": 0}, SimpleNamespace(n=2, logprobs=0)], ids=["dict", "object"])
def test_an_answer_without_an_engine_has_the_shapes_of_one(params: Any) -> None:
    completion = errand(params).cut_short()
    assert (completion.request_id, completion.aborted, completion.prompt_token_ids.tolist()) == ("r", True, [1, 2])
    assert [output.index for output in completion.outputs] == [0, 1]
    for output in completion.outputs:
        assert (output.token_ids.dtype, output.policy_versions.dtype) == (np.int64, np.int32)
        assert (len(output.token_ids), len(output.policy_versions), output.text) == (0, 0, "")
        assert output.logprobs is not None
        assert (output.logprobs.dtype, output.logprobs.shape) == (np.float32, (0,))


def test_an_answer_without_an_engine_to_a_text_has_no_ids() -> None:
    completion = errand(None, prompt_token_ids=None, prompt="hi").cut_short()
    assert (completion.prompt, len(completion.prompt_token_ids)) == ("hi", 0)
    assert [output.logprobs for output in completion.outputs] == [None]


def test_the_bar_counts_requests_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [SimpleNamespace(token_ids=[0] * 5)]
    with Progress(2, shown=True) as progress:
        progress.add([SimpleNamespace(outputs=outputs)])  # type: ignore[list-item]
        progress.add([SimpleNamespace(outputs=outputs)])  # type: ignore[list-item]
        assert progress._tokens == 10
    text = capsys.readouterr().err
    assert "2/2" in text
    assert "tok/s" in text
    with Progress(2, shown=False) as progress:
        progress.add([SimpleNamespace(outputs=outputs)])  # type: ignore[list-item]
    assert capsys.readouterr().err == ""
